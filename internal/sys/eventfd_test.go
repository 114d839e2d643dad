// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"os"
	"syscall"
	"testing"
)

func TestEventfdCounts(t *testing.T) {
	for _, c := range []struct {
		name  string
		flags int
		first uint64
	}{{"all at once", EFD_NONBLOCK, 5}, {"one by one", EFD_NONBLOCK | EFD_SEMAPHORE, 1}} {
		fd, err := Eventfd(2, EFD_CLOEXEC|c.flags)
		if err != nil {
			t.Fatal(err)
		}
		if err := EventfdWrite(fd, 3); err != nil {
			t.Errorf("%s: write: %v", c.name, err)
		}
		for want := uint64(5); want > 0; want -= c.first {
			if n, err := EventfdRead(fd); n != c.first || err != nil {
				t.Errorf("%s: read %d, %v, want %d", c.name, n, err, c.first)
			}
		}
		if _, err := EventfdRead(fd); err != syscall.EAGAIN {
			t.Errorf("%s: read of an empty counter: %v", c.name, err)
		}
		if err := EventfdWrite(fd, 1<<64-2); err != nil {
			t.Errorf("%s: write of the most it holds: %v", c.name, err)
		}
		if err := EventfdWrite(fd, 1); err != syscall.EAGAIN {
			t.Errorf("%s: write to a full counter: %v", c.name, err)
		}
		if n := testing.AllocsPerRun(10, func() { _, _ = EventfdRead(fd); _ = EventfdWrite(fd, 1) }); n != 0 {
			t.Errorf("%s: %v allocations", c.name, n)
		}
		syscall.Close(fd)
	}
}

func TestWhatIsNoEventfdIsAnError(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	if _, err := w.WriteString("abc"); err != nil {
		t.Fatal(err)
	}
	if _, err := EventfdRead(int(r.Fd())); err != syscall.EIO {
		t.Errorf("3 bytes from a pipe: %v, want EIO", err)
	}
	if _, err := EventfdRead(-1); err != syscall.EBADF {
		t.Errorf("read of -1: %v", err)
	}
	if err := EventfdWrite(-1, 1); err != syscall.EBADF {
		t.Errorf("write to -1: %v", err)
	}
}

func TestAnonymousMemoryIsFreshAndAligned(t *testing.T) {
	b, err := MmapAnon(3 * os.Getpagesize())
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range b {
		if c != 0 {
			t.Fatalf("byte %d is %#x", i, c)
		}
	}
	b[0] = 1
	if err := Munmap(b); err != nil {
		t.Error(err)
	}
	if err := Munmap(b); err == nil {
		t.Error("unmapped twice")
	}
	if _, err := MmapAnon(0); err == nil {
		t.Error("mapped nothing")
	}
}
