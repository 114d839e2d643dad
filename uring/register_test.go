// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"errors"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/sys"
)

// wantErrno checks an error of a registration.
func wantErrno(t testing.TB, what string, err error, errno syscall.Errno) {
	t.Helper()
	if !errors.Is(err, errno) {
		t.Errorf("%s: %v, want %v", what, err, errno)
	}
}

// ok stops the test at an error.
func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestRegisteredFiles(t *testing.T) {
	forEachKind(t, func(t *testing.T, r *Ring) {
		fd, _ := tempFile(t, testText)
		b := make([]byte, 3)
		read := func(index int) CQE {
			return run(t, r, func(s *SQE) { s.PrepRead(index, b, 0); s.AddFlags(IOSQE_FIXED_FILE) })
		}
		ok(t, r.RegisterFiles([]int32{-1, int32(fd)}))
		wantErrno(t, "a second table", r.RegisterFiles([]int32{int32(fd)}), syscall.EBUSY)
		for index, want := range []int32{-int32(syscall.EBADF), 3, -int32(syscall.EBADF)} {
			if c := read(index); c.Res != want {
				t.Errorf("read of file %d: %d, want %d", index, c.Res, want)
			}
		}
		if n, err := r.UpdateFiles(0, []int32{int32(fd), -1}); n != 2 || err != nil {
			t.Errorf("updated %d, %v", n, err)
		}
		if n, err := r.UpdateFiles(0, nil); n != 0 || err != nil {
			t.Errorf("updated nothing: %d, %v", n, err)
		}
		for index, want := range []int32{3, -int32(syscall.EBADF)} {
			if c := read(index); c.Res != want {
				t.Errorf("after the update, read of file %d: %d, want %d", index, c.Res, want)
			}
		}
		_, err := r.UpdateFiles(1, []int32{int32(fd), int32(fd)})
		wantErrno(t, "update past the end", err, syscall.EINVAL)
		ok(t, r.UnregisterFiles())
		wantErrno(t, "unregister again", r.UnregisterFiles(), syscall.ENXIO)
	})
}

func TestRegisteredFilesStayOpen(t *testing.T) {
	r := newTestRing(t, 4, nil)
	pr, pw := pipe(t)
	ok(t, r.RegisterFilesSparse(100))
	dup, err := syscall.Dup(pr)
	ok(t, err)
	if n, err := r.UpdateFiles(99, []int32{int32(dup)}); n != 1 || err != nil {
		t.Fatalf("updated %d, %v", n, err)
	}
	ok(t, syscall.Close(dup))
	put(t, pw, "x")
	must(t, r, "read", 1, func(s *SQE) { s.PrepRead(99, make([]byte, 1), 0); s.AddFlags(IOSQE_FIXED_FILE) })
	if n, err := r.UpdateFiles(0, []int32{int32(pr), 1 << 20, int32(pr)}); n != 1 || err != nil {
		t.Errorf("update with a bad descriptor in second place: %d, %v", n, err)
	}
	_, err = r.UpdateFiles(0, []int32{1 << 20})
	wantErrno(t, "update with a bad descriptor", err, syscall.EBADF)
}

func TestRegisteredBuffers(t *testing.T) {
	r := newTestRing(t, 4, nil)
	fd, _ := tempFile(t, testText)
	mem, err := sys.MmapAnon(8192)
	ok(t, err)
	defer func() { ok(t, sys.Munmap(mem)) }()
	ok(t, r.RegisterBuffers([]IOVec{IOVecOf(mem[:4096]), IOVecOf(mem[4096:])}))
	wantErrno(t, "a second table", r.RegisterBuffers([]IOVec{IOVecOf(mem)}), syscall.EBUSY)
	must(t, r, "read", 9, func(s *SQE) { s.PrepReadFixed(fd, mem[4100:4109], 0, 1) })
	if string(mem[4100:4109]) != "the quick" {
		t.Errorf("read %q", mem[4100:4109])
	}
	must(t, r, "write", 5, func(s *SQE) { s.PrepWriteFixed(fd, mem[4104:4109], 0, 1) })
	fails(t, r, "memory of another buffer", syscall.EFAULT, func(s *SQE) { s.PrepReadFixed(fd, mem[:4], 0, 1) })
	fails(t, r, "buffer that is not there", syscall.EFAULT, func(s *SQE) { s.PrepReadFixed(fd, mem[:4], 0, 2) })
	must(t, r, "read back", 9, func(s *SQE) { s.PrepReadFixed(fd, mem[:9], 0, 0) })
	if string(mem[:9]) != "quickuick" {
		t.Errorf("the file begins %q", mem[:9])
	}
	ok(t, r.UnregisterBuffers())
	wantErrno(t, "unregister again", r.UnregisterBuffers(), syscall.ENXIO)
	wantErrno(t, "memory that is not mapped", r.RegisterBuffers([]IOVec{{Base: nil, Len: 4096}}), syscall.EFAULT)
}

func TestSparseBuffersAreFilledLater(t *testing.T) {
	r := newTestRing(t, 4, nil)
	if r.Features()&FeatRsrcTags == 0 {
		missing(t, "empty buffers", "5.13")
	}
	fd, _ := tempFile(t, testText)
	b := make([]byte, 4096)
	ok(t, r.RegisterBuffersSparse(8))
	fails(t, r, "empty place", syscall.EFAULT, func(s *SQE) { s.PrepReadFixed(fd, b[:3], 0, 7) })
	if n, err := r.UpdateBuffers(7, []IOVec{IOVecOf(b)}); n != 1 || err != nil {
		t.Fatalf("updated %d, %v", n, err)
	}
	must(t, r, "read", 3, func(s *SQE) { s.PrepReadFixed(fd, b[:3], 0, 7) })
	if n, err := r.UpdateBuffers(7, []IOVec{{}}); n != 1 || err != nil {
		t.Fatalf("emptied %d, %v", n, err)
	}
	fails(t, r, "emptied place", syscall.EFAULT, func(s *SQE) { s.PrepReadFixed(fd, b[:3], 0, 7) })
	if n, err := r.UpdateBuffers(0, nil); n != 0 || err != nil {
		t.Errorf("updated nothing: %d, %v", n, err)
	}
	_, err := r.UpdateBuffers(8, []IOVec{IOVecOf(b)})
	wantErrno(t, "update past the end", err, syscall.EINVAL)
}

func TestCompletionsCountOnAnEventfd(t *testing.T) {
	r := newTestRing(t, 4, nil)
	efd, err := sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
	ok(t, err)
	defer syscall.Close(efd)
	pr, pw := pipe(t)

	ok(t, r.RegisterEventfd(efd))
	wantErrno(t, "register twice", r.RegisterEventfd(efd), syscall.EBUSY)
	run(t, r, func(s *SQE) { s.PrepNop() })
	if n, err := sys.EventfdRead(efd); n != 1 || err != nil {
		t.Errorf("eventfd holds %d, %v", n, err)
	}
	ok(t, r.UnregisterEventfd())
	run(t, r, func(s *SQE) { s.PrepNop() })
	if _, err := sys.EventfdRead(efd); err != syscall.EAGAIN {
		t.Errorf("unregistered eventfd: %v", err)
	}

	ok(t, r.RegisterEventfdAsync(efd))
	run(t, r, func(s *SQE) { s.PrepNop() })
	if n, err := sys.EventfdRead(efd); err != syscall.EAGAIN {
		t.Errorf("completion during the submission: eventfd holds %d, %v", n, err)
	}
	s := sqe(t, r)
	s.PrepRead(pr, make([]byte, 1), 0)
	s.AddFlags(IOSQE_ASYNC)
	s.UserData = 1
	_, err = r.Submit()
	ok(t, err)
	put(t, pw, "x")
	one(t, r, 1)
	// The kernel counts after it has shown the completion, so this may come a little later.
	if ready, err := sys.PpollIn(efd, int64(patience)); !ready && !errors.Is(err, syscall.EINTR) {
		t.Errorf("eventfd says nothing of a completion of a worker: %v", err)
	}
	ok(t, r.UnregisterEventfd())
	wantErrno(t, "unregister again", r.UnregisterEventfd(), syscall.ENXIO)
}

func TestProbe(t *testing.T) {
	r := newTestRing(t, 4, nil)
	p, err := r.Probe()
	ok(t, err)
	for _, op := range []uint8{IORING_OP_NOP, IORING_OP_READ, IORING_OP_WRITEV, IORING_OP_FALLOCATE, IORING_OP_TEE} {
		if !p.Supports(op) {
			t.Errorf("no operation %d, which 5.10 has", op)
		}
	}
	if p.Supports(255) {
		t.Error("supports operation 255")
	}
}

func TestRestrictedRingDeniesTheRest(t *testing.T) {
	r := newTestRing(t, 4, &Options{RDisabled: true})
	ok(t, r.Restrict(AllowOp(IORING_OP_NOP), AllowOp(IORING_OP_READ), AllowFlags(IOSQE_ASYNC),
		AllowRegister(sys.IORING_REGISTER_PROBE)))
	ok(t, r.Enable())
	wantErrno(t, "restrict a running ring", r.Restrict(AllowOp(IORING_OP_WRITE)), syscall.EACCES)

	fd, _ := tempFile(t, testText)
	b := make([]byte, 3)
	must(t, r, "nop", 0, func(s *SQE) { s.PrepNop() })
	must(t, r, "read", 3, func(s *SQE) { s.PrepRead(fd, b, 0) })
	must(t, r, "allowed flag", 3, func(s *SQE) { s.PrepRead(fd, b, 0); s.AddFlags(IOSQE_ASYNC) })
	fails(t, r, "write", syscall.EACCES, func(s *SQE) { s.PrepWrite(fd, b, 0) })
	fails(t, r, "flag", syscall.EACCES, func(s *SQE) { s.PrepNop(); s.AddFlags(IOSQE_IO_DRAIN) })
	_, err := r.Probe()
	ok(t, err)
	err = r.RegisterFilesSparse(1)
	wantErrno(t, "registration", err, syscall.EACCES)
	if !strings.Contains(err.Error(), "restrictions forbid") {
		t.Errorf("%v names no cause", err)
	}
}

func TestRequiredFlags(t *testing.T) {
	r := newTestRing(t, 4, &Options{RDisabled: true})
	ok(t, r.Restrict(AllowOp(IORING_OP_NOP), AllowFlags(IOSQE_ASYNC), RequireFlags(IOSQE_ASYNC)))
	ok(t, r.Enable())
	fails(t, r, "nop", syscall.EACCES, func(s *SQE) { s.PrepNop() })
	must(t, r, "nop on a worker", 0, func(s *SQE) { s.PrepNop(); s.AddFlags(IOSQE_ASYNC) })
}

func TestRunningRingCannotBeRestricted(t *testing.T) {
	r := newTestRing(t, 4, nil)
	wantErrno(t, "restrict", r.Restrict(AllowOp(IORING_OP_NOP)), syscall.EBADFD)
	wantErrno(t, "enable", r.Enable(), syscall.EBADFD)
}

func TestWorkerLimits(t *testing.T) {
	onAnotherThread(func() { // they are the thread's
		r, err := New(4, nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer r.Close()
		if _, _, err := r.SetMaxWorkers(2, 3); errors.Is(err, syscall.EINVAL) {
			t.Log("needs worker limits of Linux 5.15")
			return
		}
		if b, u, err := r.SetMaxWorkers(0, 5); b != 2 || u != 3 || err != nil {
			t.Errorf("limits were %d and %d, %v", b, u, err)
		}
		if b, u, err := r.SetMaxWorkers(0, 0); b != 2 || u != 5 || err != nil {
			t.Errorf("limits are %d and %d, %v", b, u, err)
		}
	})
}

// needRingFDs skips the test on kernels that cannot register rings.
func needRingFDs(t *testing.T) {
	t.Helper()
	if err := newTestRing(t, 1, nil).RegisterRingFD(); errors.Is(err, syscall.EINVAL) {
		missing(t, "registered rings", "5.18")
	} else if err != nil {
		t.Fatal(err)
	}
}

func TestThreadsTableOfRingsFillsUp(t *testing.T) {
	t.Run("probe", needRingFDs)
	onAnotherThread(func() { // with a table of its own
		var rings []*Ring
		defer func() {
			for _, r := range rings {
				if err := r.Close(); err != nil {
					t.Error(err)
				}
			}
		}()
		for i := range 17 {
			r, err := New(1, nil)
			if err != nil {
				t.Error(err)
				return
			}
			rings = append(rings, r)
			err = r.RegisterRingFD()
			if errors.Is(err, syscall.EINVAL) {
				return
			}
			if i < 16 && err != nil || i == 16 && !errors.Is(err, syscall.EBUSY) {
				t.Errorf("ring %d: %v", i, err)
			}
		}
		last := rings[16]
		sqe(t, last).PrepNop() // it goes on without
		wait(t, last, 1)
		if err := rings[3].RegisterRingFD(); !errors.Is(err, syscall.EEXIST) {
			t.Errorf("registered twice: %v, want EEXIST", err)
		}
		if err := rings[3].UnregisterRingFD(); err != nil {
			t.Error(err)
		}
		if err := last.RegisterRingFD(); err != nil {
			t.Errorf("after one was given back: %v", err)
		}
		if err := rings[5].Close(); err != nil {
			t.Error(err)
		}
		for _, r := range []*Ring{rings[3], last} {
			if r == rings[3] {
				if err := r.RegisterRingFD(); err != nil {
					t.Errorf("after one was closed: %v", err)
				}
			}
			sqe(t, r).PrepNop()
			wait(t, r, 1)
		}
	})
}

func TestRegisteredRingIsClosedOnAnotherThreadWithoutHarm(t *testing.T) {
	t.Run("probe", needRingFDs)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	mine := newTestRing(t, 1, nil)
	if err := mine.RegisterRingFD(); errors.Is(err, syscall.EINVAL) {
		missing(t, "registered rings", "5.18")
	} else if err != nil {
		t.Fatal(err)
	}
	var theirs *Ring
	onAnotherThread(func() {
		var err error
		if theirs, err = New(1, nil); err == nil {
			err = theirs.RegisterRingFD() // the same slot, of another thread's table
		}
		if err != nil {
			t.Error(err)
		}
	})
	wantErrno(t, "unregister on another thread", theirs.UnregisterRingFD(), syscall.EEXIST)
	ok(t, theirs.Close())
	sqe(t, mine).PrepNop()
	wait(t, mine, 1) // my slot is still mine
	ok(t, mine.UnregisterRingFD())
	wantErrno(t, "unregister again", mine.UnregisterRingFD(), syscall.ENOENT)
	sqe(t, mine).PrepNop()
	wait(t, mine, 1)
}
