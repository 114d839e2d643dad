// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

//go:embed init.sh
var initScript string

// Where the parts of the harness lie in the guest.
const (
	guestDir        = "/sluice"
	guestModuleDir  = guestDir + "/modules"
	guestModuleList = guestDir + "/modules.list" // paths in the order to load them
	guestBootConf   = guestDir + "/boot.conf"    // shell variables of this boot, see init.sh
	guestScript     = guestDir + "/script"
)

// defaultBusybox is where Debian's package busybox-static puts it.
const defaultBusybox = "/bin/busybox"

// A File is one file for the guest. Its contents are Data, or those of the host's file Source when that is set.
type File struct {
	Path   string      // in the guest, absolute; not below /tmp, /dev, /proc or /sys, where init mounts
	Data   []byte      // contents
	Source string      // host file; symbolic links are followed
	Mode   fs.FileMode // permissions; 0 means those of Source, or 0644
}

// An Initramfs describes the guest's user space: busybox, the kernel modules of a virtio disk, an init that runs the
// script of each boot, and what else is packed. The zero value plus a Kernel works. Packed programs are
// found before busybox's applets of the same name. The archive is not compressed: unpacking gzip costs an emulated guest more
// time (0.9 s for fio and its libraries) than the bytes cost anybody.
type Initramfs struct {
	Kernel   *Kernel
	Busybox  string   // a static busybox for x86-64; empty means /bin/busybox
	Modules  []string // further modules by name, loaded after the disk driver; ext4, say, is built in or not
	Files    []File
	Binaries []string // host programs, packed at their own path together with their shared libraries
}

// Build writes the archive to w. Equal inputs give equal bytes. Safe for concurrent use.
func (i *Initramfs) Build(ctx context.Context, w io.Writer) error {
	out := bufio.NewWriterSize(w, 256<<10)
	if err := i.archive(ctx, out); err != nil {
		return fmt.Errorf("build initramfs: %w", err)
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("write initramfs: %w", err)
	}
	return nil
}

// WriteFile builds into a file, which appears whole or not at all. Safe for concurrent use.
func (i *Initramfs) WriteFile(ctx context.Context, name string) error {
	f, err := os.CreateTemp(filepath.Dir(name), ".initramfs-*")
	if err != nil {
		return fmt.Errorf("create initramfs: %w", err)
	}
	defer os.Remove(f.Name()) // fails after the rename, as it should
	defer f.Close()
	if err := i.Build(ctx, f); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("write initramfs: %w", err)
	}
	if err := os.Rename(f.Name(), name); err != nil {
		return fmt.Errorf("write initramfs: %w", err)
	}
	return nil
}

func (i *Initramfs) archive(ctx context.Context, w io.Writer) error {
	files, err := i.collect(ctx)
	if err != nil {
		return err
	}
	c := newCPIOWriter(w)
	// Mount points first: init makes no directories.
	for _, dir := range []string{"/proc", "/sys", "/dev", "/tmp", "/run", "/root", "/mnt", "/bin", "/sbin", "/usr/bin", "/usr/sbin", guestDir + "/bin"} {
		if err := c.Dir(dir, 0o755); err != nil {
			return err
		}
	}
	return packFiles(ctx, c, files)
}

// packFiles adds the files and ends the archive.
func packFiles(ctx context.Context, c *cpioWriter, files []File) error {
	for _, f := range files {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := packFile(c, f); err != nil {
			return err
		}
	}
	return c.Close()
}

// collect lists every file of the archive.
func (i *Initramfs) collect(ctx context.Context) ([]File, error) {
	if i.Kernel == nil {
		return nil, fmt.Errorf("no kernel is named")
	}
	busybox := i.Busybox
	if busybox == "" {
		busybox = defaultBusybox
	}
	dynamic, err := checkGuestBinary(busybox)
	if err != nil {
		return nil, fmt.Errorf("%w (install busybox-static)", err)
	}
	if dynamic {
		return nil, fmt.Errorf("pack %s: not a static program (install busybox-static)", busybox)
	}
	files := []File{
		{Path: "/init", Data: []byte(initScript), Mode: 0o755},
		{Path: "/bin/busybox", Source: busybox, Mode: 0o755},
	}
	modules, err := i.collectModules()
	if err != nil {
		return nil, err
	}
	binaries, err := i.collectBinaries(ctx)
	if err != nil {
		return nil, err
	}
	files = append(files, modules...)
	files = append(files, binaries...)
	return append(files, i.Files...), nil
}

func (i *Initramfs) collectModules() ([]File, error) {
	modules, err := i.Kernel.loadOrder(i.Modules...)
	if err != nil {
		return nil, err
	}
	var files []File
	var list bytes.Buffer
	for _, m := range modules {
		guest := path.Join(guestModuleDir, m.name+".ko")
		fmt.Fprintln(&list, guest)
		files = append(files, File{Path: guest, Data: m.data, Mode: 0o644})
	}
	return append(files, File{Path: guestModuleList, Data: list.Bytes(), Mode: 0o644}), nil
}

// collectBinaries gives each program and each library once, at the path that the dynamic linker looks at.
func (i *Initramfs) collectBinaries(ctx context.Context) ([]File, error) {
	var files []File
	packed := map[string]bool{}
	add := func(name string) {
		if !packed[name] {
			packed[name] = true
			files = append(files, File{Path: name, Source: name})
		}
	}
	for _, name := range i.Binaries {
		if !filepath.IsAbs(name) {
			return nil, fmt.Errorf("pack %s: not an absolute path", name)
		}
		dynamic, err := checkGuestBinary(name)
		if err != nil {
			return nil, err
		}
		add(filepath.Clean(name))
		if !dynamic {
			continue
		}
		libs, err := sharedLibraries(ctx, name)
		if err != nil {
			return nil, err
		}
		for _, lib := range libs {
			add(filepath.Clean(lib))
		}
	}
	return files, nil
}

func packFile(c *cpioWriter, f File) error {
	if !strings.HasPrefix(f.Path, "/") {
		return fmt.Errorf("pack %q: the path in the guest is not absolute", f.Path)
	}
	for _, mount := range []string{"/tmp/", "/dev/", "/proc/", "/sys/"} {
		if strings.HasPrefix(path.Clean(f.Path), mount) {
			return fmt.Errorf("pack %q: init mounts a file system over %s", f.Path, path.Clean(mount))
		}
	}
	if f.Source == "" {
		mode := f.Mode
		if mode == 0 {
			mode = 0o644
		}
		return c.File(f.Path, mode, int64(len(f.Data)), bytes.NewReader(f.Data))
	}
	in, err := os.Open(f.Source)
	if err != nil {
		return fmt.Errorf("pack %s: %w", f.Path, err)
	}
	defer in.Close()
	st, err := in.Stat()
	if err != nil {
		return fmt.Errorf("pack %s: %w", f.Path, err)
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("pack %s: %s is not a regular file", f.Path, f.Source)
	}
	mode := f.Mode
	if mode == 0 {
		mode = st.Mode().Perm()
	}
	return c.File(f.Path, mode, st.Size(), in)
}
