// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// The suite below runs the same named tests on every poller, because the promise of the package is that they cannot be
// told apart. Tests of one poller's own means stand in its file.

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is how long a test waits for what must happen: forever, for all practical purposes, on any machine.
const patience = 60 * time.Second

// eachPoller runs a test on every poller that this machine has.
func eachPoller(t *testing.T, test func(t *testing.T, o LoopOptions)) {
	t.Helper()
	for _, kind := range []PollerKind{PollerIOUring, PollerEpoll, PollerPoll} {
		t.Run(kind.String(), func(t *testing.T) {
			o := LoopOptions{Poller: kind}
			needPoller(t, &o)
			test(t, o)
		})
	}
}

// needPoller skips where the kernel refuses the poller. Only io_uring can be refused.
func needPoller(t testing.TB, o *LoopOptions) {
	t.Helper()
	l, err := NewLoop(o)
	if err != nil {
		if o.Poller == PollerIOUring {
			t.Skipf("needs io_uring: %v", err)
		}
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// running is a loop that runs on a goroutine of its own.
type running struct {
	*Loop
	t    testing.TB
	stop func() error
}

// start makes a loop, has prepare set it up and runs it until the test ends.
func start(t testing.TB, o LoopOptions, prepare func(l *Loop)) *running {
	t.Helper()
	l, err := NewLoop(&o)
	if err != nil {
		t.Fatal(err)
	}
	if prepare != nil {
		prepare(l)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	r := &running{Loop: l, t: t}
	var once bool
	r.stop = func() error {
		if once {
			return nil
		}
		once = true
		cancel()
		select {
		case err := <-ended:
			return err
		case <-time.After(patience):
			return errors.New("the loop does not end")
		}
	}
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// do runs fn on the loop and waits.
func (r *running) do(fn func()) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := r.Call(ctx, func() error { fn(); return nil }); err != nil {
		r.t.Fatal(err)
	}
}

// wait waits for what a callback sends.
func wait[T any](t testing.TB, ch <-chan T) T {
	t.Helper()
	select {
	case v := <-ch:
		return v
	case <-time.After(patience):
		t.Fatal("waited in vain")
	}
	panic("unreachable")
}

// Handlers of one function each.
type (
	readyFunc func(w *Watch, ev Events)
	timerFunc func(t *Timer)
	endFunc   func()
	doneFunc  func(r *Request, err error)
)

func (f readyFunc) HandleReady(w *Watch, ev Events) { f(w, ev) }
func (f timerFunc) HandleTimer(t *Timer)            { f(t) }
func (f endFunc) EndTurn()                          { f() }
func (f doneFunc) Complete(r *Request, err error)   { f(r, err) }

// pipe gives a pipe whose reading end does not block, closed when the test ends.
func pipe(t testing.TB) (r, w *os.File) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

// openFDs counts the open descriptors of the process.
func openFDs(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skipf("needs /proc: %v", err)
	}
	return len(entries)
}

func TestRunEndsWithItsContext(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		before := openFDs(t)
		r := start(t, o, nil)
		ran := false
		r.do(func() { ran = true })
		if !ran {
			t.Fatal("Call did not run its function")
		}
		last := make(chan bool, 1)
		r.do(func() { r.Post(func() { last <- true }) })
		if err := r.stop(); err != nil {
			t.Fatal(err)
		}
		wait(t, last)
		if err := r.Call(context.Background(), func() error { return nil }); !errors.Is(err, ErrClosed) {
			t.Errorf("Call on a loop that has ended: %v, want ErrClosed", err)
		}
		if err := r.Run(context.Background()); err == nil {
			t.Error("a loop ran twice")
		}
		if n := openFDs(t); n != before {
			t.Errorf("%d descriptors open, %d before", n, before)
		}
	})
}

func TestReadinessIsLevelTriggered(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		rd, wr := pipe(t)
		const messages = 1000
		if _, err := wr.Write(make([]byte, messages)); err != nil {
			t.Fatal(err)
		}
		got := make(chan int, 1)
		n := 0
		start(t, o, func(l *Loop) {
			_, err := l.Watch(int(rd.Fd()), EventRead, readyFunc(func(w *Watch, ev Events) {
				var b [1]byte // one message a call, the rest stays
				if _, err := rd.Read(b[:]); err != nil {
					t.Error(err)
				}
				if n++; n == messages {
					w.Close()
					got <- n
				}
			}))
			if err != nil {
				t.Fatal(err)
			}
		})
		wait(t, got)
	})
}

func TestTimers(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		done := make(chan []int, 1)
		var order []int
		start(t, o, func(l *Loop) {
			l.Plug()
			l.Unplug()
			for _, ms := range []int{5, 1, 3, 2, 4} {
				l.Timer(time.Duration(ms)*time.Millisecond, timerFunc(func(*Timer) {
					if order = append(order, ms); len(order) == 5 {
						done <- order
					}
				}))
			}
		})
		for i, ms := range wait(t, done) {
			if ms != i+1 {
				t.Fatalf("timers out of order: %v", order)
			}
		}
	})
}
