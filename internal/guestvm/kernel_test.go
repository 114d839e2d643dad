// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"os"
	"os/exec"
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
	depends, soft, _ := strings.Cut(depends, ";")
	info := "license=GPL\x00depends=" + depends + "\x00softdep=pre: " + soft + " post: later\x00name=x\x00"
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

// fakeTree writes an unpacked kernel package; a module's value is what it depends on, after a semicolon what it would
// like to.
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
	"ext4.ko": "crc16;crypto-crc32c nosuch", "crc16.ko": "", "crc32c_generic.ko": "",
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
		{[]string{"ext4"}, []string{"crc32c_generic", "crc16", "ext4"}},
		{nil, []string{"virtio_ring", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio", "virtio_pci", "virtio_blk"}},
		{[]string{"dm_log", "tun", "dm-mod"}, []string{"dm_mod", "dm_log"}},
		{[]string{"loop-a"}, []string{"loop_b", "loop_a"}},
	} {
		modules, err := k.loadOrder(c.extra...)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, m := range modules {
			names = append(names, m.name)
		}
		if diff := cmp.Diff(c.want, names[len(names)-len(c.want):]); diff != "" {
			t.Errorf("%v: %s", c.extra, diff)
		}
	}
	if _, err := k.loadOrder("nosuch"); err == nil || !strings.Contains(err.Error(), "find module nosuch") {
		t.Errorf("unknown module: got %v", err)
	}
}

func TestCompressedModulesAreUnpacked(t *testing.T) {
	for _, tool := range []string{"gzip", "xz", "zstd"} {
		t.Run(tool, func(t *testing.T) {
			if _, err := exec.LookPath(tool); err != nil {
				t.Skipf("needs %s: %v", tool, err)
			}
			root := t.TempDir()
			fakeTree(t, root, "6.12.0", nil, debianModules)
			files, err := filepath.Glob(filepath.Join(root, "lib/modules/6.12.0/kernel/drivers/*.ko"))
			if err != nil || len(files) == 0 {
				t.Fatal(files, err)
			}
			for _, f := range files {
				if out, err := exec.Command(tool, "-q", f).CombinedOutput(); err != nil {
					t.Fatalf("%v: %s", err, out)
				}
				if err := os.RemoveAll(f); err != nil { // zstd keeps its input
					t.Fatal(err)
				}
			}
			k, err := FindKernel(root)
			if err != nil {
				t.Fatal(err)
			}
			modules, err := k.loadOrder()
			if err != nil || len(modules) != 6 || !bytes.Equal(modules[0].data, fakeModule("")) {
				t.Errorf("got %d modules, %v", len(modules), err)
			}
		})
	}
}

func TestMissingDecompressorIsNamed(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if _, err := readModule("/x/virtio.ko.zst"); err == nil || !strings.Contains(err.Error(), "install zstd") {
		t.Errorf("got %v", err)
	}
}

func TestFindKernel(t *testing.T) {
	builtin := []string{"kernel/virtio_pci.ko", "kernel/virtio_blk.ko"}
	newest := t.TempDir()
	fakeTree(t, newest, "6.9.1", builtin, nil)
	fakeTree(t, newest, "6.10.0", nil, debianModules)
	fakeTree(t, newest, "6.11.0", nil, nil) // no virtio_blk
	fakeTree(t, newest, "6.12.0", nil, map[string]string{"virtio_pci.ko.lzma": "", "virtio_blk.ko.lzma": ""})
	odd := t.TempDir()
	fakeTree(t, odd, "6.12.0", nil, map[string]string{"virtio_pci.ko.lzma": "", "virtio_blk.ko.lzma": ""})
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
		{"broken modules", filepath.Join(odd, "boot/vmlinuz-6.12.0"), "", "unknown kind of compression .lzma"},
		{"only broken modules", odd, "", "unknown kind of compression .lzma"},
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

func TestFindKernelLooksInTheCacheFirst(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	fakeTree(t, filepath.Join(cache, "sluice/kernel/linux-image-6.1.0-9-cloud-amd64"), "6.1.9", nil, debianModules)
	fakeTree(t, filepath.Join(cache, "sluice/kernel/linux-image-6.1.0-57-cloud-amd64"), "6.1.57", nil, debianModules)
	k, err := FindKernel("")
	if err != nil {
		t.Fatal(err)
	}
	if k.Version != "6.1.57" {
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

// FuzzModuleInfo: a foreign file is refused or read, never more.
func FuzzModuleInfo(f *testing.F) {
	f.Add(fakeModule("a,b;c d"))
	f.Add([]byte("\x7fELF"))
	f.Fuzz(func(t *testing.T, data []byte) { parseModuleInfo(data) })
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
