// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

const testText = "the quick brown fox jumps over the lazy dog"

func TestReadAndWrite(t *testing.T) {
	forEachKind(t, func(t *testing.T, r *Ring) {
		fd, path := tempFile(t, testText)
		b := make([]byte, 5)
		must(t, r, "read", 5, func(s *SQE) { s.PrepRead(fd, b, 4) })
		if string(b) != "quick" {
			t.Errorf("read %q", b)
		}
		must(t, r, "write", 4, func(s *SQE) { s.PrepWrite(fd, []byte("slow"), 4) })
		must(t, r, "read past the end", 0, func(s *SQE) { s.PrepRead(fd, b, 1000) })
		must(t, r, "short read at the end", 3, func(s *SQE) { s.PrepRead(fd, b, uint64(len(testText)-3)) })
		fails(t, r, "read of a bad descriptor", syscall.EBADF, func(s *SQE) { s.PrepRead(-1, b, 0) })
		must(t, r, "read forced to a worker", 5, func(s *SQE) { s.PrepRead(fd, b, 10); s.AddFlags(IOSQE_ASYNC) })
		if got, _ := os.ReadFile(path); string(got[:9]) != "the slowk" {
			t.Errorf("file begins %q", got[:9])
		}
	})
}

func TestReadAtTheFilesOwnPosition(t *testing.T) {
	r := newTestRing(t, 4, nil)
	fd, _ := tempFile(t, testText)
	b := make([]byte, 4)
	for _, want := range []string{"the ", "quic"} {
		must(t, r, "read", 4, func(s *SQE) { s.PrepRead(fd, b, CurrentPosition) })
		if string(b) != want {
			t.Errorf("read %q, want %q", b, want)
		}
	}
}

func TestVectorsWithFlags(t *testing.T) {
	r := newTestRing(t, 4, nil)
	fd, path := tempFile(t, testText)
	a, b := make([]byte, 3), make([]byte, 6)
	v := []IOVec{IOVecOf(a), IOVecOf(b)}
	must(t, r, "readv", 9, func(s *SQE) { s.PrepReadv(fd, v, 0, 0) })
	if string(a) != "the" || string(b) != " quick" {
		t.Errorf("read %q and %q", a, b)
	}
	w := []IOVec{IOVecOf([]byte("THE")), IOVecOf([]byte(" QUICK"))}
	for _, f := range []uint32{0, RWF_DSYNC, RWF_SYNC} {
		must(t, r, "writev", 9, func(s *SQE) { s.PrepWritev(fd, w, 0, f) })
	}
	must(t, r, "append", 9, func(s *SQE) { s.PrepWritev(fd, w, 0, RWF_APPEND) })
	if got, _ := os.ReadFile(path); string(got) != "THE QUICK"+testText[9:]+"THE QUICK" {
		t.Errorf("file holds %q", got)
	}
	fails(t, r, "flag that nobody knows", syscall.EOPNOTSUPP, func(s *SQE) { s.PrepReadv(fd, v, 0, 1<<30) })
}

func TestFileOperations(t *testing.T) {
	r := newTestRing(t, 4, nil)
	fd, path := tempFile(t, testText)
	size := func() int64 {
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		return st.Size()
	}
	must(t, r, "fsync", 0, func(s *SQE) { s.PrepFsync(fd, 0) })
	must(t, r, "fdatasync", 0, func(s *SQE) { s.PrepFsync(fd, IORING_FSYNC_DATASYNC) })
	fails(t, r, "fsync of a bad descriptor", syscall.EBADF, func(s *SQE) { s.PrepFsync(-1, 0) })
	must(t, r, "sync_file_range", 0, func(s *SQE) { s.PrepSyncFileRange(fd, 0, 10, 2) })
	must(t, r, "fadvise", 0, func(s *SQE) { s.PrepFadvise(fd, 0, 10, 3) })
	must(t, r, "fallocate", 0, func(s *SQE) { s.PrepFallocate(fd, 0, 0, 8192) })
	if size() != 8192 {
		t.Errorf("size is %d after fallocate", size())
	}
	const keepSizePunchHole = 3
	must(t, r, "punch hole", 0, func(s *SQE) { s.PrepFallocate(fd, keepSizePunchHole, 0, 4096) })
	b := make([]byte, 3)
	must(t, r, "read the hole", 3, func(s *SQE) { s.PrepRead(fd, b, 0) })
	if string(b) != "\x00\x00\x00" {
		t.Errorf("the hole holds %q", b)
	}
}

func TestFtruncate(t *testing.T) {
	r := newTestRing(t, 4, nil)
	needOp(t, r, IORING_OP_FTRUNCATE, "6.9")
	fd, path := tempFile(t, testText)
	must(t, r, "ftruncate", 0, func(s *SQE) { s.PrepFtruncate(fd, 9) })
	if got, _ := os.ReadFile(path); string(got) != testText[:9] {
		t.Errorf("file holds %q", got)
	}
}

func TestOpenStatClose(t *testing.T) {
	r := newTestRing(t, 4, nil)
	path := filepath.Join(t.TempDir(), "new")
	p, _ := syscall.BytePtrFromString(path)
	const atFdcwd = -100
	c := run(t, r, func(s *SQE) { s.PrepOpenat(atFdcwd, p, syscall.O_RDWR|syscall.O_CREAT|syscall.O_CLOEXEC, 0o640) })
	if c.Res < 0 {
		t.Fatalf("open: %v", c.Err())
	}
	fd := int(c.Res)
	must(t, r, "write", 5, func(s *SQE) { s.PrepWrite(fd, []byte("hello"), 0) })
	buf := make([]byte, 256)
	const statxSize, sizeAt = 0x200, 40 // STATX_SIZE and offset of stx_size
	must(t, r, "statx", 0, func(s *SQE) { s.PrepStatx(atFdcwd, p, 0, statxSize, unsafe.Pointer(&buf[0])) })
	if buf[sizeAt] != 5 {
		t.Errorf("size is %d", buf[sizeAt])
	}
	must(t, r, "close", 0, func(s *SQE) { s.PrepClose(fd) })
	fails(t, r, "close again", syscall.EBADF, func(s *SQE) { s.PrepClose(fd) })
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o640 {
		t.Errorf("%v, %v", st, err)
	}
	missing, _ := syscall.BytePtrFromString(path + "x")
	fails(t, r, "open a missing file", syscall.ENOENT, func(s *SQE) { s.PrepOpenat(atFdcwd, missing, 0, 0) })
}

func TestSpliceFromFileToPipe(t *testing.T) {
	r := newTestRing(t, 4, nil)
	fd, _ := tempFile(t, testText)
	pr, pw := pipe(t)
	must(t, r, "splice", 5, func(s *SQE) { s.PrepSplice(fd, 4, pw, CurrentPosition, 5, 0) })
	b := make([]byte, 10)
	if n, err := syscall.Read(pr, b); string(b[:max(n, 0)]) != "quick" {
		t.Errorf("read %q, %v", b[:max(n, 0)], err)
	}
}

func TestEventfdsAreReadAndWrittenLikeFiles(t *testing.T) {
	r := newTestRing(t, 4, nil)
	efd, err := sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(efd)
	b := make([]byte, 8)
	b[0] = 3
	must(t, r, "write", 8, func(s *SQE) { s.PrepWrite(efd, b, 0) })
	if err := sys.EventfdWrite(efd, 4); err != nil {
		t.Fatal(err)
	}
	must(t, r, "read", 8, func(s *SQE) { s.PrepRead(efd, b, 0) })
	if b[0] != 7 {
		t.Errorf("read %v", b)
	}
	if _, err := sys.EventfdRead(efd); err != syscall.EAGAIN {
		t.Errorf("read of an empty eventfd: %v", err)
	}
}

func TestLinkedRequestsRunInOrderAndFallTogether(t *testing.T) {
	r := newTestRing(t, 8, nil)
	fd, _ := tempFile(t, "")
	b := make([]byte, 3)
	s := sqe(t, r)
	s.PrepWrite(fd, []byte("abc"), 0)
	s.AddFlags(IOSQE_IO_LINK)
	s.UserData = 1
	s = sqe(t, r)
	s.PrepRead(fd, b, 0)
	s.UserData = 2
	m := byUserData(t, wait(t, r, 2))
	wantRes(t, m, 1, 3)
	wantRes(t, m, 2, 3)

	s = sqe(t, r)
	s.PrepRead(-1, b, 0)
	s.AddFlags(IOSQE_IO_LINK)
	s.UserData = 3
	s = sqe(t, r)
	s.PrepNop()
	s.UserData = 4
	m = byUserData(t, wait(t, r, 2))
	wantRes(t, m, 3, -int32(syscall.EBADF))
	wantRes(t, m, 4, -int32(syscall.ECANCELED))
}

func TestDrainWaitsForWhatWasSubmittedBefore(t *testing.T) {
	r := newTestRing(t, 8, nil)
	pr, pw := pipe(t)
	b := make([]byte, 1)
	s := sqe(t, r)
	s.PrepRead(pr, b, 0)
	s.UserData = 1
	s = sqe(t, r)
	s.PrepNop()
	s.AddFlags(IOSQE_IO_DRAIN)
	s.UserData = 2
	quiet(t, r)
	put(t, pw, "x")
	got := wait(t, r, 2)
	if got[0].UserData != 1 || got[1].UserData != 2 {
		t.Errorf("completed as %+v", got)
	}
}

func TestSuccessCanBeSkipped(t *testing.T) {
	r := newTestRing(t, 8, nil)
	if r.Features()&FeatCQESkip == 0 {
		missing(t, "CQE_SKIP", "5.17")
	}
	fd, _ := tempFile(t, testText)
	b := make([]byte, 3)
	for i, f := range []int{fd, -1} {
		s := sqe(t, r)
		s.PrepRead(f, b, 0)
		s.AddFlags(IOSQE_CQE_SKIP_SUCCESS)
		s.UserData = uint64(i + 1)
	}
	if c := one(t, r, 2); c.Res != -int32(syscall.EBADF) {
		t.Errorf("result %d", c.Res)
	}
	quiet(t, r)
}
