// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/sys"
)

// say makes a pipe readable.
func say(t testing.TB, w *os.File, n int) {
	t.Helper()
	if _, err := w.Write(make([]byte, n)); err != nil {
		t.Error(err)
	}
}

// mustWatch watches for reading, on the loop.
func mustWatch(t testing.TB, l *Loop, f *os.File, ev Events, h readyFunc) *Watch {
	t.Helper()
	w, err := l.Watch(int(f.Fd()), ev, h)
	if err != nil {
		t.Error(err)
	}
	return w
}

// A consumer that takes one message a call gets to the last one.
func TestReadinessIsLevelTriggered(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		rd, wr := pipe(t)
		const messages = 1000
		say(t, wr, messages)
		got := make(chan int, 1)
		n := 0
		start(t, o, func(l *Loop) {
			mustWatch(t, l, rd, EventRead, func(w *Watch, ev Events) {
				var b [1]byte
				if _, err := rd.Read(b[:]); err != nil || ev != EventRead {
					t.Error(ev, err)
				}
				if n++; n == messages {
					w.Close()
					got <- n
				}
			})
		})
		wait(t, got)
	})
}

// A watch of edges hears of each write to an eventfd that nobody reads, and of nothing else; where the poller has none, it
// says so and is told of the state.
func TestEdgesOfAnEventfd(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		fd, err := sys.Eventfd(1, sys.EFD_CLOEXEC) // something was written before, and it would block a reader
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = sys.Close(fd) }) // after the loop has ended
		var heard atomic.Int64
		edge := make(chan bool, 1)
		r := start(t, o, func(l *Loop) {
			_, err := l.Watch(fd, EventRead|EventEdge, readyFunc(func(w *Watch, ev Events) {
				if !w.Edge() {
					_ = sys.EventfdTake(fd) // empty when two writes met
				}
				if ev != EventRead {
					t.Errorf("events %#x", ev)
				}
				if heard.Add(1) == 1 {
					edge <- w.Edge()
				}
			}))
			if err != nil {
				t.Error(err)
			}
		})
		if got, want := wait(t, edge), o.Poller != PollerPoll; got != want {
			t.Errorf("edges: %v, want %v", got, want)
		}
		for i := range 1000 {
			before := heard.Load()
			if err := sys.EventfdWrite(fd, 1); err != nil {
				t.Fatal(err)
			}
			for deadline := time.Now().Add(30 * time.Second); heard.Load() == before; {
				if time.Now().After(deadline) {
					t.Fatalf("write %d was not heard", i)
				}
				runtime.Gosched()
			}
		}
		// Nothing is written, and turns pass: nothing is heard.
		quiet := heard.Load()
		for range 100 {
			r.do(func() {})
		}
		if n := heard.Load() - quiet; n > 1 { // the last write may be heard in two turns
			t.Errorf("heard %d times of nothing", n)
		}
	})
}

// A kernel without multishot polls makes a watch of edges one of states.
func TestEdgesFallBackToStates(t *testing.T) {
	l, err := NewLoop(&LoopOptions{Poller: PollerEpoll})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	fd, err := sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer sys.Close(fd)
	w, err := l.Watch(fd, EventRead|EventEdge, readyFunc(func(*Watch, Events) {}))
	if err != nil {
		t.Fatal(err)
	}
	p := &uringPoller{l: l}
	p.polled(w, -int32(syscall.EINVAL))
	if w.Edge() || w.stopped {
		t.Errorf("edges %v, stopped %v; want neither", w.Edge(), w.stopped)
	}
	if len(p.arm) != 1 {
		t.Error("it is not polled again")
	}
}

// The same with bursts of every size that come while the consumer is at work, in other threads.
func TestReadinessInBursts(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		rd, wr := pipe(t)
		const bursts = 300
		total := 0
		for i := range bursts {
			total += 1 + i%67
		}
		got := make(chan bool, 1)
		n := 0
		start(t, o, func(l *Loop) {
			mustWatch(t, l, rd, EventRead, func(w *Watch, ev Events) {
				var b [16]byte
				k, err := rd.Read(b[:])
				if err != nil {
					t.Error(err)
				}
				if n += k; n == total {
					got <- true
				}
			})
		})
		for i := range bursts {
			say(t, wr, 1+i%67)
			if i%50 == 0 {
				time.Sleep(time.Millisecond)
			}
		}
		wait(t, got)
	})
}

func TestEventsOfEachKind(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		r := start(t, o, nil)
		expect := func(name string, f *os.File, ask, want Events) {
			t.Helper()
			got := make(chan Events, 1)
			r.do(func() {
				mustWatch(t, r.Loop, f, ask, func(w *Watch, ev Events) {
					w.Close()
					got <- ev
				})
			})
			if ev := wait(t, got); ev != want {
				t.Errorf("%s: events %#x, want %#x", name, ev, want)
			}
		}
		rd, wr := pipe(t)
		expect("writable", wr, EventWrite, EventWrite)
		expect("asks for both, is one", wr, EventRead|EventWrite, EventWrite)
		say(t, wr, 1)
		expect("readable", rd, EventRead, EventRead)
		wr.Close()
		expect("readable, other end closed", rd, EventRead, EventRead|EventHangup)
		expect("hang-up without asking", rd, EventWrite, EventHangup)
		rd2, wr2 := pipe(t)
		rd2.Close()
		expect("error without asking", wr2, EventRead, EventError)
	})
}

func TestWatchRefuses(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		rd, _ := pipe(t)
		r := start(t, o, nil)
		r.do(func() {
			w := mustWatch(t, r.Loop, rd, EventRead, nil)
			if _, err := r.Watch(int(rd.Fd()), EventWrite, nil); !errors.Is(err, syscall.EEXIST) {
				t.Errorf("second watch of a descriptor: %v, want EEXIST", err)
			}
			w.Close()
			w.Close()
			mustWatch(t, r.Loop, rd, 0, nil).Close()
			if _, err := r.Watch(1<<20, EventRead, nil); !errors.Is(err, syscall.EBADF) {
				t.Errorf("watch of no descriptor: %v, want EBADF", err)
			}
			if _, err := r.Watch(-1, EventRead, nil); !errors.Is(err, syscall.EBADF) {
				t.Errorf("watch of descriptor -1: %v, want EBADF", err)
			}
		})
	})
}

// A regular file is always ready, except for epoll, which says that it cannot tell.
func TestWatchOfARegularFile(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		f, err := os.Create(filepath.Join(t.TempDir(), "file"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		got := make(chan Events, 1)
		r := start(t, o, nil)
		r.do(func() {
			_, err = r.Watch(int(f.Fd()), EventRead, readyFunc(func(w *Watch, ev Events) { w.Close(); got <- ev }))
		})
		if o.Poller == PollerEpoll {
			if !errors.Is(err, syscall.EPERM) {
				t.Errorf("%v, want EPERM", err)
			}
			r.do(func() { // nothing is left of the attempt
				if _, err := r.Watch(int(f.Fd()), EventRead, nil); !errors.Is(err, syscall.EPERM) {
					t.Errorf("%v, want EPERM", err)
				}
			})
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if ev := wait(t, got); ev != EventRead {
			t.Errorf("events %#x", ev)
		}
	})
}

// Two descriptors are ready in the same turn, and whichever handler is first closes the other's watch.
func TestCloseOfAReadyWatchInAHandler(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		r := start(t, o, nil)
		for range 50 {
			var ws [2]*Watch
			var ends [2]*os.File
			calls := 0
			r.do(func() {
				for i := range ws {
					rd, wr := pipe(t)
					ends[i] = wr
					ws[i] = mustWatch(t, r.Loop, rd, EventRead, func(w *Watch, _ Events) {
						calls++
						ws[0].Close()
						ws[1].Close()
					})
				}
			})
			r.do(func() { // both at once, so that one wait finds both
				say(t, ends[0], 1)
				say(t, ends[1], 1)
			})
			for calls := 0; calls == 0; {
				r.do(func() { calls = r.watchedCalls(ws[0]) })
			}
			r.do(func() {})
			r.do(func() {
				if calls != 1 {
					t.Errorf("%d calls, want 1", calls)
				}
			})
		}
	})
}

// watchedCalls is 1 once w is closed.
func (r *running) watchedCalls(w *Watch) int {
	if w.closed {
		return 1
	}
	return 0
}

// The event is in flight when its watch goes: the descriptor becomes ready and the watch is closed in one callback, after
// which the same descriptor is watched again, so that the old event has somebody to be mistaken for.
func TestCloseWhileTheEventIsInFlight(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		rd, wr := pipe(t)
		r := start(t, o, nil)
		var old *Watch
		r.do(func() {
			old = mustWatch(t, r.Loop, rd, EventRead, func(*Watch, Events) { t.Error("a closed watch is called") })
		})
		for i := range 200 {
			called := make(chan Events, 1)
			r.do(func() {
				say(t, wr, 1)
				old.Close()
				if i%2 == 0 { // the event was for reading; this watch must not hear of it
					old = mustWatch(t, r.Loop, rd, EventWrite, func(w *Watch, ev Events) { t.Errorf("events %#x", ev) })
					old.Close()
				}
				old = mustWatch(t, r.Loop, rd, EventRead, func(w *Watch, ev Events) {
					var b [1]byte
					if _, err := rd.Read(b[:]); err != nil {
						t.Error(err)
					}
					_ = w.Modify(0)
					called <- ev
				})
			})
			if ev := wait(t, called); ev != EventRead {
				t.Fatalf("events %#x", ev)
			}
			r.do(func() { _ = old.Modify(EventRead) })
		}
	})
}

// The number of a closed descriptor is given to the next one. Its watch hears of the new one only.
func TestDescriptorNumberUsedAgain(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		r := start(t, o, nil)
		for range 100 {
			var oldPipe, newPipe [2]int
			heard := make(chan Events, 1)
			r.do(func() {
				if err := syscall.Pipe2(oldPipe[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
					t.Error(err)
				}
				if _, err := r.Watch(oldPipe[0], EventRead, readyFunc(func(*Watch, Events) {
					t.Error("the watch of the closed descriptor is called")
				})); err != nil {
					t.Error(err)
				}
			})
			r.do(func() {
				_, _ = syscall.Write(oldPipe[1], []byte{1})
				r.watched[oldPipe[0]].Close()
				syscall.Close(oldPipe[0])
				if err := syscall.Pipe2(newPipe[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
					t.Error(err)
				}
				if _, err := r.Watch(newPipe[0], EventRead, readyFunc(func(w *Watch, ev Events) {
					w.Close()
					heard <- ev
				})); err != nil {
					t.Error(err)
				}
			})
			r.do(func() {})
			select {
			case <-heard:
				t.Error("the new descriptor is told ready before it is")
			default:
			}
			_, _ = syscall.Write(newPipe[1], []byte{1})
			wait(t, heard)
			for _, fd := range []int{oldPipe[1], newPipe[0], newPipe[1]} {
				syscall.Close(fd)
			}
		}
	})
}

func TestModify(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer syscall.Close(pair[0])
		defer syscall.Close(pair[1])
		r := start(t, o, nil)
		heard := make(chan Events, 1)
		var w *Watch
		r.do(func() {
			w, err = r.Watch(pair[0], EventRead, readyFunc(func(w *Watch, ev Events) {
				if err := w.Modify(0); err != nil { // quiet, though the condition holds
					t.Error(err)
				}
				heard <- ev
			}))
		})
		if err != nil {
			t.Fatal(err)
		}
		modify := func(ev Events) {
			t.Helper()
			r.do(func() {
				if err := w.Modify(ev); err != nil {
					t.Error(err)
				}
			})
		}
		modify(EventWrite)
		if ev := wait(t, heard); ev != EventWrite {
			t.Errorf("asked for write: %#x", ev)
		}
		modify(EventRead)
		modify(EventRead) // the same again
		_, _ = syscall.Write(pair[1], []byte{1})
		if ev := wait(t, heard); ev != EventRead {
			t.Errorf("asked for read: %#x", ev)
		}
		for range 5 {
			r.do(func() {})
		}
		select {
		case ev := <-heard:
			t.Errorf("a quiet watch hears %#x", ev)
		default:
		}
		// There and back before the kernel hears of it, with the event in flight.
		r.do(func() {
			_ = w.Modify(EventRead)
			_ = w.Modify(EventWrite)
			_ = w.Modify(0)
			_ = w.Modify(EventRead | EventWrite)
		})
		if ev := wait(t, heard); ev != EventRead|EventWrite {
			t.Errorf("asked for both: %#x", ev)
		}
		r.do(func() { w.Close() })
	})
}

// Handlers make the next stage's watch, over more stages than there are submission entries.
func TestAddInsideAHandler(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		o.RingEntries = 8
		r := start(t, o, nil)
		const stages = 100
		reached := make(chan int, 1)
		var next func(i int)
		next = func(i int) {
			if i == stages {
				reached <- i
				return
			}
			rd, wr := pipe(t)
			mustWatch(t, r.Loop, rd, EventRead, func(w *Watch, _ Events) {
				next(i + 1)
				w.Close()
				rd.Close()
				wr.Close()
			})
			say(t, wr, 1)
		}
		r.do(func() { next(0) })
		wait(t, reached)
	})
}

// More descriptors are ready at once than a wait of epoll takes or the submission queue holds.
func TestManyReadyAtOnce(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		o.RingEntries = 16
		const n = 3 * epollAtOnce
		left := n
		all := make(chan bool, 1)
		r := start(t, o, nil)
		r.do(func() {
			for range n {
				rd, wr := pipe(t)
				say(t, wr, 1)
				mustWatch(t, r.Loop, rd, EventRead, func(w *Watch, _ Events) {
					w.Close()
					if left--; left == 0 {
						all <- true
					}
				})
			}
		})
		wait(t, all)
	})
}

// A random walk over adding, modifying, closing, filling and emptying, against a model: in the end exactly the watches
// that ask for what holds are called.
func TestWatchesAgainstAModel(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		o.RingEntries = 8
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		dice := rand.New(rand.NewPCG(seed, 0))
		r := start(t, o, nil)
		type subject struct {
			rd, wr *os.File
			w      *Watch
			full   bool
			called bool
		}
		subjects := make([]*subject, 40)
		for i := range subjects {
			rd, wr := pipe(t)
			subjects[i] = &subject{rd: rd, wr: wr}
		}
		step := func(s *subject) {
			switch dice.IntN(5) {
			case 0:
				if s.w != nil {
					s.w.Close()
				}
				s.w = mustWatch(t, r.Loop, s.rd, EventRead, func(w *Watch, ev Events) {
					if w != s.w || ev != EventRead || w.want == 0 {
						t.Errorf("events %#x for a watch that asks for %#x", ev, w.want)
					}
					s.called = true
				})
			case 1:
				if s.w != nil {
					s.w.Close()
					s.w = nil
				}
			case 2:
				if s.w != nil {
					_ = s.w.Modify(Events(dice.IntN(2)) * EventRead)
				}
			case 3:
				if !s.full {
					say(t, s.wr, 1)
					s.full = true
				}
			case 4:
				if s.full {
					var b [1]byte
					if _, err := s.rd.Read(b[:]); err != nil {
						t.Error(err)
					}
					s.full = false
				}
			}
		}
		for range 100 {
			r.do(func() {
				for range dice.IntN(60) {
					step(subjects[dice.IntN(len(subjects))])
				}
			})
			// Once the polls are armed and what was found before the changes has been told, a turn calls exactly those
			// that it should.
			settled := false
			for deadline := time.Now().Add(patience); !settled && time.Now().Before(deadline); {
				r.do(func() {
					for _, s := range subjects {
						s.called = false
					}
				})
				r.do(func() {
					settled = true
					for _, s := range subjects {
						want := s.w != nil && s.w.want != 0 && s.full
						settled = settled && s.called == want
					}
				})
			}
			if !settled {
				t.Fatal("a ready watch is not called, or one that is not ready is")
			}
		}
		r.do(func() { // before the pipes are closed
			for _, s := range subjects {
				if s.w != nil {
					s.w.Close()
				}
			}
		})
	})
}

// The owner's mistake: the descriptor is closed before its watch. It must neither spin nor hang the loop.
func TestDescriptorClosedBeforeItsWatch(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		var p [2]int
		if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
			t.Fatal(err)
		}
		r := start(t, o, nil)
		var w *Watch
		calls := 0
		r.do(func() {
			w, _ = r.Watch(p[0], EventRead, readyFunc(func(*Watch, Events) { calls++ }))
			syscall.Close(p[0])
			syscall.Close(p[1])
		})
		before := r.Stats().Turns
		time.Sleep(50 * time.Millisecond)
		after := r.Stats().Turns
		if after-before > 50 {
			t.Errorf("%d turns for nothing", after-before)
		}
		r.do(func() {
			if calls > 2 {
				t.Errorf("told %d times", calls)
			}
			w.Close()
		})
		ran := make(chan bool, 1)
		r.Post(func() { ran <- true })
		wait(t, ran)
	})
}

// A closed watch holds nothing: once its owner has closed the descriptor too, the other end sees it.
func TestClosedWatchLetsGoOfItsFile(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		r := start(t, o, nil)
		var p [2]int
		if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
			t.Fatal(err)
		}
		defer syscall.Close(p[1])
		r.do(func() {
			w, err := r.Watch(p[0], EventRead, readyFunc(func(*Watch, Events) { t.Error("called") }))
			if err != nil {
				t.Error(err)
				return
			}
			r.Post(func() { // a turn later its poll is in flight
				w.Close()
				syscall.Close(p[0])
			})
		})
		for began := time.Now(); ; {
			r.do(func() {})
			// Not by a write, which would make the pipe readable and complete a poll that was forgotten.
			end := []sys.PollFd{{Fd: int32(p[1])}}
			if n, _ := sys.Ppoll(end, 0); n == 1 && end[0].Revents&sys.POLLERR != 0 {
				return
			}
			if time.Since(began) > patience {
				t.Fatal("the file is still open")
			}
		}
	})
}

// The table gives a place again; an event that names its last user finds nobody.
func TestWatchTableTellsGenerationsApart(t *testing.T) {
	l, err := NewLoop(&LoopOptions{Poller: PollerPoll})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	rd, wr := pipe(t)
	a := mustWatch(t, l, rd, EventRead, nil)
	index, gen := a.index, a.gen
	if l.watchAt(index, gen) != a {
		t.Error("a watch is not found")
	}
	a.Close()
	if l.watchAt(index, gen) != nil {
		t.Error("a closed watch is found")
	}
	b := mustWatch(t, l, wr, EventWrite, nil)
	if b.index != index || l.watchAt(index, gen) != nil || l.watchAt(index, b.gen) != b {
		t.Error("the place's next user is mistaken for the last")
	}
	if l.watchAt(-1, 0) != nil || l.watchAt(1<<20, 0) != nil {
		t.Error("a place outside the table")
	}
}
