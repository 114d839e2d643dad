// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"errors"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/uring"
)

// driver is a foreign loop: it waits for fd at most for timeout and drives l until done.
type driver func(t *testing.T, l *Loop, fd int, done func() bool)

// byPoll waits in poll(2), which looks at levels.
func byPoll(t *testing.T, l *Loop, fd int, done func() bool) {
	fds := []sys.PollFd{{Fd: int32(fd), Events: sys.POLLIN}}
	for !done() {
		timeout, err := l.Prepare()
		if err != nil {
			t.Error(err)
			return
		}
		if timeout < 0 {
			timeout = patience
		}
		n, err := sys.Ppoll(fds, int64(timeout))
		if err != nil && !errors.Is(err, syscall.EINTR) {
			t.Error(err)
			return
		}
		if timeout == patience && n == 0 && err == nil {
			t.Error("waited in vain")
			return
		}
		if err := l.Dispatch(); err != nil {
			t.Error(err)
			return
		}
	}
}

// byNetpoller waits in Go's netpoller, which looks at edges.
func byNetpoller(t *testing.T, l *Loop, fd int, done func() bool) {
	dup, err := sys.Dup(fd)
	if err != nil {
		t.Error(err)
		return
	}
	if err := syscall.SetNonblock(dup, true); err != nil {
		t.Error(err)
	}
	f := os.NewFile(uintptr(dup), "loop")
	defer f.Close()
	conn, err := f.SyscallConn()
	if err != nil {
		t.Error(err)
		return
	}
	for !done() {
		// Read forgets the edges that came before it. Prepare, after which nothing may be missed, belongs inside.
		if err := f.SetReadDeadline(time.Time{}); err != nil {
			t.Errorf("not in the netpoller: %v", err)
			return
		}
		prepared := false
		var timeout time.Duration
		err := conn.Read(func(uintptr) bool {
			if prepared {
				return true // woken
			}
			prepared = true
			if timeout, err = l.Prepare(); timeout < 0 {
				timeout = patience
			}
			_ = f.SetReadDeadline(time.Now().Add(timeout))
			return err != nil || timeout == 0
		})
		if timeout == patience && errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("waited in vain")
			return
		}
		if err := l.Dispatch(); err != nil {
			t.Error(err)
			return
		}
	}
}

// The same work under both: timers, posts from another goroutine, a consumer that takes one message a call, requests, and
// entries of the ring where there is one.
func TestForeignLoop(t *testing.T) {
	for name, drive := range map[string]driver{"poll": byPoll, "netpoller": byNetpoller} {
		t.Run(name, func(t *testing.T) {
			for _, kind := range []PollerKind{PollerIOUring, PollerEpoll} {
				t.Run(kind.String(), func(t *testing.T) {
					o := LoopOptions{Poller: kind}
					needPoller(t, &o)
					foreignWork(t, o, drive)
				})
			}
		})
	}
}

func foreignWork(t *testing.T, o LoopOptions, drive driver) {
	before := openFDs(t)
	l, err := NewLoop(&o)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := l.Fd()
	if err != nil {
		t.Fatal(err)
	}
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	const messages, posts, ticks, nops = 50, 200, 5, 100
	left := messages + posts + ticks
	_, _ = syscall.Write(p[1], make([]byte, messages))
	w, err := l.Watch(p[0], EventRead, readyFunc(func(*Watch, Events) {
		var b [1]byte
		if n, _ := syscall.Read(p[0], b[:]); n == 1 {
			left--
		}
	}))
	if err != nil {
		t.Fatal(err)
	}
	remaining := ticks
	l.Timer(time.Millisecond, timerFunc(func(tm *Timer) {
		left--
		if remaining--; remaining > 0 {
			tm.Reset(time.Millisecond)
		}
	}))
	if o.Poller == PollerIOUring {
		left += nops
		for range nops {
			if err := l.AddSQE(prepNop, cqeFunc(func(uring.CQE) { left-- })); err != nil {
				t.Fatal(err)
			}
		}
	}
	posted := make(chan bool)
	go func() {
		defer close(posted)
		for i := range posts {
			if i%20 == 0 {
				time.Sleep(time.Millisecond) // the foreign loop sleeps meanwhile
			}
			l.Post(func() { left-- })
		}
	}()
	drive(t, l, fd, func() bool { return left == 0 })
	<-posted
	w.Close()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if _, err := l.Prepare(); !errors.Is(err, ErrClosed) {
		t.Errorf("Prepare after the end: %v", err)
	}
	if err := l.Dispatch(); !errors.Is(err, ErrClosed) {
		t.Errorf("Dispatch after the end: %v", err)
	}
	syscall.Close(p[0])
	syscall.Close(p[1])
	if n := openFDs(t); n > before+2 { // Go's netpoller makes an epoll and an eventfd at its first use
		t.Errorf("%d descriptors open, %d before", n, before)
	}
}

func TestForeignLoopRefuses(t *testing.T) {
	l, err := NewLoop(&LoopOptions{Poller: PollerPoll})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Fd(); !errors.Is(err, ErrNotSupported) {
		t.Errorf("Fd of poller poll: %v, want ErrNotSupported", err)
	}
	if _, err := l.Prepare(); !errors.Is(err, ErrNotSupported) {
		t.Errorf("Prepare of poller poll: %v, want ErrNotSupported", err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	r := start(t, LoopOptions{Poller: PollerEpoll}, nil)
	r.do(func() {
		if _, err := r.Fd(); !errors.Is(err, syscall.EBUSY) {
			t.Errorf("Fd of a loop that runs: %v, want EBUSY", err)
		}
		if err := r.Dispatch(); !errors.Is(err, syscall.EBUSY) {
			t.Errorf("Dispatch of a loop that runs: %v, want EBUSY", err)
		}
	})
}
