// SPDX-License-Identifier: Apache-2.0

//go:build linux

// The goal of the tests of this package: every call does what its comment says on the running kernel, whichever that is.
// The method: the real kernel wherever it can be brought to answer so, the Enter seam where it cannot. What the running
// kernel lacks is skipped with the reason. They need no network and nothing writable but the temporary directory.
package uring

import (
	"errors"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// patience is how long a test waits for what must come. It is never waited for when all is well.
const patience = 60 * time.Second

func TestMain(m *testing.M) {
	before := openFDs()
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			os.Stderr.WriteString(err.Error() + "\n")
			code = 1
		}
		if after := openFDs(); len(after) > len(before) {
			os.Stderr.WriteString("descriptors leaked: " + strings.Join(after, ", ") + "\n")
			code = 1
		}
	}
	os.Exit(code)
}

// openFDs lists the process's open descriptors, the Go poller's own left out.
func openFDs() []string {
	dir, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil // no /proc mounted
	}
	var open []string
	for _, e := range dir {
		target, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err != nil || strings.HasPrefix(target, "anon_inode:[eventpoll]") || strings.HasPrefix(target, "anon_inode:[eventfd]") {
			continue // gone again, or of the Go poller
		}
		open = append(open, e.Name()+" "+target)
	}
	return open
}

// newTestRing makes a ring on a locked thread and closes it when the test ends. A kernel without io_uring, or without
// what o asks for, skips the test.
func newTestRing(t testing.TB, entries uint32, o *Options) *Ring {
	t.Helper()
	runtime.LockOSThread()
	r, err := New(entries, o)
	if err != nil {
		runtime.UnlockOSThread()
		skipIfMissing(t, err)
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		runtime.UnlockOSThread()
	})
	return r
}

// skipIfMissing skips the test if err says that this kernel does not have what was asked for.
func skipIfMissing(t testing.TB, err error) {
	t.Helper()
	for _, missing := range []syscall.Errno{syscall.EINVAL, syscall.ENOSYS, syscall.EPERM} {
		if errors.Is(err, missing) {
			t.Skipf("needs more than this kernel has: %v", err)
		}
	}
}

// needOp skips the test if the kernel lacks an operation.
func needOp(t testing.TB, r *Ring, op uint8, since string) {
	t.Helper()
	p, err := r.Probe()
	if err != nil {
		t.Fatal(err)
	}
	if !p.Supports(op) {
		t.Skipf("needs operation %d of Linux %s", op, since)
	}
}

// sqe takes an entry that must be there.
func sqe(t testing.TB, r *Ring) *SQE {
	t.Helper()
	s := r.GetSQE()
	if s == nil {
		t.Fatal("submission queue is full")
	}
	return s
}

// wait submits and collects n completions.
func wait(t testing.TB, r *Ring, n int) []CQE {
	t.Helper()
	deadline := time.Now().Add(patience)
	got := make([]CQE, 0, n)
	var buf [64]CQE
	for len(got) < n {
		if _, err := r.SubmitAndWait(1, patience); err != nil && !errors.Is(err, syscall.EINTR) {
			t.Fatalf("wait for completion %d of %d: %v", len(got)+1, n, err)
		}
		got = append(got, buf[:r.Reap(buf[:min(len(buf), n-len(got))])]...)
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d completions after %v", len(got), n, patience)
		}
	}
	return got
}

// one submits what is queued and returns the one completion, which must carry userData.
func one(t testing.TB, r *Ring, userData uint64) CQE {
	t.Helper()
	c := wait(t, r, 1)[0]
	if c.UserData != userData {
		t.Fatalf("completion of request %d, want %d", c.UserData, userData)
	}
	return c
}

// forEachKind runs f on a ring of each kind whose code paths differ.
func forEachKind(t *testing.T, f func(t *testing.T, r *Ring)) {
	for _, k := range []struct {
		name string
		o    Options
	}{
		{"plain", Options{}},
		{"no_sqarray", Options{NoSQArray: true}},
		{"coop", Options{CoopTaskrun: true, TaskrunFlag: true}},
		{"defer", Options{SingleIssuer: true, DeferTaskrun: true, TaskrunFlag: true, SubmitAll: true}},
		{"sqe128_cqe32", Options{SQE128: true, CQE32: true}},
		{"sqpoll", Options{SQPoll: true, SQPollIdle: 10 * time.Millisecond}},
	} {
		t.Run(k.name, func(t *testing.T) { f(t, newTestRing(t, 8, &k.o)) })
	}
	t.Run("without_ext_arg", func(t *testing.T) {
		r := newTestRing(t, 8, nil)
		r.extArg = false // as on 5.10
		f(t, r)
	})
	t.Run("registered_fd", func(t *testing.T) {
		r := newTestRing(t, 8, nil)
		if err := r.RegisterRingFD(); err != nil {
			skipIfMissing(t, err)
			t.Fatal(err)
		}
		f(t, r)
	})
}

func TestEveryRequestCompletesOnceInAllKindsOfRings(t *testing.T) {
	forEachKind(t, func(t *testing.T, r *Ring) {
		const total = 1000 // wraps the 8 entries many times
		seen := make([]int, total)
		for next, done := 0, 0; done < total; {
			for ; next < total && next-done < int(r.CQEntries()); next++ {
				s := r.GetSQE()
				if s == nil {
					break
				}
				s.PrepNop()
				s.UserData = uint64(next)
			}
			for _, c := range wait(t, r, 1) {
				if c.Res != 0 {
					t.Fatalf("NOP %d gave %v", c.UserData, c.Err())
				}
				seen[c.UserData]++
				done++
			}
		}
		for i, n := range seen {
			if n != 1 {
				t.Errorf("request %d completed %d times", i, n)
			}
		}
		if r.SQPending() != 0 || r.CQReady() != 0 {
			t.Errorf("%d entries and %d completions left over", r.SQPending(), r.CQReady())
		}
	})
}
