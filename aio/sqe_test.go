// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/uring"
)

type cqeFunc func(cqe uring.CQE)

func (f cqeFunc) HandleCQE(cqe uring.CQE) { f(cqe) }

func prepNop(e *uring.SQE) { e.PrepNop() }

// uringLoop starts a loop on io_uring, or skips.
func uringLoop(t testing.TB, o LoopOptions) *running {
	t.Helper()
	o.Poller = PollerIOUring
	needPoller(t, &o)
	return start(t, o, nil)
}

func TestAddSQENeedsIOUring(t *testing.T) {
	l, err := NewLoop(&LoopOptions{Poller: PollerEpoll})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := l.AddSQE(prepNop, nil); !errors.Is(err, ErrNotSupported) {
		t.Errorf("%v, want ErrNotSupported", err)
	}
}

func TestAddSQE(t *testing.T) {
	r := uringLoop(t, LoopOptions{})
	got := make(chan uring.CQE, 1)
	inside := true
	r.do(func() {
		err := r.AddSQE(func(e *uring.SQE) {
			data := e.UserData
			e.PrepNop()
			if data == 0 || e.UserData != 0 {
				t.Errorf("user data %#x when prep is called", data)
			}
			e.AddFlags(uring.IOSQE_CQE_SKIP_SUCCESS) // must not lose the completion
		}, cqeFunc(func(c uring.CQE) {
			if inside {
				t.Error("told inside AddSQE")
			}
			got <- c
		}))
		if err != nil {
			t.Error(err)
		}
		r.Flush()
		inside = false
	})
	if c := wait(t, got); c.Res != 0 || c.Err() != nil {
		t.Errorf("%+v", c)
	}
}

// The loop is set up before it runs, on another thread than the one that will own the ring.
func TestAddSQEBeforeRun(t *testing.T) {
	o := LoopOptions{Poller: PollerIOUring}
	needPoller(t, &o)
	got := make(chan uring.CQE, 1)
	start(t, o, func(l *Loop) {
		if err := l.AddSQE(prepNop, cqeFunc(func(c uring.CQE) { got <- c })); err != nil {
			t.Error(err)
		}
		l.Flush()
	})
	wait(t, got)
}

// A queue of eight entries carries thousands from one handler, with a completion queue that overflows meanwhile. None is
// lost, none comes twice.
func TestAddSQEBeyondTheQueues(t *testing.T) {
	o := LoopOptions{RingEntries: 8}
	o.seams.cqEntries = 16
	r := uringLoop(t, o)
	const n = 3000
	calls := make([]int, n)
	left := n
	all := make(chan bool, 1)
	r.do(func() {
		for i := range n {
			err := r.AddSQE(prepNop, cqeFunc(func(uring.CQE) {
				calls[i]++
				if left--; left == 0 {
					all <- true
				}
			}))
			if err != nil {
				t.Error(err)
			}
		}
	})
	wait(t, all)
	r.do(func() {
		for i, c := range calls {
			if c != 1 {
				t.Fatalf("entry %d completed %d times", i, c)
			}
		}
	})
}

// More polls fire at once than the completion queue holds: the kernel keeps the rest and the loop fetches it.
func TestOverflowedCompletionQueue(t *testing.T) {
	o := LoopOptions{RingEntries: 16}
	o.seams.cqEntries = 16
	r := uringLoop(t, o)
	rd, wr := pipe(t)
	const n = 200
	left := n
	all := make(chan bool, 1)
	r.do(func() {
		for range n {
			err := r.AddSQE(func(e *uring.SQE) { e.PrepPollAdd(int(rd.Fd()), uring.POLLIN, 0) }, cqeFunc(func(c uring.CQE) {
				if c.Res != int32(uring.POLLIN) {
					t.Errorf("%+v", c)
				}
				if left--; left == 0 {
					all <- true
				}
			}))
			if err != nil {
				t.Error(err)
			}
		}
	})
	r.do(func() {}) // all are armed
	say(t, wr, 1)   // all fire
	wait(t, all)
	if lost := r.ring.CQLost(); lost != 0 {
		t.Errorf("%d completions lost", lost)
	}
}

// What did not fit is taken by the wait that finds the queue full, and not a turn at a time.
func TestOverflowIsTakenInOneWait(t *testing.T) {
	o := LoopOptions{RingEntries: 16}
	o.seams.cqEntries = 16
	l := handLoop(t, o)
	rd, wr := pipe(t)
	const n = 200
	for range n {
		err := l.AddSQE(func(e *uring.SQE) { e.PrepPollAdd(int(rd.Fd()), uring.POLLIN, 0) }, cqeFunc(func(uring.CQE) {}))
		if err != nil {
			t.Fatal(err)
		}
	}
	l.turn(0)
	say(t, wr, 1)
	if err := l.poller.wait(0); err != nil {
		t.Fatal(err)
	}
	if len(l.cqes) != n {
		t.Errorf("one wait found %d of %d completions", len(l.cqes), n)
	}
	l.work()
}

// handLoop is a loop on io_uring that the test turns by hand.
func handLoop(t *testing.T, o LoopOptions) *Loop {
	t.Helper()
	o.Poller = PollerIOUring
	needPoller(t, &o)
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
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
	return l
}

// A kernel that takes nothing for a while is asked again now and then, and not as fast as the processor can.
func TestRefusedLoopDoesNotSpin(t *testing.T) {
	for _, e := range []syscall.Errno{syscall.EAGAIN, syscall.EBUSY} {
		const while = 50 * time.Millisecond
		var o LoopOptions
		var began time.Time
		calls := 0
		o.seams.enter = func(fd int, n, want, flags uint32, arg unsafe.Pointer, size uintptr) (int, error) {
			if !began.IsZero() && time.Since(began) < while {
				calls++
				return 0, e
			}
			return uring.KernelEnter(fd, n, want, flags, arg, size)
		}
		r := uringLoop(t, o)
		done := make(chan bool, 1)
		r.do(func() {
			if err := r.AddSQE(prepNop, cqeFunc(func(uring.CQE) { done <- true })); err != nil {
				t.Error(err)
			}
			began = time.Now()
		})
		wait(t, done)
		r.do(func() {
			if calls == 0 || calls > 1000 {
				t.Errorf("%v: asked %d times in %v", e, calls, while)
			}
		})
	}
}

// One entry that completes many times keeps its slot until the last.
func TestMultishotEntry(t *testing.T) {
	r := uringLoop(t, LoopOptions{})
	rd, wr := pipe(t)
	got := make(chan uring.CQE, 1)
	var data uint64
	r.do(func() {
		err := r.AddSQE(func(e *uring.SQE) {
			data = e.UserData
			e.PrepPollAdd(int(rd.Fd()), uring.POLLIN, uring.IORING_POLL_ADD_MULTI)
		}, cqeFunc(func(c uring.CQE) { got <- c }))
		if err != nil {
			t.Error(err)
		}
	})
	for range 5 {
		say(t, wr, 1)
		c := wait(t, got)
		if c.Res == -int32(syscall.EINVAL) {
			t.Skip("needs multishot polls (Linux 5.13)")
		}
		if !c.More() {
			t.Fatalf("%+v", c)
		}
	}
	r.do(func() { // the user data that prep saw names it
		if err := r.AddSQE(func(e *uring.SQE) { e.PrepPollRemove(data) }, cqeFunc(func(uring.CQE) {})); err != nil {
			t.Error(err)
		}
	})
	if c := wait(t, got); c.More() || c.Res != -int32(syscall.ECANCELED) {
		t.Errorf("%+v", c)
	}
	r.do(func() {
		if n := r.poller.(*uringPoller).users; n > 1 {
			t.Errorf("%d entries counted as in flight", n)
		}
	})
}

// What is in flight when the loop ends is cancelled, and told.
func TestEndCancelsEntries(t *testing.T) {
	r := uringLoop(t, LoopOptions{})
	rd, _ := pipe(t)
	told := 0
	r.do(func() {
		for range 20 {
			err := r.AddSQE(func(e *uring.SQE) { e.PrepPollAdd(int(rd.Fd()), uring.POLLIN, 0) }, cqeFunc(func(c uring.CQE) {
				if c.Res != -int32(syscall.ECANCELED) {
					t.Errorf("%+v", c)
				}
				told++
			}))
			if err != nil {
				t.Error(err)
			}
		}
	})
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	if told != 20 {
		t.Errorf("%d of 20 entries were told", told)
	}
}

// Goal: 32 requests from one handler are one io_uring_enter, which is also the wait, and no allocation.
func TestBatchIsOneEnter(t *testing.T) {
	l := handLoop(t, LoopOptions{})
	kick, err := sys.Eventfd(0, sys.EFD_NONBLOCK|sys.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer sys.Close(kick)
	left := 0
	var done CQEHandler = cqeFunc(func(uring.CQE) { left-- })
	w, err := l.Watch(kick, EventRead, readyFunc(func(*Watch, Events) {
		_, _ = sys.EventfdRead(kick)
		left = 32
		for range 32 {
			if err := l.AddSQE(prepNop, done); err != nil {
				t.Error(err)
			}
		}
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	batch := func() {
		_ = sys.EventfdWrite(kick, 1)
		before := l.counters
		l.turn(-1) // the kick
		l.turn(-1) // 32 completions
		if left != 0 {
			t.Errorf("%d of 32 are not back", left)
		}
		if n := l.counters.SysCalls - before.SysCalls; n != 2 {
			t.Errorf("%d system calls for two waits that carried 32 requests", n)
		}
	}
	for range 10 { // the slices have grown, every poll is armed
		batch()
	}
	if allocs := testing.AllocsPerRun(100, batch); allocs != 0 && !raceEnabled {
		t.Errorf("%v allocations a batch", allocs)
	}
}

// An entry is added at the moment at which the loop is about to sleep: it leaves with that very wait.
func TestEntryQueuedWhileTheLoopFallsAsleep(t *testing.T) {
	r := uringLoop(t, LoopOptions{})
	done := make(chan bool, 1)
	var h CQEHandler = cqeFunc(func(uring.CQE) { done <- true })
	for range 2000 {
		r.Post(func() {
			if err := r.AddSQE(prepNop, h); err != nil {
				t.Error(err)
			}
		})
		wait(t, done)
	}
}

// The kernel's answers, altered. Each takes the place of io_uring_enter for one call.
var refusals = []struct {
	name  string
	enter uring.EnterFunc
}{
	{"EINTR", refuse(syscall.EINTR)},
	{"EAGAIN", refuse(syscall.EAGAIN)},
	{"EBUSY", refuse(syscall.EBUSY)},
	{"takes one entry", func(fd int, n, want, flags uint32, arg unsafe.Pointer, size uintptr) (int, error) {
		return uring.KernelEnter(fd, min(n, 1), 0, flags, arg, size)
	}},
	{"takes none", func(fd int, n, want, flags uint32, arg unsafe.Pointer, size uintptr) (int, error) {
		return uring.KernelEnter(fd, 0, 0, flags, arg, size)
	}},
	{"wait cut short after the submission", func(fd int, n, want, flags uint32, arg unsafe.Pointer, size uintptr) (int, error) {
		return uring.KernelEnter(fd, n, 0, flags, arg, size)
	}},
}

func refuse(e syscall.Errno) uring.EnterFunc {
	return func(int, uint32, uint32, uint32, unsafe.Pointer, uintptr) (int, error) { return 0, e }
}

// Goal: whatever the kernel answers to any one call, and to all calls of a while, everything completes once. Method: the
// n-th call is refused, for every n until the work no longer makes that many; then every call at random.
func TestRefusedEnter(t *testing.T) {
	for _, c := range refusals {
		t.Run(c.name, func(t *testing.T) {
			for n := 1; ; n++ {
				calls := 0
				mixedWork(t, func(fd int, k, want, flags uint32, arg unsafe.Pointer, size uintptr) (int, error) {
					if calls++; calls == n {
						return c.enter(fd, k, want, flags, arg, size)
					}
					return uring.KernelEnter(fd, k, want, flags, arg, size)
				})
				if t.Failed() || calls < n || n > 60 {
					break
				}
			}
		})
	}
	t.Run("a while of each", func(t *testing.T) {
		for _, c := range refusals {
			calls := 0
			mixedWork(t, func(fd int, k, want, flags uint32, arg unsafe.Pointer, size uintptr) (int, error) {
				if calls++; calls > 5 && calls < 40 {
					return c.enter(fd, k, want, flags, arg, size)
				}
				return uring.KernelEnter(fd, k, want, flags, arg, size)
			})
		}
	})
	t.Run("at random", func(t *testing.T) {
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		dice := rand.New(rand.NewPCG(seed, 0))
		for range 20 {
			mixedWork(t, func(fd int, k, want, flags uint32, arg unsafe.Pointer, size uintptr) (int, error) {
				if dice.IntN(2) == 0 {
					return refusals[dice.IntN(len(refusals))].enter(fd, k, want, flags, arg, size)
				}
				return uring.KernelEnter(fd, k, want, flags, arg, size)
			})
		}
	})
}

// mixedWork does a little of everything on a small ring: entries, writes of a file, messages through a pipe.
func mixedWork(t *testing.T, enter uring.EnterFunc) {
	t.Helper()
	o := LoopOptions{RingEntries: 8}
	o.seams.enter = enter
	r := uringLoop(t, o)
	rd, wr := pipe(t)
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const nops, writes, messages = 30, 30, 10
	say(t, wr, messages)
	left := nops + writes + messages
	all := make(chan bool, 1)
	tick := func() {
		if left--; left == 0 {
			all <- true
		}
	}
	r.do(func() {
		file, err := r.OpenFile(int(f.Fd()), &FileOptions{Engine: EngineIOUring})
		if err != nil {
			t.Error(err)
			return
		}
		mustWatch(t, r.Loop, rd, EventRead, func(w *Watch, _ Events) {
			var b [1]byte
			if n, err := rd.Read(b[:]); n != 1 || err != nil {
				t.Errorf("read %d, %v", n, err)
			}
			tick()
			if len(r.watches) > 0 && left > 0 && left%2 == 0 {
				_ = w.Modify(0)
				_ = w.Modify(EventRead)
			}
		})
		for i := range nops {
			r.addAgain(t, cqeFunc(func(c uring.CQE) { tick() }))
			file.Submit(&Request{
				Op: OpWrite, Offset: int64(i) * 512, Length: 512, Mem: []IOVec{IOVecOf(make([]byte, 512))},
				Done: doneFunc(func(_ *Request, err error) {
					if err != nil {
						t.Error(err)
					}
					tick()
				}),
			})
		}
	})
	wait(t, all)
	if err := r.stop(); err != nil {
		t.Error(err)
	}
}

// addAgain adds a NOP: in a later turn when the kernel takes nothing now.
func (r *running) addAgain(t *testing.T, h CQEHandler) {
	if err := r.AddSQE(prepNop, h); err != nil {
		if !errors.Is(err, syscall.EAGAIN) {
			t.Error(err)
		}
		r.Post(func() { r.addAgain(t, h) })
	}
}

func TestSlotsTellGenerationsApart(t *testing.T) {
	var table slotTable
	if table.at(nobody) != nil {
		t.Error("somebody has slot 0 of an empty table")
	}
	seen := map[uint64]bool{nobody: true}
	var held []uint64
	for i := range 3 * slotBlock {
		s, data := table.take(slotUser)
		if seen[data] {
			t.Fatalf("user data %#x twice", data)
		}
		seen[data] = true
		if table.at(data) != s {
			t.Fatal("a slot that was taken is not found")
		}
		if i%3 == 0 {
			table.give(data)
			if table.at(data) != nil {
				t.Fatal("a slot that was given back is found")
			}
		} else {
			held = append(held, data)
		}
	}
	for _, data := range held {
		if table.at(data) == nil {
			t.Fatal("a slot moved when the table grew")
		}
		if table.at(data+1<<32) != nil {
			t.Fatal("another generation is found")
		}
	}
	if table.at(1<<20) != nil {
		t.Error("a slot beyond the table")
	}
}
