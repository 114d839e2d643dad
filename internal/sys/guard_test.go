// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"errors"
	"runtime"
	"syscall"
	"testing"
	"unsafe"
)

// The guard is tried on what it is for: a shared mapping whose file is cut short behind its back.

// vanished is a page of shared memory that is not there any more.
func vanished(t *testing.T) []byte {
	t.Helper()
	fd, err := MemfdCreate("guard-test", MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Close(fd) })
	page := PageSize()
	if err := Ftruncate(fd, int64(page)); err != nil {
		t.Fatal(err)
	}
	p, err := MmapShared(fd, 0, uintptr(page))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := MunmapShared(p, uintptr(page)); err != nil {
			t.Error(err)
		}
	})
	b := unsafe.Slice((*byte)(p), page)
	b[0] = 1 // there it is
	if err := Ftruncate(fd, 0); err != nil {
		t.Fatal(err)
	}
	return b
}

func TestCopyGuardedAnswersEFAULTWhenMemoryVanishes(t *testing.T) {
	b := vanished(t)
	own := make([]byte, len(b))
	if err := CopyGuarded(own, b); !errors.Is(err, syscall.EFAULT) {
		t.Errorf("copy from vanished memory: %v, want EFAULT", err)
	}
	if err := CopyGuarded(b, own); !errors.Is(err, syscall.EFAULT) {
		t.Errorf("copy to vanished memory: %v, want EFAULT", err)
	}
	src := []byte("still here")
	if err := CopyGuarded(own, src); err != nil || string(own[:len(src)]) != string(src) {
		t.Errorf("copy of sound memory: %v, %q", err, own[:len(src)])
	}
}

func TestFaultIsARecoverablePanicAndNoOtherIsAFault(t *testing.T) {
	b := vanished(t)
	recovered := func(fn func()) (r any) {
		defer func() { r = recover() }()
		fn()
		return nil
	}
	SetPanicOnFault()
	if r := recovered(func() { b[1] = 7 }); !IsFault(r) {
		t.Errorf("store to vanished memory gave %v, want a fault", r)
	}
	var none []byte
	var nothing *int
	for name, fn := range map[string]func(){
		"index":  func() { none[len(b)] = 1 },
		"nil":    func() { *nothing = 1 },
		"string": func() { panic("no fault") },
		"error":  func() { panic(syscall.EFAULT) },
	} {
		r := recovered(fn)
		if r == nil {
			t.Errorf("%s: no panic", name)
		}
		if IsFault(r) {
			t.Errorf("%s: %v is taken for a fault", name, r)
		}
	}
	if IsFault(nil) {
		t.Error("no panic is taken for a fault")
	}
	runtime.KeepAlive(b)
}
