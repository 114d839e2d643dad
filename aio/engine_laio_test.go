// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/laio"
	"github.com/sluice-blk/sluice/internal/sys"
)

// These tests have the kernel answer io_submit as they like, and let the real one do what it was allowed to take.

// aioScript stands between the engine and io_submit.
type aioScript struct {
	// answer says of each call how many of the blocks the kernel takes, or what is wrong with the first.
	// Nil, and a count beyond the end, take all.
	answer func(call int, cbs []*laio.IOCB) (take int, err error)
	calls  int
	took   []laio.IOCB // all that were taken, in order
	alive  int         // contexts
	setups int
}

const all = 1 << 30

func (s *aioScript) kernel() *laio.Kernel {
	real := laio.SystemKernel()
	k := *real
	k.Setup = func(nr uint32) (unsafe.Pointer, error) {
		id, err := real.Setup(nr)
		if err == nil {
			s.setups++
			s.alive++
		}
		return id, err
	}
	k.Destroy = func(ctx unsafe.Pointer) error { s.alive--; return real.Destroy(ctx) }
	k.Submit = func(ctx unsafe.Pointer, cbs []*laio.IOCB) (int, error) {
		s.calls++
		take := all
		if s.answer != nil {
			var err error
			if take, err = s.answer(s.calls, cbs); err != nil {
				return 0, err
			}
		}
		if take = min(take, len(cbs)); take == 0 {
			return 0, nil
		}
		before := make([]laio.IOCB, take)
		for i, cb := range cbs[:take] {
			before[i] = *cb
		}
		n, err := real.Submit(ctx, cbs[:take])
		s.took = append(s.took, before[:n]...)
		return n, err
	}
	return &k
}

func newAIOBed(t *testing.T, s *aioScript, events int) *engineBed {
	b := newEngineBed(t, engineSetup{EngineLinuxAIO, PollerEpoll, false}, func(o *LoopOptions) {
		o.AIOEvents = events
		o.seams.laio = s.kernel()
	})
	b.signals = true
	return b
}

// reads makes n reads of one page each, at offsets by which the kernel's side can tell them apart.
func (b *engineBed) reads(n int) []*ask {
	asks := make([]*ask, n)
	for i := range asks {
		asks[i] = b.ask(OpRead, int64(i)*page, b.buffer(page))
	}
	return asks
}

// inOrder checks that what the kernel took began at ascending offsets.
func inOrder(t *testing.T, took []laio.IOCB, n int) {
	t.Helper()
	if len(took) != n {
		t.Fatalf("the kernel took %d, want %d", len(took), n)
	}
	for i, cb := range took {
		if cb.Offset != int64(i)*page {
			t.Fatalf("the kernel took offset %d in place %d", cb.Offset, i)
		}
	}
}

// TestPartialSubmission has the first call take none, one, or all but one of a batch.
func TestPartialSubmission(t *testing.T) {
	const n = 8
	for _, take := range []int{0, 1, n - 1} {
		t.Run(fmt.Sprint(take), func(t *testing.T) {
			s := &aioScript{answer: func(call int, _ []*laio.IOCB) (int, error) {
				if call == 1 {
					return take, nil
				}
				return all, nil
			}}
			b := newAIOBed(t, s, 64)
			b.must(b.file(n*page), b.reads(n)...)
			inOrder(t, s.took, n)
			if s.calls != 2 {
				t.Errorf("%d calls", s.calls)
			}
		})
	}
	t.Run("one at a time", func(t *testing.T) {
		s := &aioScript{answer: func(int, []*laio.IOCB) (int, error) { return 1, nil }}
		b := newAIOBed(t, s, 64)
		b.must(b.file(n*page), b.reads(n)...)
		inOrder(t, s.took, n)
	})
}

// TestFullWithRequestsInFlight meets EAGAIN while something is in flight: the engine asks again when that has completed, and
// not before.
func TestFullWithRequestsInFlight(t *testing.T) {
	s := &aioScript{answer: func(call int, _ []*laio.IOCB) (int, error) {
		if call == 2 {
			return 0, syscall.EAGAIN
		}
		return all, nil
	}}
	b := newAIOBed(t, s, 64)
	f := b.file(12 * page)
	asks := b.reads(12)
	submit := func(asks []*ask) {
		b.l.Plug()
		for _, a := range asks {
			f.Submit(&a.Request)
		}
		b.l.Unplug()
	}
	submit(asks[:4])
	submit(asks[4:8])
	e := b.l.engines[EngineLinuxAIO].(*laioEngine)
	if e.queued() != 4 || e.inflight() != 4 {
		t.Errorf("%d queued, %d in flight", e.queued(), e.inflight())
	}
	submit(asks[8:]) // behind what waits, and without asking
	if s.calls != 2 {
		t.Errorf("%d calls while the kernel has no room", s.calls)
	}
	b.until(12)
	inOrder(t, s.took, 12)
	if s.calls != 3 || e.count.Again != 1 || e.retry != nil {
		t.Errorf("%d calls, %d times full, timer %v", s.calls, e.count.Again, e.retry)
	}
}

// TestFullWithNothingInFlight meets EAGAIN again and again while nothing is in flight: the engine asks from time to time.
func TestFullWithNothingInFlight(t *testing.T) {
	const refusals = 5
	s := &aioScript{answer: func(call int, _ []*laio.IOCB) (int, error) {
		if call <= refusals {
			return 0, syscall.EAGAIN
		}
		return all, nil
	}}
	b := newAIOBed(t, s, 64)
	f := b.file(8 * page)
	turns := b.l.counters.Turns
	began := time.Now()
	b.must(f, b.reads(8)...)
	inOrder(t, s.took, 8)
	if s.calls != refusals+1 {
		t.Errorf("%d calls", s.calls)
	}
	// 1+2+4+8+16 ms of pauses: a busy loop would make many thousand turns of it.
	if d := time.Since(began); d < 31*time.Millisecond {
		t.Errorf("it took %v", d)
	}
	if n := b.l.counters.Turns - turns; n > 200 {
		t.Errorf("%d turns", n)
	}
}

// TestInterruptedSubmission repeats the call when a signal cut it short, even if that does not end.
func TestInterruptedSubmission(t *testing.T) {
	for _, times := range []int{1, 3, 3 * maxTries} {
		s := &aioScript{answer: func(call int, _ []*laio.IOCB) (int, error) {
			if call <= times {
				return 0, syscall.EINTR
			}
			return all, nil
		}}
		b := newAIOBed(t, s, 64)
		b.must(b.file(8*page), b.reads(8)...)
		inOrder(t, s.took, 8)
		if s.calls != times+1 {
			t.Errorf("%d calls", s.calls)
		}
	}
}

// TestRefusedRequests has the kernel refuse some of five requests, in each pattern, with nothing in flight. Each refusal
// comes when the request is first in line. The refused ones fail with the errno that was theirs, the others succeed.
func TestRefusedRequests(t *testing.T) {
	const n = 5
	var mask int
	var errno syscall.Errno
	bad := func(cb *laio.IOCB) bool { return mask>>(cb.Offset/page)&1 != 0 }
	s := &aioScript{answer: func(_ int, cbs []*laio.IOCB) (int, error) {
		if bad(cbs[0]) {
			return 0, errno
		}
		take := 1
		for take < len(cbs) && !bad(cbs[take]) {
			take++
		}
		return take, nil
	}}
	b := newAIOBed(t, s, 64)
	f, asks := b.file(n*page), b.reads(n)
	for _, errno = range []syscall.Errno{syscall.EINVAL, syscall.EBADF, syscall.EFAULT, syscall.ENOMEM, syscall.EIO} {
		for mask = range 1 << n {
			b.do(f, asks...)
			for i, a := range asks {
				want := error(nil)
				if mask>>i&1 != 0 {
					want = errno
				}
				if a.err != want {
					t.Errorf("pattern %05b: request %d: %v, want %v", mask, i, a.err, want)
				}
			}
		}
	}
}

// TestNthSubmissionFails lets the n-th call fail, for each n that the workload reaches: once, and once for ever after.
// Each request completes once, with success or with that errno.
func TestNthSubmissionFails(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EAGAIN, syscall.EINTR, syscall.EINVAL, syscall.EBADF, syscall.EIO} {
		for _, ever := range []bool{false, true} {
			if ever && (errno == syscall.EAGAIN || errno == syscall.EINTR) {
				continue // "not now" for ever is a queue that waits for ever, and should
			}
			t.Run(fmt.Sprintf("%s, ever after %v", errno, ever), func(t *testing.T) { nthSubmissionFails(t, errno, ever) })
		}
	}
}

func nthSubmissionFails(t *testing.T, errno syscall.Errno, ever bool) {
	n := 0
	s := &aioScript{}
	s.answer = func(call int, _ []*laio.IOCB) (int, error) {
		if call == n || ever && call > n {
			return 0, errno
		}
		return 3, nil
	}
	b := newAIOBed(t, s, 4)
	asks := b.reads(20)
	for s.calls >= n { // until the whole workload runs without the failure
		n++
		s.calls = 0
		b.do(b.file(20*page), append(asks, b.ask(OpFlush, 0))...)
		failed := 0
		for i, a := range asks {
			switch a.err {
			case nil:
			case error(errno):
				failed++
			default:
				t.Fatalf("call %d: request %d: %v", n, i, a.err)
			}
		}
		if !ever && failed > 1 {
			t.Fatalf("call %d: %d requests failed", n, failed)
		}
	}
	if n < 7 {
		t.Errorf("the workload made %d calls", n)
	}
}

// TestSmallContext runs a depth of 256 through a context of eight, plugged and not.
func TestSmallContext(t *testing.T) {
	most := 0
	var b *engineBed
	s := &aioScript{answer: func(_ int, cbs []*laio.IOCB) (int, error) {
		most = max(most, b.l.engines[EngineLinuxAIO].inflight()+len(cbs))
		return all, nil
	}}
	b = newAIOBed(t, s, 8)
	f := b.file(256 * page)
	turns := b.l.counters.Turns
	b.must(f, b.reads(256)...)
	inOrder(t, s.took, 256)
	if most != 8 {
		t.Errorf("at most %d in flight", most)
	}
	// Every call carries a full context, and every turn at least one.
	if n := b.l.counters.Turns - turns; s.calls != 32 || n > 64 {
		t.Errorf("%d calls in %d turns", s.calls, n)
	}
}

// TestFullBatchLeavesAtOnce fills the context inside a section: what can be in flight leaves, what cannot waits.
func TestFullBatchLeavesAtOnce(t *testing.T) {
	s := &aioScript{}
	b := newAIOBed(t, s, 8)
	f := b.file(20 * page)
	asks := b.reads(20)
	b.l.Plug()
	for i, a := range asks {
		f.Submit(&a.Request)
		if want := min((i+1)/8, 1); s.calls != want {
			t.Fatalf("%d calls after %d requests", s.calls, i+1)
		}
	}
	b.l.Unplug()
	b.until(20)
	inOrder(t, s.took, 20)
}

// TestOneContextForAllFiles opens five files, and sees the context go with the loop.
func TestOneContextForAllFiles(t *testing.T) {
	s := &aioScript{}
	t.Run("open", func(t *testing.T) {
		b := newAIOBed(t, s, 64)
		for range 5 {
			b.must(b.file(page), b.ask(OpRead, 0, b.buffer(page)))
		}
		if s.setups != 1 || s.alive != 1 {
			t.Errorf("%d contexts made, %d alive", s.setups, s.alive)
		}
	})
	if s.alive != 0 {
		t.Errorf("%d contexts left behind", s.alive)
	}
}

// TestNoContextToBeHad has io_setup refuse. By name that is an error which names the remedy; else the threads serve, and
// say why. When there is room again a new file has it.
func TestNoContextToBeHad(t *testing.T) {
	refuse := true
	k := laio.SystemKernel()
	setup := k.Setup
	k.Setup = func(nr uint32) (unsafe.Pointer, error) {
		if refuse {
			return nil, syscall.EAGAIN
		}
		return setup(nr)
	}
	b := newEngineBed(t, engineSetup{EngineAuto, PollerEpoll, false}, func(o *LoopOptions) { o.seams.laio = k })
	fd := b.create(page)
	_, err := b.l.OpenFile(fd, &FileOptions{Engine: EngineLinuxAIO})
	if !errors.Is(err, syscall.EAGAIN) || !strings.Contains(err.Error(), "sysctl -w fs.aio-max-nr=") {
		t.Errorf("error %v", err)
	}
	f := b.file(page)
	b.must(f, b.ask(OpRead, 0, b.buffer(page)))
	if traits, _ := askFile(fd, false); traits.inMemory && !traits.noWait {
		if f.Engine() != EngineThreads || !strings.Contains(f.Reason(), "fs.aio-max-nr") {
			t.Errorf("%s: %s", f.Engine(), f.Reason())
		}
	}
	refuse = false
	g, err := b.l.OpenFile(fd, &FileOptions{Engine: EngineLinuxAIO})
	if err != nil {
		t.Fatal(err)
	}
	b.must(g, b.ask(OpRead, 0, b.buffer(page)))
	if err := g.Close(); err != nil {
		t.Error(err)
	}
}

// TestFlushIsFdatasync looks at what the kernel is asked for.
func TestFlushIsFdatasync(t *testing.T) {
	s := &aioScript{}
	b := newAIOBed(t, s, 64)
	f := b.file(4 * page)
	buf := b.buffer(page)
	durable := b.ask(OpWrite, 0, buf)
	durable.Flags = FlagFUA
	b.must(f, b.ask(OpFlush, 0), durable, b.ask(OpWrite, page, buf))
	want := []struct {
		opcode uint16
		flags  uint32
	}{{sys.IOCB_CMD_FDSYNC, 0}, {sys.IOCB_CMD_PWRITE, sys.RWF_DSYNC}, {sys.IOCB_CMD_PWRITE, 0}}
	for i, cb := range s.took {
		if cb.LioOpcode != want[i].opcode || cb.RWFlags != want[i].flags {
			t.Errorf("request %d: opcode %d, flags %#x", i, cb.LioOpcode, cb.RWFlags)
		}
	}
	if len(s.took) != 3 {
		t.Errorf("%d requests", len(s.took))
	}
}

// TestNoAsynchronousFdatasync has the kernel refuse IOCB_CMD_FDSYNC: the threads do it, for the requests that were refused
// and, without asking again, for those that follow.
func TestNoAsynchronousFdatasync(t *testing.T) {
	s := &aioScript{answer: func(_ int, cbs []*laio.IOCB) (int, error) {
		for i, cb := range cbs {
			if cb.LioOpcode == sys.IOCB_CMD_FDSYNC {
				if i == 0 {
					return 0, syscall.EINVAL
				}
				return i, nil
			}
		}
		return all, nil
	}}
	synced := make(chan int, 16)
	k := systemBlockingKernel
	k.fdatasync = func(fd int) error { synced <- fd; return sys.Fdatasync(fd) }
	b := newEngineBed(t, engineSetup{EngineLinuxAIO, PollerEpoll, false}, func(o *LoopOptions) {
		o.seams.laio = s.kernel()
		o.seams.blocking = &k
	})
	f := b.file(page)
	b.must(f, b.ask(OpFlush, 0), b.ask(OpRead, 0, b.buffer(page)), b.ask(OpFlush, 0))
	calls := s.calls
	b.must(f, b.ask(OpFlush, 0))
	if len(synced) != 3 || <-synced != f.Fd() || s.calls != calls {
		t.Errorf("%d times fdatasync, %d calls of io_submit more", len(synced)+1, s.calls-calls)
	}
}

// TestNoDurableWrites has the kernel refuse RWF_DSYNC, at submission: the write is a plain one then, and synced before it
// completes.
func TestNoDurableWrites(t *testing.T) {
	s := &aioScript{answer: func(_ int, cbs []*laio.IOCB) (int, error) {
		for i, cb := range cbs {
			if cb.RWFlags&sys.RWF_DSYNC != 0 {
				if i == 0 {
					return 0, syscall.EOPNOTSUPP
				}
				return i, nil
			}
		}
		return all, nil
	}}
	b := newAIOBed(t, s, 64)
	f := b.file(8 * page)
	var asks []*ask
	for i := range int64(3) {
		a := b.ask(OpWrite, i*page, b.buffer(page))
		a.Flags = FlagFUA
		asks = append(asks, a)
	}
	b.must(f, asks...)
	writes, syncs := 0, 0
	for _, cb := range s.took {
		switch cb.LioOpcode {
		case sys.IOCB_CMD_PWRITE:
			writes++
		case sys.IOCB_CMD_FDSYNC:
			syncs++
		}
	}
	if writes != 3 || syncs != 3 {
		t.Errorf("%d writes, %d syncs", writes, syncs)
	}
}

// TestShortTransfersInAIO has the kernel move a part only: fewer bytes of one segment, fewer segments of several.
func TestShortTransfersInAIO(t *testing.T) {
	for _, most := range []uint64{1, 1000, page} {
		s := &aioScript{answer: func(_ int, cbs []*laio.IOCB) (int, error) {
			for _, cb := range cbs {
				switch cb.LioOpcode {
				case sys.IOCB_CMD_PREAD, sys.IOCB_CMD_PWRITE:
					cb.NBytes = min(cb.NBytes, most)
				case sys.IOCB_CMD_PREADV, sys.IOCB_CMD_PWRITEV:
					cb.NBytes = min(cb.NBytes, 2)
				}
			}
			return all, nil
		}}
		b := newAIOBed(t, s, 64)
		f := b.file(8 * page)
		size := int(min(most*50, 8*page))
		w, r := b.buffer(size), b.buffer(size)
		pattern(w, int64(most))
		third := size / 3
		b.must(f, b.ask(OpWrite, 0, w[:third]), b.ask(OpWrite, int64(third), w[third:third+1], w[third+1:2*third], w[2*third:]))
		b.must(f, b.ask(OpRead, 0, r[:2*third], r[2*third:2*third+3], r[2*third+3:]))
		if !bytes.Equal(w, r) {
			t.Errorf("at most %d bytes: something else was read", most)
		}
		if b.counters().Resubmits == 0 {
			t.Errorf("at most %d bytes: nothing was continued", most)
		}
	}
}

// TestMemoryFilesSpendNoSignal has files in memory served without an eventfd: what is done within the submission is taken
// at once, whatever has to be continued or had no room, and a flush still signals, since that one is not done at once.
func TestMemoryFilesSpendNoSignal(t *testing.T) {
	signals := 0
	s := &aioScript{answer: func(call int, cbs []*laio.IOCB) (int, error) {
		for _, cb := range cbs {
			if cb.Flags&sys.IOCB_FLAG_RESFD != 0 {
				signals++
			}
			if cb.LioOpcode == sys.IOCB_CMD_PREAD {
				cb.NBytes = min(cb.NBytes, page/2) // short: continued
			}
		}
		return 3, nil
	}}
	b := newAIOBed(t, s, 8)
	b.signals = false
	f := b.file(100 * page)
	if !f.inMemory {
		t.Fatalf("the file at %s is not known to be in memory", b.dir)
	}
	sleeps := b.l.counters.Sleeps
	b.must(f, b.reads(100)...)
	if signals != 0 || b.counters().Resubmits != 100 {
		t.Errorf("%d signals, %d continued; want none, 100", signals, b.counters().Resubmits)
	}
	if n := b.l.counters.Sleeps - sleeps; n > 1 {
		t.Errorf("the loop slept %d times over what was done", n)
	}
	b.must(f, b.ask(OpFlush, 0))
	if signals == 0 && b.counters().Errors == 0 && !f.noFDSYNC {
		t.Error("a flush did not signal")
	}
}

// TestMemoryFilesOfASlowKernel has a kernel finish what does not signal only later: the loop looks until it has.
func TestMemoryFilesOfASlowKernel(t *testing.T) {
	k := &fakeAIO{hold: 20, result: func(*laio.IOCB, int) int64 { return page }}
	b := newFakeAIOBed(t, k)
	b.signals = false
	b.must(b.file(page), b.reads(12)...)
	if k.hold > 0 {
		t.Errorf("%d looks were left", k.hold)
	}
}

// fakeAIO is a kernel without a ring to map: completions are what the test says, and io_getevents gives them.
type fakeAIO struct {
	result func(cb *laio.IOCB, nth int) int64
	served map[int64]int // by offset
	events []laio.Event
	newest bool // hand out the last completion first
	hold   int  // so often there is nothing yet
}

func (k *fakeAIO) kernel() *laio.Kernel {
	k.served = make(map[int64]int)
	ring := new(sys.AIORing) // all zeros: none that anybody knows
	return &laio.Kernel{
		Setup:   func(uint32) (unsafe.Pointer, error) { return unsafe.Pointer(ring), nil },
		Destroy: func(unsafe.Pointer) error { return nil },
		Submit: func(_ unsafe.Pointer, cbs []*laio.IOCB) (int, error) {
			for _, cb := range cbs {
				k.served[cb.Offset]++
				k.events = append(k.events, laio.Event{Data: cb.Data, Res: k.result(cb, k.served[cb.Offset])})
				if cb.Flags&sys.IOCB_FLAG_RESFD == 0 {
					continue
				}
				if err := sys.EventfdWrite(int(cb.Resfd), 1); err != nil {
					return 0, err
				}
			}
			return len(cbs), nil
		},
		Getevents: func(_ unsafe.Pointer, _ int, events []laio.Event) (int, error) {
			if k.hold > 0 {
				k.hold--
				return 0, nil
			}
			n := min(len(events), len(k.events), 3)
			for i := range n {
				at := 0
				if k.newest {
					at = len(k.events) - 1
				}
				events[i] = k.events[at]
				k.events = append(k.events[:at], k.events[at+1:]...)
			}
			return n, nil
		},
	}
}

func newFakeAIOBed(t *testing.T, k *fakeAIO) *engineBed {
	b := newEngineBed(t, engineSetup{EngineLinuxAIO, PollerEpoll, false}, func(o *LoopOptions) { o.seams.laio = k.kernel() })
	b.signals = true
	return b
}

// TestResultsFindTheirRequests completes requests in the reverse order, each with a result of its own.
func TestResultsFindTheirRequests(t *testing.T) {
	k := &fakeAIO{newest: true, result: func(cb *laio.IOCB, _ int) int64 {
		if i := cb.Offset / page; i%3 == 0 {
			return -(i + 1)
		}
		return page
	}}
	b := newFakeAIOBed(t, k)
	asks := b.reads(40)
	for i, a := range asks {
		if i == 10 || i == 3 { // the errnos 11 and 4 are not final
			a.Offset = 100 * page
			a.Offset++
		}
	}
	b.do(b.file(page), asks...)
	for i, a := range asks {
		want := error(nil)
		if i%3 == 0 && i != 3 {
			want = syscall.Errno(i + 1)
		}
		if a.err != want {
			t.Errorf("request %d: %v, want %v", i, a.err, want)
		}
	}
}

// TestRepeatedCompletions has requests complete with EINTR and EAGAIN some times before they succeed.
func TestRepeatedCompletions(t *testing.T) {
	k := &fakeAIO{result: func(cb *laio.IOCB, nth int) int64 {
		switch i := cb.Offset / page; {
		case i%2 == 0 && nth <= 3:
			return -int64(syscall.EINTR)
		case i%3 == 0 && nth <= 5:
			return -int64(syscall.EAGAIN)
		}
		return page
	}}
	b := newFakeAIOBed(t, k)
	b.must(b.file(page), b.reads(12)...)
	if got := b.counters().Resubmits; got != 4*3+4*5 {
		t.Errorf("%d resubmissions", got)
	}
}
