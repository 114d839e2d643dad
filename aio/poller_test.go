// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/uring"
)

// refuseRing answers as a kernel or a sandbox does that forbids rings.
func refuseRing(e syscall.Errno) func(uint32, *uring.Options) (*uring.Ring, error) {
	return func(uint32, *uring.Options) (*uring.Ring, error) { return nil, e }
}

func TestPollerFallsBackAndSaysWhy(t *testing.T) {
	for _, e := range []syscall.Errno{syscall.EPERM, syscall.ENOSYS, syscall.ENOMEM, syscall.EINVAL} {
		o := LoopOptions{}
		o.seams.newRing = refuseRing(e)
		r := start(t, o, nil)
		kind, reason := r.Poller()
		if kind != PollerEpoll || !strings.Contains(reason, "io_uring") || !strings.Contains(reason, e.Error()) {
			t.Errorf("%v: poller %s, because %q", e, kind, reason)
		}
		ran := false
		r.do(func() { ran = true })
		if !ran {
			t.Error("the loop does not run")
		}
		o.seams.epollCreate = func() (int, error) { return -1, syscall.EMFILE }
		r = start(t, o, nil)
		kind, reason = r.Poller()
		if kind != PollerPoll || !strings.Contains(reason, "no io_uring") || !strings.Contains(reason, "no epoll") {
			t.Errorf("%v: poller %s, because %q", e, kind, reason)
		}
		r.do(func() {})
	}
}

// A poller that was asked for by name is had or refused, with the errno and the kernel's own remedy.
func TestPollerAskedForByName(t *testing.T) {
	before := openFDs(t)
	for _, e := range []syscall.Errno{syscall.EPERM, syscall.ENOSYS, syscall.ENOMEM} {
		o := LoopOptions{Poller: PollerIOUring, Name: "disk loop"}
		o.seams.newRing = refuseRing(e)
		_, err := NewLoop(&o)
		if !errors.Is(err, e) || !strings.Contains(err.Error(), "disk loop") {
			t.Errorf("%v, want %v", err, e)
		}
	}
	if _, err := NewLoop(&LoopOptions{Poller: 9}); err == nil {
		t.Error("a poller that there is not")
	}
	o := LoopOptions{Poller: PollerEpoll}
	o.seams.epollCreate = func() (int, error) { return -1, syscall.EMFILE }
	if _, err := NewLoop(&o); !errors.Is(err, syscall.EMFILE) || !strings.Contains(err.Error(), "ulimit -n") {
		t.Errorf("%v, want EMFILE with its remedy", err)
	}
	if n := openFDs(t); n != before {
		t.Errorf("%d descriptors open, %d before", n, before)
	}
	// An error of the ring itself names the remedy: a queue that no kernel makes.
	if _, err := NewLoop(&LoopOptions{Poller: PollerIOUring, RingEntries: 1 << 20}); err == nil || !strings.Contains(err.Error(), "(") {
		t.Errorf("%v, want an error with a remedy", err)
	}
}

// Before Linux 5.11 there is no epoll_pwait2. Timers are then a matter of milliseconds, and never early.
func TestEpollWithoutNanoseconds(t *testing.T) {
	o := LoopOptions{Poller: PollerEpoll}
	asked := 0
	o.seams.epollPwait2 = func(int, []sys.EpollEvent, int64) (int, error) { asked++; return 0, syscall.ENOSYS }
	due := make(chan time.Duration, 1)
	began := time.Now()
	r := start(t, o, func(l *Loop) {
		l.Timer(1500*time.Microsecond, timerFunc(func(*Timer) { due <- time.Since(began) }))
	})
	if took := wait(t, due); took < 1500*time.Microsecond {
		t.Errorf("due after %v", took)
	}
	r.do(func() {
		if asked != 1 {
			t.Errorf("asked %d times for what the kernel lacks", asked)
		}
	})
	for nsec, want := range map[int64]int{-1: -1, 0: 0, 1: 1, 1_000_000: 1, 1_000_001: 2, 1 << 62: 86_400_000} {
		if got := millis(nsec); got != want {
			t.Errorf("%d ns are %d ms, want %d", nsec, got, want)
		}
	}
}

// A signal, or a passing lack of memory, cuts every other wait short.
func TestWaitCutShort(t *testing.T) {
	for _, kind := range []PollerKind{PollerEpoll, PollerPoll} {
		o := LoopOptions{Poller: kind}
		n := 0
		o.seams.epollPwait2 = func(epfd int, events []sys.EpollEvent, nsec int64) (int, error) {
			if n++; n%2 == 0 {
				return 0, syscall.EINTR
			}
			return sys.EpollPwait2(epfd, events, nsec)
		}
		o.seams.ppoll = func(fds []sys.PollFd, nsec int64) (int, error) {
			if n++; n%2 == 0 {
				return 0, []syscall.Errno{syscall.EINTR, syscall.EAGAIN}[n/2%2]
			}
			return sys.Ppoll(fds, nsec)
		}
		rd, wr := pipe(t)
		got := make(chan bool, 1)
		r := start(t, o, func(l *Loop) {
			mustWatch(t, l, rd, EventRead, func(*Watch, Events) {
				var b [1]byte
				_, _ = rd.Read(b[:])
				got <- true
			})
		})
		for range 100 {
			say(t, wr, 1)
			wait(t, got)
		}
		if err := r.stop(); err != nil {
			t.Error(err)
		}
	}
}

// A poller that breaks ends the loop with its error; nothing hangs and nothing leaks.
func TestPollerThatBreaks(t *testing.T) {
	before := openFDs(t)
	o := LoopOptions{Poller: PollerPoll}
	o.seams.ppoll = func([]sys.PollFd, int64) (int, error) { return 0, syscall.EFAULT }
	l, err := NewLoop(&o)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Run(t.Context()); !errors.Is(err, syscall.EFAULT) {
		t.Errorf("Run: %v, want EFAULT", err)
	}
	if n := openFDs(t); n != before {
		t.Errorf("%d descriptors open, %d before", n, before)
	}
}
