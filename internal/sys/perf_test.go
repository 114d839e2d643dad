// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestProcessCPUOfIsTheProcessClock(t *testing.T) {
	before := ProcessCPU()
	for end := time.Now().Add(5 * time.Millisecond); time.Now().Before(end); {
	}
	got := ProcessCPUOf(os.Getpid())
	if after := ProcessCPU(); got < before || got > after || got == 0 {
		t.Errorf("got %v between %v and %v", got, before, after)
	}
	if got := ProcessCPUOf(1 << 23); got != 0 {
		t.Errorf("a process that does not exist has used %v", got)
	}
}

// Where the machine allows it, the count of system calls is exact enough to see 1000 of them.
func TestPerfEventCountsSystemCalls(t *testing.T) {
	b, err := os.ReadFile("/sys/kernel/tracing/events/raw_syscalls/sys_enter/id")
	if err != nil {
		return // no tracefs here: nothing to say
	}
	id, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	fd, err := PerfEventTracepoint(id, 0)
	if errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSYS) {
		return // the machine forbids it
	}
	if err != nil {
		t.Fatal(err)
	}
	defer Close(fd)
	before, err := PerfEventCount(fd)
	if err != nil {
		t.Fatal(err)
	}
	const calls = 1000
	for range calls {
		syscall.Getppid()
	}
	after, err := PerfEventCount(fd)
	if err != nil {
		t.Fatal(err)
	}
	if n := after - before; n < calls {
		t.Errorf("counted %d of %d", n, calls)
	}
	if _, err := PerfEventCount(-1); !errors.Is(err, syscall.EBADF) {
		t.Errorf("a descriptor that does not exist: %v", err)
	}
}
