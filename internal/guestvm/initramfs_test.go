// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseLdd(t *testing.T) {
	got, err := parseLdd(`	linux-vdso.so.1 (0x00007ffd)
	libaio.so.1 => /lib/x86_64-linux-gnu/libaio.so.1 (0x00007f27e46c6000)
	libceph.so.2 => /usr/lib/x86_64-linux-gnu/ceph/libceph.so.2 (0x00007f)
	/lib64/ld-linux-x86-64.so.2 (0x00007f27e470a000)
`)
	want := []string{"/lib/x86_64-linux-gnu/libaio.so.1", "/usr/lib/x86_64-linux-gnu/ceph/libceph.so.2", "/lib64/ld-linux-x86-64.so.2"}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v %s", err, diff)
	}
	if _, err := parseLdd("\tlibgone.so.1 => not found\n"); err == nil || !strings.Contains(err.Error(), "libgone.so.1") {
		t.Errorf("missing library: got %v", err)
	}
}

// The init script and the splitter must agree on the marker lines, and busybox must be able to read the script.
func TestInitScript(t *testing.T) {
	for _, want := range []string{
		"#!/bin/busybox sh\n", `echo "` + markerWord + `$nonce $* $uptime"`, "say init\n", "say start\n", "say exit $status\n", "say fail ",
		". " + guestBootConf + "\n", "<" + guestModuleList + "\n", ". " + guestScript, "--install -s " + guestDir + "/bin\n", ">/dev/ttyS1 2>&1\n",
	} {
		if !strings.Contains(initScript, want) {
			t.Errorf("init.sh has no %q", want)
		}
	}
	if _, err := os.Stat(defaultBusybox); err != nil {
		t.Skipf("needs busybox for the syntax: %v", err)
	}
	cmd := exec.Command(defaultBusybox, "sh", "-n")
	cmd.Stdin = strings.NewReader(initScript)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// staticProgram returns a file that passes for a static busybox.
func staticProgram(t *testing.T) string {
	t.Helper()
	name := filepath.Join(t.TempDir(), "busybox")
	if err := os.WriteFile(name, fakeModule(""), 0o755); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestInitramfsHoldsWhatIsAskedFor(t *testing.T) {
	root := t.TempDir()
	fakeTree(t, root, "6.1.0", nil, debianModules)
	k, err := FindKernel(root)
	if err != nil {
		t.Fatal(err)
	}
	i := Initramfs{Kernel: k, Busybox: staticProgram(t), Modules: []string{"dm-log"}, Files: []File{{Path: "/etc/x", Data: []byte("data of x")}}}
	name := filepath.Join(t.TempDir(), "initrd")
	if err := i.WriteFile(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	archive, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"init\x00", "bin/busybox\x00", "etc/x\x00", "data of x", initScript,
		"/sluice/modules/virtio_blk.ko\n/sluice/modules/dm_mod.ko\n/sluice/modules/dm_log.ko\n"} {
		if !bytes.Contains(archive, []byte(want)) {
			t.Errorf("%q is not in the archive", want)
		}
	}
	var again bytes.Buffer
	if err := i.Build(t.Context(), &again); err != nil || !bytes.Equal(again.Bytes(), archive) {
		t.Errorf("built again it differs: %v", err)
	}
}

func TestInitramfsRefuses(t *testing.T) {
	root := t.TempDir()
	fakeTree(t, root, "6.1.0", nil, debianModules)
	k, err := FindKernel(root)
	if err != nil {
		t.Fatal(err)
	}
	busybox := staticProgram(t)
	for _, c := range []struct {
		name string
		i    Initramfs
		err  string
	}{
		{"no kernel", Initramfs{Busybox: busybox}, "no kernel"},
		{"busybox is missing", Initramfs{Kernel: k, Busybox: "/nonexistent"}, "install busybox-static"},
		{"busybox is a script", Initramfs{Kernel: k, Busybox: "/etc/passwd"}, "install busybox-static"},
		{"unknown module", Initramfs{Kernel: k, Busybox: busybox, Modules: []string{"nosuch"}}, "find module nosuch"},
		{"relative program", Initramfs{Kernel: k, Busybox: busybox, Binaries: []string{"fio"}}, "not an absolute path"},
		{"relative guest path", Initramfs{Kernel: k, Busybox: busybox, Files: []File{{Path: "x"}}}, "not absolute"},
		{"file below a mount", Initramfs{Kernel: k, Busybox: busybox, Files: []File{{Path: "/tmp/x"}}}, "init mounts a file system over /tmp"},
		{"file over init", Initramfs{Kernel: k, Busybox: busybox, Files: []File{{Path: "/init"}}}, "there already"},
		{"directory as a file", Initramfs{Kernel: k, Busybox: busybox, Files: []File{{Path: "/x", Source: "/proc"}}}, "not a regular file"},
	} {
		dir := t.TempDir()
		name := filepath.Join(dir, "initrd")
		err := c.i.WriteFile(t.Context(), name)
		if err == nil || !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.err)
		}
		if left, _ := os.ReadDir(dir); len(left) != 0 {
			t.Errorf("%s: %v stays behind", c.name, left)
		}
	}
}

func TestBootImageLeavesNothingBehind(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	base := filepath.Join(t.TempDir(), "base")
	if err := os.WriteFile(base, []byte("12345"), 0o600); err != nil {
		t.Fatal(err)
	}
	c := Config{Initrd: []string{base}, Script: "the script"}
	f, err := c.bootImage(t.Context(), nonce)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	image := make([]byte, 1<<16)
	n, _ := f.ReadAt(image, 0)
	if image = image[:n]; !bytes.HasPrefix(image, []byte("12345\x00\x00\x00070701")) || !bytes.Contains(image, []byte("the script")) {
		t.Errorf("got %q", image)
	}
	c.Initrd = []string{"/nonexistent"}
	if _, err := c.bootImage(t.Context(), nonce); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing base: got %v", err)
	}
	if left, _ := os.ReadDir(temp); len(left) != 0 {
		t.Errorf("%v stays behind", left)
	}
}
