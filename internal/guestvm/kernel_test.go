// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// fakeImage makes a file with a bzImage's setup header.
func fakeImage(version string) []byte {
	head := make([]byte, 0x400)
	copy(head[0x202:], "HdrS")
	binary.LittleEndian.PutUint16(head[0x20e:], 0x100)
	copy(head[0x300:], version+" (who@where) #1\x00")
	return head
}

// fakeModule makes the smallest ELF file with a .modinfo section: header, .modinfo, section names, three headers.
func fakeModule(depends string) []byte {
	info := "license=GPL\x00depends=" + depends + "\x00name=x\x00"
	names := "\x00.modinfo\x00.shstrtab\x00"
	at := uint64(64)
	var b bytes.Buffer
	binary.Write(&b, binary.LittleEndian, elf.Header64{
		Ident: [16]byte{0x7f, 'E', 'L', 'F', 2, 1, 1}, Type: uint16(elf.ET_REL), Machine: uint16(elf.EM_X86_64), Version: 1,
		Shoff: at + uint64(len(info)+len(names)), Ehsize: 64, Shentsize: 64, Shnum: 3, Shstrndx: 2,
	})
	b.WriteString(info + names)
	for _, s := range []elf.Section64{
		{},
		{Name: 1, Type: uint32(elf.SHT_PROGBITS), Off: at, Size: uint64(len(info))},
		{Name: 10, Type: uint32(elf.SHT_STRTAB), Off: at + uint64(len(info)), Size: uint64(len(names))},
	} {
		binary.Write(&b, binary.LittleEndian, s)
	}
	return b.Bytes()
}

// fakeTree writes an unpacked kernel package; a module's value is what it depends on.
func fakeTree(t *testing.T, root, version string, builtin []string, modules map[string]string) {
	t.Helper()
	dir := filepath.Join(root, "lib/modules", version)
	files := map[string][]byte{
		filepath.Join(root, "boot/vmlinuz-"+version): fakeImage(version),
		filepath.Join(dir, "modules.builtin"):        []byte(strings.Join(builtin, "\n")),
	}
	for name, depends := range modules {
		files[filepath.Join(dir, "kernel/drivers", name)] = fakeModule(depends)
	}
	for name, data := range files {
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// debianModules depend on each other as in Linux 6.1.
var debianModules = map[string]string{
	"virtio.ko": "virtio_ring", "virtio_ring.ko": "", "virtio_pci_modern_dev.ko": "", "virtio_pci_legacy_dev.ko": "",
	"virtio_pci.ko": "virtio_ring,virtio_pci_modern_dev,virtio_pci_legacy_dev,virtio", "virtio_blk.ko": "virtio,virtio_ring",
	"dm-mod.ko": "", "dm-log.ko": "dm-mod", "loop-a.ko": "loop-b", "loop-b.ko": "loop-a",
}

func TestModulesComeAfterWhatTheyNeed(t *testing.T) {
	root := t.TempDir()
	fakeTree(t, root, "6.1.0", []string{"kernel/drivers/net/tun.ko"}, debianModules)
	k, err := FindKernel(root)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ extra, want []string }{
		{nil, []string{"virtio_ring", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio", "virtio_pci", "virtio_blk"}},
		{[]string{"dm_log", "tun", "dm-mod"}, []string{"dm_mod", "dm_log"}},
		{[]string{"loop-a"}, []string{"loop_b", "loop_a"}},
	} {
		files, err := k.moduleFiles(c.extra...)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, f := range files {
			names = append(names, moduleName(f))
		}
		if diff := cmp.Diff(c.want, names[len(names)-len(c.want):]); diff != "" {
			t.Errorf("%v: %s", c.extra, diff)
		}
	}
	if _, err := k.moduleFiles("nosuch"); err == nil || !strings.Contains(err.Error(), "find module nosuch") {
		t.Errorf("unknown module: got %v", err)
	}
}

func TestFindKernel(t *testing.T) {
	builtin := []string{"kernel/virtio_pci.ko", "kernel/virtio_blk.ko"}
	newest := t.TempDir()
	fakeTree(t, newest, "6.9.1", builtin, nil)
	fakeTree(t, newest, "6.10.0", nil, debianModules)
	fakeTree(t, newest, "6.11.0", nil, nil) // no virtio_blk
	fakeTree(t, newest, "6.12.0", nil, map[string]string{"virtio_pci.ko.zst": "", "virtio_blk.ko.zst": ""})
	zst := t.TempDir()
	fakeTree(t, zst, "6.12.0", nil, map[string]string{"virtio_pci.ko.zst": "", "virtio_blk.ko.zst": ""})
	bare := filepath.Join(t.TempDir(), "vmlinuz")
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(bare, fakeImage("6.6.6"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(text, []byte("not a kernel"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, path, version, err string }{
		{"newest usable of a directory", newest, "6.10.0", ""},
		{"image with modules beside it", filepath.Join(newest, "boot/vmlinuz-6.9.1"), "6.9.1", ""},
		{"image without modules", bare, "6.6.6", ""},
		{"compressed modules", filepath.Join(zst, "boot/vmlinuz-6.12.0"), "", "compressed modules (.zst)"},
		{"only compressed modules", zst, "", "compressed modules (.zst)"},
		{"not a kernel", text, "", "not an x86 bzImage"},
		{"empty directory", t.TempDir(), "", "no usable boot/vmlinuz-*"},
		{"nothing", "/nonexistent/vmlinuz", "", "no such file"},
	} {
		k, err := FindKernel(c.path)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: got %v, want %q", c.name, err, c.err)
			}
		} else if err != nil || k.Version != c.version {
			t.Errorf("%s: got %+v, %v; want version %s", c.name, k, err, c.version)
		}
	}
}

func TestFindKernelLooksInTheCache(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	fakeTree(t, filepath.Join(cache, "sluice/kernel/linux-image-6.1.0-9-cloud-amd64"), "9999.9.0", nil, debianModules)
	fakeTree(t, filepath.Join(cache, "sluice/kernel/linux-image-6.1.0-57-cloud-amd64"), "9999.57.0", nil, debianModules)
	k, err := FindKernel("")
	if err != nil {
		t.Fatal(err)
	}
	if _, hostErr := newestKernel("/"); hostErr == nil {
		t.Skipf("this host has a kernel of its own (%s), which goes first", k.Image)
	}
	if k.Version != "9999.57.0" {
		t.Errorf("got %+v", k)
	}
}

func TestCompareVersions(t *testing.T) {
	want := []string{"", "4.19", "5.10.0-8", "6.1.0-9-cloud", "6.1.0-57-cloud", "6.9", "6.10-rc1", "6.10.1", "10.0"}
	got := slices.Clone(want)
	slices.Reverse(got)
	slices.SortFunc(got, compareVersions)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// FuzzImageVersion: a foreign file is refused or read, never more.
func FuzzImageVersion(f *testing.F) {
	f.Add(fakeImage("6.1.0"))
	f.Add(fakeImage("../../x"))
	f.Add([]byte("HdrS"))
	f.Fuzz(func(t *testing.T, head []byte) {
		version, err := parseImageVersion(head, "fuzz")
		if (err == nil) != (version != "") || strings.Contains(version, "/") {
			t.Errorf("got %q, %v", version, err)
		}
	})
}
