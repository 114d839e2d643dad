// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/sys"
)

// diary is what happened, in order. It is written on the loop alone.
type diary []string

func (d *diary) add(format string, args ...any) { *d = append(*d, fmt.Sprintf(format, args...)) }

// diaryEngine notes when it is told to hand over its queue.
type diaryEngine struct {
	d     *diary
	queue int
	count EngineCounters
}

func (e *diaryEngine) kind() EngineKind          { return EngineThreads }
func (e *diaryEngine) attach(*File) error        { return nil }
func (e *diaryEngine) detach(*File)              {}
func (e *diaryEngine) enqueue(*Request)          { e.queue++ }
func (e *diaryEngine) reap() int                 { return 0 }
func (e *diaryEngine) queued() int               { return e.queue }
func (e *diaryEngine) inflight() int             { return 0 }
func (e *diaryEngine) close()                    {}
func (e *diaryEngine) counters() *EngineCounters { return &e.count }
func (e *diaryEngine) flush() {
	if e.queue > 0 {
		e.d.add("flush %d", e.queue)
		e.queue = 0
	}
}

// diaryLoop is a loop with an engine that keeps a diary; requests are handed to it by submit.
func diaryLoop(t *testing.T, o LoopOptions) (l *Loop, d *diary, submit func()) {
	t.Helper()
	l, err := NewLoop(&o)
	if err != nil {
		t.Fatal(err)
	}
	if err := l.poller.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	d = new(diary)
	e := &diaryEngine{d: d}
	l.engines[EngineThreads] = e
	return l, d, func() { // what File.Submit does
		e.enqueue(nil)
		if !l.plugged() {
			e.flush()
		}
	}
}

func (d *diary) expect(t *testing.T, want string) {
	t.Helper()
	if got := strings.Join(*d, ", "); got != want {
		t.Errorf("happened: %s\nwant:     %s", got, want)
	}
	*d = nil
}

func TestSectionsNest(t *testing.T) {
	l, d, submit := diaryLoop(t, LoopOptions{Poller: PollerPoll})
	submit()
	d.expect(t, "flush 1")
	l.Plug()
	submit()
	l.Plug()
	submit()
	l.Unplug()
	submit()
	d.expect(t, "")
	l.Unplug()
	d.expect(t, "flush 3")
	submit()
	d.expect(t, "flush 1")
}

func TestFlushInsideASection(t *testing.T) {
	l, d, submit := diaryLoop(t, LoopOptions{Poller: PollerPoll})
	l.Plug()
	submit()
	submit()
	l.Flush()
	d.expect(t, "flush 2")
	submit()
	d.expect(t, "")
	l.Flush()
	l.Flush()
	l.Unplug()
	d.expect(t, "flush 1")
}

func TestTurnIsASection(t *testing.T) {
	l, d, submit := diaryLoop(t, LoopOptions{Poller: PollerPoll})
	l.Post(func() {
		l.Plug()
		submit()
		l.Unplug()
		submit()
		d.add("handler done")
	})
	l.Post(submit)
	l.Timer(0, timerFunc(func(*Timer) { submit() }))
	l.turn(-1)
	if len(*d) == 1 { // the timer was due a turn later
		l.turn(-1)
	}
	l.turn(0)
	if got := strings.Join(*d, ", "); got != "handler done, flush 4" && got != "handler done, flush 3, flush 1" {
		t.Error(got)
	}
	*d = nil
	l.Post(func() {
		submit()
		l.Flush()
		d.add("flushed")
	})
	l.turn(-1)
	d.expect(t, "flush 1, flushed")
}

// A section that is left open does not keep a turn from handing over.
func TestSectionOpenOverATurn(t *testing.T) {
	l, d, submit := diaryLoop(t, LoopOptions{Poller: PollerPoll})
	l.Post(func() { l.Plug(); submit() })
	l.turn(-1)
	d.expect(t, "flush 1")
	l.Unplug()
	d.expect(t, "")
}

func TestUnbatchedLoopHandsOverAtOnce(t *testing.T) {
	l, d, submit := diaryLoop(t, LoopOptions{Poller: PollerPoll, Unbatched: true})
	if !l.Unbatched() {
		t.Error("not unbatched")
	}
	l.Post(func() {
		l.Plug()
		submit()
		submit()
		l.Unplug()
	})
	l.turn(-1)
	d.expect(t, "flush 1, flush 1")
}

// One turn with everything in it, and the order of it all.
func TestOrderOfATurn(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		l, d, submit := diaryLoop(t, o)
		var end TurnEnd
		end.H = endFunc(func() { d.add("end"); submit() })
		outcome := func(name string) *Request {
			return &Request{Done: doneFunc(func(r *Request, err error) { d.add("%s %v", name, err); l.AtTurnEnd(&end) })}
		}
		rd, wr := pipe(t)
		say(t, wr, 1)
		w := mustWatch(t, l, rd, EventRead, func(w *Watch, _ Events) {
			d.add("ready")
			w.Close()
			l.CompleteLater(outcome("from ready"), nil)
			l.AtTurnEnd(&end)
		})
		for len(l.ready) == 0 { // the wait has found it; what follows is one turn's work
			_ = l.poller.wait(0)
		}
		l.CompleteLater(outcome("before"), syscall.EIO)
		l.Post(func() {
			d.add("posted")
			l.AtTurnEnd(&end)
			l.AtTurnEnd(&end)
			l.CompleteLater(outcome("from post"), nil)
			d.add("posted done")
		})
		l.Timer(0, timerFunc(func(*Timer) { d.add("timer"); l.CompleteLater(outcome("from timer"), nil) }))
		l.work()
		want := "posted, posted done, before input/output error, from post <nil>, ready, timer, from ready <nil>, from timer <nil>, end, flush 1"
		d.expect(t, want)
		w.Close()
	})
}

func TestTurnEndIsDoneOnceATurn(t *testing.T) {
	l, d, _ := diaryLoop(t, LoopOptions{Poller: PollerPoll})
	var a, b TurnEnd
	b.H = endFunc(func() { d.add("b") })
	a.H = endFunc(func() {
		d.add("a")
		l.AtTurnEnd(&b)
		l.AtTurnEnd(&b)
	})
	l.Post(func() { l.AtTurnEnd(&a); l.AtTurnEnd(&a) })
	l.Post(func() { l.AtTurnEnd(&a) })
	l.turn(-1)
	d.expect(t, "a, b")
	l.turn(0)
	d.expect(t, "")
	l.AtTurnEnd(&a) // outside a turn: at the end of the next, which does not wait
	l.turn(-1)
	d.expect(t, "a, b")
}

// End work that asks for itself for ever is done a bounded number of times a turn, and keeps nobody else from working.
func TestTurnEndThatAsksForItself(t *testing.T) {
	l, d, _ := diaryLoop(t, LoopOptions{Poller: PollerPoll})
	var a TurnEnd
	n := 0
	a.H = endFunc(func() { n++; l.AtTurnEnd(&a) })
	l.AtTurnEnd(&a)
	l.Post(func() { d.add("posted") })
	l.turn(-1)
	if n != roundsMax {
		t.Errorf("done %d times in a turn, want %d", n, roundsMax)
	}
	l.Post(func() { a.H = endFunc(func() { d.add("last") }) })
	l.turn(-1)
	d.expect(t, "posted, last")
}

// Outcomes are told in order, never inside the call that knows them, and those that follow from them in the same turn.
func TestCompleteLater(t *testing.T) {
	l, d, _ := diaryLoop(t, LoopOptions{Poller: PollerPoll})
	inside := false
	var chain func(n int) *Request
	chain = func(n int) *Request {
		return &Request{Done: doneFunc(func(r *Request, err error) {
			if inside {
				t.Error("told inside CompleteLater")
			}
			d.add("%d", n)
			if n < 5 {
				inside = true
				l.CompleteLater(chain(n+1), nil)
				inside = false
			}
		})}
	}
	l.Post(func() {
		inside = true
		l.CompleteLater(chain(1), nil)
		l.CompleteLater(chain(3), nil)
		inside = false
	})
	l.turn(-1)
	d.expect(t, "1, 3, 2, 4, 3, 5, 4, 5")
}

// A chain of outcomes without an end shares the loop with everybody else.
func TestCompletionsWithoutEnd(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		n := 0
		stop := false
		var r *running
		again := new(Request)
		again.Done = doneFunc(func(*Request, error) {
			if n++; !stop {
				r.CompleteLater(again, nil)
			}
		})
		r = start(t, o, nil)
		r.do(func() { r.CompleteLater(again, nil) })
		rd, wr := pipe(t)
		say(t, wr, 1)
		ready, due := make(chan bool, 1), make(chan bool, 1)
		r.do(func() {
			mustWatch(t, r.Loop, rd, EventRead, func(w *Watch, _ Events) { w.Close(); ready <- true })
			r.Timer(time.Millisecond, timerFunc(func(*Timer) { due <- true }))
		})
		wait(t, ready)
		wait(t, due)
		r.do(func() { stop = true })
	})
}

// Layers see an outcome in the order from the bottom to the top.
func TestInterceptedOutcome(t *testing.T) {
	l, d, _ := diaryLoop(t, LoopOptions{Poller: PollerPoll})
	r := &Request{Done: doneFunc(func(_ *Request, err error) { d.add("owner %v", err) })}
	for i := range MaxIntercepts {
		if !r.Intercept(doneFunc(func(r *Request, err error) { d.add("layer %d", i); r.Finish(err) })) {
			t.Fatal("refused")
		}
	}
	if r.Intercept(nil) {
		t.Error("one more than the stack holds")
	}
	l.CompleteLater(r, nil)
	l.turn(-1)
	if (*d)[0] != "layer 7" || (*d)[MaxIntercepts] != "owner <nil>" {
		t.Error(*d)
	}
}

// A loop that turns often without ever being scheduled anew would have the runtime's monitor take its processor away at
// every look. One that turns seldom has no need to pay for it.
func TestBusyLoopPassesThroughTheScheduler(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		r := start(t, o, nil)
		rounds := func(n int, gap time.Duration) uint64 {
			before := r.Stats().Yields
			for range n {
				time.Sleep(gap)
				r.do(func() {})
			}
			return r.Stats().Yields - before
		}
		deadline := time.Now().Add(30 * time.Second)
		for rounds(4*yieldTurns, 0) == 0 {
			if time.Now().After(deadline) {
				t.Fatal("it never passed through the scheduler")
			}
		}
		if n := rounds(yieldTurns/2, 2*yieldAfter); n > 1 {
			t.Errorf("%d times in %d turns that were far between", n, yieldTurns/2)
		}
	})
}

// The window grows while events come soon and is given up when they do not.
func TestPollingWindow(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		o.PollMax = time.Second // far more than an answer takes: it pays always
		fd, err := sys.Eventfd(0, sys.EFD_NONBLOCK|sys.EFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		defer sys.Close(fd)
		heard := make(chan bool, 1)
		r := start(t, o, func(l *Loop) {
			if _, err := l.Watch(fd, EventRead, readyFunc(func(*Watch, Events) {
				_, _ = sys.EventfdRead(fd)
				heard <- true
			})); err != nil {
				t.Fatal(err)
			}
		})
		var window int64
		for range 100 {
			_ = sys.EventfdWrite(fd, 1)
			wait(t, heard)
		}
		r.do(func() { window = r.windows.guest })
		if window < windowMin {
			t.Errorf("window %d after events that came soon", window)
		}
		if err := r.stop(); err != nil {
			t.Error(err)
		}
	})
	l, err := NewLoop(&LoopOptions{Poller: PollerPoll, PollMax: time.Microsecond})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.windows = both(1000)
	l.sleep(int64(2 * time.Millisecond))
	if l.windows.guest != 0 || l.windows.device == 0 {
		t.Errorf("windows %+v after an event that came late", l.windows)
	}
}

func TestStatsCountEachThing(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		r := start(t, o, nil)
		before := r.Stats()
		rd, wr := pipe(t)
		done := make(chan bool, 2)
		r.do(func() {
			say(t, wr, 1)
			mustWatch(t, r.Loop, rd, EventRead, func(w *Watch, _ Events) { w.Close(); done <- true })
			r.Timer(0, timerFunc(func(*Timer) { done <- true }))
		})
		wait(t, done)
		wait(t, done)
		after := r.Stats()
		if after.Poller != o.Poller {
			t.Errorf("poller %s", after.Poller)
		}
		got := []uint64{after.Posted - before.Posted, after.Timers - before.Timers}
		if want := []uint64{2, 1}; !slices.Equal(got, want) {
			t.Errorf("posted, timers: %v, want %v", got, want)
		}
		if after.Ready == before.Ready || after.Turns == before.Turns || after.SysCalls == before.SysCalls {
			t.Errorf("before %+v\nafter %+v", before, after)
		}
	})
}
