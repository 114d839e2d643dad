// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// A Kernel is a bootable x86-64 Linux and its modules.
type Kernel struct {
	Image   string // bzImage
	Modules string // directory lib/modules/VERSION; empty: none found, everything needed is taken to be built in
	Version string // as uname -r says it
}

// CacheDir returns where kernels are kept: $XDG_CACHE_HOME/sluice/kernel, or ~/.cache/sluice/kernel. It is not made.
// Safe for concurrent use.
func CacheDir() (string, error) {
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find cache directory: %w", err)
	}
	return filepath.Join(base, "sluice", "kernel"), nil
}

// EnsureKernel returns FindKernel's kernel, or fetches one into the cache when none is found and none was named.
// Safe for concurrent use.
func EnsureKernel(ctx context.Context, path string) (*Kernel, error) {
	k, err := FindKernel(path)
	if err == nil || path != "" {
		return k, err
	}
	dir, dirErr := CacheDir()
	if dirErr != nil {
		return nil, errors.Join(err, dirErr)
	}
	k, fetchErr := FetchKernel(ctx, dir)
	if fetchErr != nil {
		return nil, errors.Join(err, fetchErr)
	}
	return k, nil
}

// FindKernel returns the kernel at path, which names a bzImage or a directory like an unpacked kernel package
// (boot/vmlinuz-*, lib/modules or usr/lib/modules). With an empty path it takes the newest of the cache, then of the
// host, that can be read and has the virtio disk driver: the cache's first, because it is small and the same everywhere,
// where a distribution's own may lack ext4 until a module is loaded. Safe for concurrent use.
func FindKernel(path string) (*Kernel, error) {
	if path == "" {
		return findAnyKernel()
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("find kernel: %w", err)
	}
	if st.IsDir() {
		return newestKernel(path)
	}
	return loadKernel(path)
}

func findAnyKernel() (*Kernel, error) {
	var roots []string
	if cache, err := CacheDir(); err == nil {
		packages, _ := filepath.Glob(filepath.Join(cache, "linux-image-*"))
		slices.SortFunc(packages, func(a, b string) int { return compareVersions(b, a) })
		roots = packages
	}
	roots = append(roots, "/")
	var failed []error
	for _, root := range roots {
		k, err := newestKernel(root)
		if err == nil {
			return k, nil
		}
		failed = append(failed, err)
	}
	return nil, errors.Join(failed...)
}

// newestKernel looks at ROOT/boot and skips what cannot be used.
func newestKernel(root string) (*Kernel, error) {
	images, _ := filepath.Glob(filepath.Join(root, "boot", "vmlinuz-*"))
	slices.SortFunc(images, func(a, b string) int { return compareVersions(b, a) })
	failed := []error{fmt.Errorf("find kernel: no usable boot/vmlinuz-* in %s", root)}
	for _, image := range images {
		k, err := loadKernel(image)
		if err == nil && k.Modules == "" {
			err = fmt.Errorf("no modules of %s beside it", k.Version)
		}
		if err == nil {
			return k, nil
		}
		failed = append(failed, fmt.Errorf("skip %s: %w", image, err))
	}
	return nil, errors.Join(failed...)
}

// loadKernel looks at one image and finds its modules: beside it, then in the host's directories.
func loadKernel(image string) (*Kernel, error) {
	version, err := imageVersion(image)
	if err != nil {
		return nil, err
	}
	k := &Kernel{Image: image, Version: version}
	root := filepath.Dir(filepath.Dir(image))
	for _, dir := range []string{
		filepath.Join(root, "lib/modules", version),
		filepath.Join(root, "usr/lib/modules", version),
		filepath.Join("/lib/modules", version),
	} {
		if st, err := os.Stat(dir); err == nil && st.IsDir() {
			k.Modules = dir
			break
		}
	}
	_, err = k.loadOrder()
	return k, err
}

// loadOrder returns the disk driver and the extra modules with all that they need, in the order to load them.
func (k *Kernel) loadOrder(extra ...string) ([]module, error) {
	if k.Modules == "" {
		if len(extra) > 0 {
			return nil, fmt.Errorf("find modules %s: kernel %s has no module directory", strings.Join(extra, ", "), k.Image)
		}
		return nil, nil
	}
	x, err := indexModules(k.Modules)
	if err != nil {
		return nil, err
	}
	return x.order(slices.Concat(driverModules, extra)...)
}

// imageVersion reads the version out of a bzImage (kernel: Documentation/arch/x86/boot.rst, the setup header: magic
// HdrS at 0x202, at 0x20e the offset of the version string, counted from 0x200).
func imageVersion(image string) (string, error) {
	f, err := os.Open(image)
	if err != nil {
		return "", fmt.Errorf("read kernel: %w", err)
	}
	defer f.Close()
	head := make([]byte, 64<<10) // the real-mode part, at most 64 sectors, holds the string
	n, _ := f.ReadAt(head, 0)
	return parseImageVersion(head[:n], image)
}

func parseImageVersion(head []byte, image string) (string, error) {
	bad := fmt.Errorf("read kernel %s: not an x86 bzImage", image)
	if len(head) < 0x210 || string(head[0x202:0x206]) != "HdrS" {
		return "", bad
	}
	at := int(binary.LittleEndian.Uint16(head[0x20e:])) + 0x200
	if at == 0x200 || at >= len(head) {
		return "", bad
	}
	text, _, _ := bytes.Cut(head[at:], []byte{0})
	version, _, _ := strings.Cut(string(text), " ")
	if version == "" || len(version) > 128 || strings.ContainsAny(version, "/\n") {
		return "", bad
	}
	return version, nil
}

// compareVersions orders by runs of digits as numbers, all else as text, so that 6.10 is newer than 6.9.
func compareVersions(a, b string) int {
	for a != "" && b != "" {
		var x, y string
		x, a = cutRun(a)
		y, b = cutRun(b)
		m, errX := strconv.ParseUint(x, 10, 64)
		n, errY := strconv.ParseUint(y, 10, 64)
		order := cmp.Compare(x, y)
		if errX == nil && errY == nil {
			order = cmp.Compare(m, n)
		}
		if order != 0 {
			return order
		}
	}
	return cmp.Compare(a, b)
}

// cutRun cuts the leading run of digits, or of anything else, off s.
func cutRun(s string) (run, rest string) {
	digit := unicode.IsDigit(rune(s[0]))
	for i := range len(s) {
		if unicode.IsDigit(rune(s[i])) != digit {
			return s[:i], s[i:]
		}
	}
	return s, ""
}
