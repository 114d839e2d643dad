// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"errors"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
)

func TestProcessAndMachine(t *testing.T) {
	soft, hard, err := Getrlimit(RLIMIT_NOFILE)
	if err != nil || soft == 0 || soft > hard {
		t.Errorf("open files: %d, %d, %v", soft, hard, err)
	}
	if _, _, err := Getrlimit(-1); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a resource that does not exist: %v", err)
	}
	name, release, version, machine, err := Uname()
	if err != nil || name != "Linux" || !strings.Contains(release, ".") || version == "" || machine == "" {
		t.Errorf("uname: %q, %q, %q, %q, %v", name, release, version, machine, err)
	}
	cpus, err := AllowedCPUs()
	if err != nil || len(cpus) != runtime.NumCPU() || !slices.IsSorted(cpus) {
		t.Errorf("CPUs %v, %v; the runtime counts %d", cpus, err, runtime.NumCPU())
	}
}

func TestDescriptorsOfSockets(t *testing.T) {
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := SocketListens(int(f.Fd())); !errors.Is(err, syscall.ENOTSOCK) {
		t.Errorf("a file: %v", err)
	}
	if _, err := SocketListens(1 << 20); !errors.Is(err, syscall.EBADF) {
		t.Errorf("nothing: %v", err)
	}
	a, b, err := Socketpair()
	if err != nil {
		t.Fatal(err)
	}
	defer Close(a)
	defer Close(b)
	if listens, err := SocketListens(a); err != nil || listens {
		t.Errorf("a connected socket listens: %v, %v", listens, err)
	}
	dup, err := syscall.Dup(a) // without FD_CLOEXEC
	if err != nil {
		t.Fatal(err)
	}
	defer Close(dup)
	if err := SetCloexec(dup); err != nil {
		t.Error(err)
	}
	if flags, err := FcntlGetfd(dup); err != nil || flags&syscall.FD_CLOEXEC == 0 {
		t.Errorf("flags %#x, %v", flags, err)
	}
	if err := SetCloexec(1 << 20); !errors.Is(err, syscall.EBADF) {
		t.Errorf("nothing: %v", err)
	}
}
