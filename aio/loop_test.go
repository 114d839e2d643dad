// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sluice-blk/sluice/internal/sys"
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

func TestPollerIsNamed(t *testing.T) {
	for k := PollerAuto; k <= PollerPoll; k++ {
		if got, err := ParsePoller(k.String()); err != nil || got != k {
			t.Errorf("ParsePoller(%q) = %v, %v", k.String(), got, err)
		}
	}
	if _, err := ParsePoller("kqueue"); err == nil {
		t.Error("ParsePoller takes a poller that there is not")
	}
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

// What is posted from inside the last posted functions runs still, requests in flight come home.
func TestRunFinishesWhatWasPosted(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		l, err := NewLoop(&o)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		var order []string
		outcome := &Request{Done: doneFunc(func(*Request, error) { order = append(order, "outcome") })}
		l.Post(func() {
			order = append(order, "first")
			l.Post(func() {
				order = append(order, "second")
				l.CompleteLater(outcome, nil)
			})
		})
		if err := l.Run(ctx); err != nil {
			t.Fatal(err)
		}
		if want := "[first second outcome]"; fmt.Sprint(order) != want {
			t.Errorf("ran %v, want %s", order, want)
		}
	})
}

func TestCloseOfALoopThatNeverRan(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		before := openFDs(t)
		rd, _ := pipe(t)
		l, err := NewLoop(&o)
		if err != nil {
			t.Fatal(err)
		}
		w, err := l.Watch(int(rd.Fd()), EventRead, readyFunc(func(*Watch, Events) { t.Error("called") }))
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			w.Close()
		}
		if err := w.Modify(EventRead); !errors.Is(err, ErrClosed) {
			t.Errorf("Modify after the end: %v", err)
		}
		if err := l.Run(context.Background()); err == nil {
			t.Error("a closed loop runs")
		}
		l.Post(func() { t.Error("posted after the end") })
		if n := openFDs(t); n != before+2 { // the pipe
			t.Errorf("%d descriptors open, %d before", n, before)
		}
	})
}

// An idle loop sleeps: it neither turns nor enters the kernel. Garbage collections, whose signals cut waits short, do
// not change that much.
func TestIdleLoopSleeps(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		for _, window := range []time.Duration{0, 50 * time.Microsecond} {
			o.PollMax = window
			r := start(t, o, nil)
			before := r.Stats()
			for range 20 {
				runtime.GC()
				time.Sleep(5 * time.Millisecond)
			}
			after := r.Stats()
			if turns := after.Turns - before.Turns; turns > 100 {
				t.Errorf("PollMax %v: %d turns while nothing happened", window, turns)
			}
			if err := r.stop(); err != nil {
				t.Fatal(err)
			}
			if last := r.Stats(); last.Turns < after.Turns || last.Posted == 0 {
				t.Errorf("counters after the end: %+v", last)
			}
		}
	})
}

func TestPinnedLoopIsUnpinnedAtTheEnd(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, on, after sys.CPUSet
	if err := sys.SchedGetaffinity(&before); err != nil {
		t.Skipf("needs sched_getaffinity: %v", err)
	}
	cpu := 0
	for !before.IsSet(cpu) {
		cpu++
	}
	l, err := NewLoop(&LoopOptions{Pin: true, CPU: cpu})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	l.Post(func() {
		_ = sys.SchedGetaffinity(&on)
		cancel()
	})
	if err := l.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if on.Count() != 1 || !on.IsSet(cpu) {
		t.Errorf("the loop ran on %d processors, want processor %d alone", on.Count(), cpu)
	}
	if err := sys.SchedGetaffinity(&after); err != nil || after != before {
		t.Errorf("the thread stays pinned (%v)", err)
	}

	l, err = NewLoop(&LoopOptions{Pin: true, CPU: 1023})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Run(context.Background()); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("Run on a processor that there is not: %v, want EINVAL", err)
	}
}

// A mistake of a handler ends the program, as anywhere in Go; it must not be swallowed.
func TestPanicOfAHandlerIsNotCaught(t *testing.T) {
	l, err := NewLoop(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if p := recover(); p != "mistake" {
			t.Errorf("recovered %v", p)
		}
		l.running.Store(false) // so that Close gives the descriptors back
		l.tid.Store(0)
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	l.Post(func() { panic("mistake") })
	_ = l.Run(context.Background())
}

// Goroutines that never yield make the runtime preempt by signals, and collections stop the world: no wait of the loop
// fails or hangs for that.
func TestLoopBesideBusyGoroutines(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		var stop atomic.Bool
		var group sync.WaitGroup
		for range runtime.GOMAXPROCS(0) {
			group.Go(func() {
				for n := 0; !stop.Load(); n++ {
					if n%1_000_000 == 0 {
						runtime.GC()
					}
				}
			})
		}
		rd, wr := pipe(t)
		got := make(chan bool, 1)
		r := start(t, o, func(l *Loop) {
			mustWatch(t, l, rd, EventRead, func(*Watch, Events) {
				var b [1]byte
				_, _ = rd.Read(b[:])
				l.Timer(time.Microsecond, timerFunc(func(*Timer) { got <- true }))
			})
		})
		for range 30 {
			say(t, wr, 1)
			wait(t, got)
		}
		stop.Store(true)
		group.Wait()
		if err := r.stop(); err != nil {
			t.Error(err)
		}
	})
}
