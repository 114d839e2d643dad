// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"errors"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestRemediesNameWhatHelps(t *testing.T) {
	for _, c := range []struct {
		errno    syscall.Errno
		disabled string
		want     string
	}{
		{syscall.EPERM, "2", "kernel.io_uring_disabled is 2"},
		{syscall.EPERM, "1", "kernel.io_uring_group"},
		{syscall.EPERM, "0", "seccomp"},
		{syscall.EPERM, "", "seccomp"},
		{syscall.EACCES, "", "seccomp"},
		{syscall.ENOSYS, "", "CONFIG_IO_URING"},
		{syscall.ENOMEM, "", "ulimit -l"},
		{syscall.EINVAL, "", "lacks one of the flags"},
		{syscall.EMFILE, "", "ulimit -n"},
		{syscall.ENFILE, "", "fs.file-max"},
		{syscall.EIO, "", "io_uring_setup(2)"},
	} {
		if got := remedy(c.errno, c.disabled); !strings.Contains(got, c.want) {
			t.Errorf("%v with sysctl %q: %q does not say %q", c.errno, c.disabled, got, c.want)
		}
	}
}

func TestSetupErrorsKeepTheErrnoAndSayWhatWasAsked(t *testing.T) {
	skipWithoutRings(t)
	for _, c := range []struct {
		name    string
		entries uint32
		o       *Options
		say     string
	}{
		{"no entries", 0, nil, "0 entries"},
		{"too many", 1 << 20, nil, "1048576 entries"},
		{"flags that do not go together", 4, &Options{DeferTaskrun: true}, "DEFER_TASKRUN"},
		{"completion queue smaller than the other", 8, &Options{CQEntries: 4}, "CQSIZE"},
	} {
		for name, f := range map[string]func(uint32, *Options) (*Ring, error){"New": New, "NewBest": NewBest} {
			if name == "NewBest" && c.o != nil && c.o.DeferTaskrun {
				continue // it adds what is missing
			}
			r, err := f(c.entries, c.o)
			if r != nil || !errors.Is(err, syscall.EINVAL) || !strings.Contains(err.Error(), c.say) {
				t.Errorf("%s, %s: %v, %v", name, c.name, r, err)
			}
		}
	}
}

func TestNoDescriptorLeftIsTold(t *testing.T) {
	skipWithoutRings(t)
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 3, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	r, err := NewBest(4, nil)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if r != nil || !errors.Is(err, syscall.EMFILE) || !strings.Contains(err.Error(), "ulimit -n") {
		t.Errorf("%v, %v", r, err)
	}
}

// skipWithoutRings skips the test where no ring can be made at all.
func skipWithoutRings(t *testing.T) {
	t.Helper()
	newTestRing(t, 1, nil)
}

func TestNewBestGetsTheBestThereIs(t *testing.T) {
	skipWithoutRings(t)
	r, err := NewBest(5, &Options{CQEntries: 60})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	t.Logf("flags %v, features %v", r.Flags(), r.Features())
	if r.SQEntries() != 8 || r.CQEntries() != 64 {
		t.Errorf("%d and %d entries", r.SQEntries(), r.CQEntries())
	}
	for _, more := range bestFlags {
		if r.Flags() == more|SetupCQSize {
			break
		}
		better, err := newRing(5, &Options{CQEntries: 60}, more|SetupCQSize)
		if err == nil {
			better.Close()
			t.Errorf("got %v, but %v is to be had", r.Flags(), better.Flags())
		}
	}
	one := sqe(t, r)
	one.PrepNop()
	one.UserData = 1
	wait(t, r, 1)
}

func TestNewBestKeepsWhatWasAskedFor(t *testing.T) {
	skipWithoutRings(t)
	r, err := NewBest(4, &Options{SQPoll: true, SQPollIdle: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if r.Flags()&SetupSQPoll == 0 || r.Flags()&SetupDeferTaskrun != 0 {
		t.Errorf("flags %v", r.Flags())
	}
}

func TestSizesAreClamped(t *testing.T) {
	r := newTestRing(t, 1<<20, &Options{Clamp: true})
	if r.SQEntries() != 32768 {
		t.Errorf("%d entries", r.SQEntries())
	}
}

func TestWorkersCanBeShared(t *testing.T) {
	r := newTestRing(t, 4, nil)
	fd, _ := tempFile(t, testText)
	s := newTestRing(t, 4, &Options{AttachWQ: r})
	must(t, s, "read", 3, func(e *SQE) { e.PrepRead(fd, make([]byte, 3), 0); e.AddFlags(IOSQE_ASYNC) })
}

func TestSQPollWaitsForRoomAndWakesItsThread(t *testing.T) {
	r := newTestRing(t, 4, &Options{SQPoll: true, SQPollIdle: time.Millisecond, SQPollPinned: true})
	for round := range 3 {
		for got := 0; got < 64; {
			s := r.GetSQE()
			if s == nil {
				if _, err := r.Submit(); err != nil {
					t.Fatal(err)
				}
				if err := r.WaitSQ(); err != nil && !errors.Is(err, syscall.EINTR) {
					t.Fatal(err)
				}
				got += len(wait(t, r, 1))
				continue
			}
			s.PrepNop()
		}
		for r.SQPending() > 0 || r.CQReady() > 0 {
			wait(t, r, 1)
		}
		if round < 2 {
			time.Sleep(5 * time.Millisecond) // past the idle time; the thread sleeps now, or soon
		}
	}
}

func TestClosedRingIsHarmless(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r, err := New(4, nil)
	if err != nil {
		skipIfMissing(t, err, 0)
		t.Fatal(err)
	}
	sqe(t, r).PrepNop() // never submitted
	for range 2 {
		if err := r.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if r.GetSQE() != nil || r.PeekCQE() != nil || r.Reap(make([]CQE, 1)) != 0 || r.SQSpace() != 0 || r.NeedsEnter() ||
		r.CQReady() != 0 || r.SQPending() != 0 || r.Fd() != -1 {
		t.Error("a closed ring has something to give")
	}
	for name, f := range map[string]func() error{
		"wait":     func() error { _, err := r.SubmitAndWait(1, -1); return err },
		"limit":    func() error { _, err := r.SubmitAndWait(1, patience); return err },
		"events":   func() error { _, err := r.SubmitAndGetEvents(); return err },
		"flush":    r.FlushOverflow,
		"register": r.UnregisterFiles,
		"slot":     r.RegisterRingFD,
		"enable":   r.Enable,
	} {
		if err := f(); !errors.Is(err, syscall.EBADF) {
			t.Errorf("%s: %v, want EBADF", name, err)
		}
	}
	if n, err := r.Submit(); n != 0 || err != nil {
		t.Errorf("submit of nothing: %d, %v", n, err)
	}
}

// onAnotherThread runs f on a thread that ends with it.
func onAnotherThread(f func()) {
	done := make(chan struct{})
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		defer close(done)
		f()
	}()
	<-done
}

func TestSingleIssuerRefusesOtherThreads(t *testing.T) {
	r := newTestRing(t, 4, &Options{SingleIssuer: true})
	sqe(t, r).PrepNop()
	onAnotherThread(func() {
		if n, err := r.Submit(); n != 0 || err != syscall.EEXIST {
			t.Errorf("submit: %d, %v, want EEXIST", n, err)
		}
		if err := r.RegisterFilesSparse(1); !errors.Is(err, syscall.EEXIST) {
			t.Errorf("register: %v, want EEXIST", err)
		}
	})
	wait(t, r, 1) // the entry was not lost
}

func TestDisabledRingBelongsToTheThreadThatEnablesIt(t *testing.T) {
	var r *Ring
	var err error
	onAnotherThread(func() { r, err = NewBest(4, &Options{RDisabled: true}) })
	if err != nil {
		skipIfMissing(t, err, 0)
		t.Fatal(err)
	}
	defer r.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	sqe(t, r).PrepNop()
	if _, err := r.Submit(); err != syscall.EBADFD {
		t.Errorf("submit to a disabled ring: %v, want EBADFD", err)
	}
	if err := r.Enable(); err != nil {
		t.Fatal(err)
	}
	wait(t, r, 1)
}
