// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// driverModules are what a virtio disk on PCI needs; the rest follows from what they depend on. What the kernel has
// built in is skipped.
var driverModules = []string{"virtio_pci", "virtio_blk"}

// A moduleIndex knows the modules of one kernel by name. Dependencies are read from the modules themselves: a
// package that is only unpacked has no modules.dep, which depmod writes at installation.
type moduleIndex struct {
	dir     string
	files   map[string]string
	builtin map[string]bool
}

func indexModules(dir string) (*moduleIndex, error) {
	x := &moduleIndex{dir: dir, files: map[string]string{}, builtin: map[string]bool{}}
	list, err := os.ReadFile(filepath.Join(dir, "modules.builtin"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read list of built-in modules: %w", err)
	}
	for _, line := range strings.Fields(string(list)) {
		x.builtin[moduleName(line)] = true
	}
	err = filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() && strings.Contains(d.Name(), ".ko") {
			x.files[moduleName(p)] = p
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("list modules: %w", err)
	}
	return x, nil
}

// moduleName is the kernel's name of a module file: without directory and suffix, with _ for -.
func moduleName(file string) string {
	name, _, _ := strings.Cut(filepath.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

// A module is one kernel module as it is handed to the guest: not compressed.
type module struct {
	name string
	data []byte
}

// order returns the named modules and all that they depend on, each after what it needs.
func (x *moduleIndex) order(names ...string) ([]module, error) {
	var modules []module
	done := map[string]bool{}
	var visit func(name string) error
	visit = func(name string) error {
		name = moduleName(name)
		if done[name] || x.builtin[name] {
			return nil
		}
		done[name] = true // before its dependencies: a cycle, which the kernel could not load either, ends here
		file, ok := x.files[name]
		if !ok {
			return fmt.Errorf("find module %s: not in %s", name, x.dir)
		}
		data, err := readModule(file)
		if err != nil {
			return fmt.Errorf("read module %s: %w", file, err)
		}
		info, err := parseModuleInfo(data)
		if err != nil {
			return fmt.Errorf("read module %s: %w", file, err)
		}
		for _, d := range append(x.soft(info), info.depends...) {
			if err := visit(d); err != nil {
				return err
			}
		}
		modules = append(modules, module{name, data})
		return nil
	}
	for _, name := range names {
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return modules, nil
}

// soft returns those modules, of what a module would rather have before it, that are there. The kernel would ask
// modprobe for them by alias; the one kind that matters to a disk is a checksum of the crypto layer, "crypto-crc32c".
func (x *moduleIndex) soft(info moduleInfo) []string {
	var names []string
	for _, name := range info.softPre {
		name = moduleName(strings.TrimPrefix(name, "crypto-"))
		for _, candidate := range []string{name, name + "_generic"} {
			if x.files[candidate] != "" {
				names = append(names, candidate)
			}
		}
	}
	return names
}

// decompressors are the programs that unpack a module to stdout, in the order to try them.
var decompressors = map[string][][]string{
	".gz":  {{"gzip", "-dc"}, {"busybox", "zcat"}},
	".xz":  {{"xz", "-dc"}, {"busybox", "xzcat"}},
	".zst": {{"zstd", "-dcq"}},
}

// readModule reads a module and unpacks it if need be: distributions compress theirs in several ways, and busybox's
// insmod does not know all of them.
func readModule(file string) ([]byte, error) {
	ext := filepath.Ext(file)
	if ext == ".ko" {
		return os.ReadFile(file)
	}
	err := fmt.Errorf("unknown kind of compression %s", ext)
	for _, argv := range decompressors[ext] {
		var path string
		if path, err = exec.LookPath(argv[0]); err != nil {
			err = fmt.Errorf("unpack: %w (install %s)", err, argv[0])
			continue
		}
		var out []byte
		if out, err = exec.Command(path, append(argv[1:], file)...).Output(); err == nil {
			return out, nil
		}
		err = fmt.Errorf("unpack with %s: %w", path, err)
	}
	return nil, err
}

// A moduleInfo is what a module says of itself.
type moduleInfo struct {
	depends []string // must be loaded before
	softPre []string // should be
}

// parseModuleInfo reads the .modinfo section: strings "key=value" that end with NUL.
func parseModuleInfo(data []byte) (moduleInfo, error) {
	var m moduleInfo
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return m, err
	}
	section := f.Section(".modinfo")
	if section == nil {
		return m, errors.New("no .modinfo section")
	}
	info, err := section.Data()
	if err != nil {
		return m, err
	}
	for _, field := range strings.Split(string(info), "\x00") {
		key, value, _ := strings.Cut(field, "=")
		switch {
		case key == "depends" && value != "":
			m.depends = strings.Split(value, ",")
		case key == "softdep":
			pre, _, _ := strings.Cut(value, "post:")
			m.softPre = append(m.softPre, strings.Fields(strings.TrimPrefix(pre, "pre:"))...)
		}
	}
	return m, nil
}
