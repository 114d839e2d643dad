// SPDX-License-Identifier: Apache-2.0

// Package guest holds the tests that need a whole virtual machine: a real Linux under QEMU on disks that a real sluice
// process serves. They look at what only both together show: what a guest believes of its write cache and what reaches
// the host for it, what is left of a guest's writes when QEMU or the server dies, how the ring libraries fare on the
// guest's older kernel.
//
// The tests run in parallel, as many at a time as there are CPUs. None of them looks at speed, and each waits for minutes before it
// gives up: a boot takes 2 s on a quiet machine and has taken 90 s on a loaded one.
//
// They need QEMU, a static busybox, a kernel, fio, e2fsprogs and strace (scripts/deps.sh), and skip with the reason
// where one is missing.
package guest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/guestvm"
)

// patience bounds every wait for one event.
const patience = 4 * time.Minute

// built is what all tests share, made once.
var built struct {
	dir     string
	sluice  string // the program under test
	missing error  // why no guest can be booted
	kernel  *guestvm.Kernel
	minimal string // initramfs with the writer
}

func TestMain(m *testing.M) { os.Exit(testMain(m)) }

func testMain(m *testing.M) int {
	var err error
	if built.dir, err = os.MkdirTemp("", "sluice-guest-test-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(built.dir)
	if err := prepare(); err != nil {
		fmt.Fprintln(os.Stderr, "prepare guest tests:", err)
		return 1
	}
	return m.Run()
}

func prepare() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	if built.missing = guestvm.Check(ctx); built.missing != nil {
		return nil
	}
	if built.kernel, err = guestvm.EnsureKernel(ctx, ""); err != nil {
		return err
	}
	built.sluice = filepath.Join(built.dir, "sluice")
	if err := build(ctx, "build", "-o", built.sluice, "../../cmd/sluice"); err != nil {
		return err
	}
	writer := filepath.Join(built.dir, "writer")
	if err := build(ctx, "build", "-o", writer, "./writer"); err != nil {
		return err
	}
	built.minimal = filepath.Join(built.dir, "minimal.cpio")
	i := guestvm.Initramfs{Kernel: built.kernel, Files: []guestvm.File{{Path: "/usr/bin/writer", Source: writer}}}
	return i.WriteFile(ctx, built.minimal)
}

// build runs the go command for static programs that the guest, too, can run.
func build(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go %v: %w: %s", args, err, out)
	}
	return nil
}

// withTools builds, once, an initramfs with fio and mke2fs next to the writer. It is large: fio has 55 libraries.
var withTools = sync.OnceValues(func() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	i := guestvm.Initramfs{Kernel: built.kernel, Files: []guestvm.File{
		{Path: "/usr/bin/writer", Source: filepath.Join(built.dir, "writer")}}}
	for _, program := range []string{"fio", "mke2fs"} {
		path, err := exec.LookPath(program)
		if err != nil {
			if path, err = exec.LookPath("/usr/sbin/" + program); err != nil {
				return "", fmt.Errorf("%w (install fio and e2fsprogs: scripts/deps.sh)", err)
			}
		}
		i.Binaries = append(i.Binaries, path)
	}
	name := filepath.Join(built.dir, "tools.cpio")
	return name, i.WriteFile(ctx, name)
})

// needGuest makes the test one of the parallel ones, and skips it where no guest can be booted.
func needGuest(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("boots guests, which -short leaves out")
	}
	if built.missing != nil {
		t.Skip(built.missing)
	}
	t.Parallel()
}

// needTools is the initramfs with fio and mke2fs.
func needTools(t *testing.T) string {
	t.Helper()
	name, err := withTools()
	if err != nil {
		t.Skipf("needs fio and mke2fs for the guest: %v", err)
	}
	return name
}
