// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
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

// order returns the files of the named modules and of all that they depend on, each after what it needs.
func (x *moduleIndex) order(names ...string) ([]string, error) {
	var files []string
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
		depends, err := moduleDepends(file)
		if err != nil {
			return err
		}
		for _, d := range depends {
			if err := visit(d); err != nil {
				return err
			}
		}
		files = append(files, file)
		return nil
	}
	for _, name := range names {
		if err := visit(name); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// moduleDepends reads what a module says of itself in its .modinfo section: strings "key=value" that end with NUL.
func moduleDepends(file string) ([]string, error) {
	if ext := filepath.Ext(file); ext != ".ko" {
		return nil, fmt.Errorf("read module %s: compressed modules (%s) are not supported (use Debian's cloud kernel, or unpack the modules)", file, ext)
	}
	f, err := elf.Open(file)
	if err != nil {
		return nil, fmt.Errorf("read module %s: %w", file, err)
	}
	defer f.Close()
	section := f.Section(".modinfo")
	if section == nil {
		return nil, fmt.Errorf("read module %s: no .modinfo section", file)
	}
	info, err := section.Data()
	if err != nil {
		return nil, fmt.Errorf("read module %s: %w", file, err)
	}
	for _, field := range bytes.Split(info, []byte{0}) {
		if value, ok := strings.CutPrefix(string(field), "depends="); ok && value != "" {
			return strings.Split(value, ","), nil
		}
	}
	return nil, nil
}
