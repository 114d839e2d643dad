// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"errors"
	"math"
	"syscall"
	"testing"
)

// What every engine owes is tested by TestEngineConformance. Here is what the ring adds.

func uringBed(t *testing.T, change func(o *LoopOptions)) (*engineBed, *uringEngine) {
	t.Helper()
	b := newEngineBed(t, engineSetup{kind: EngineIOUring, poller: PollerIOUring}, change)
	e, err := b.l.engineFor(EngineIOUring)
	if err != nil {
		t.Fatal(err)
	}
	return b, e.(*uringEngine)
}

func TestRingEngineNeedsTheRing(t *testing.T) {
	l, err := NewLoop(&LoopOptions{Poller: PollerEpoll})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := l.engineFor(EngineIOUring); !errors.Is(err, ErrNotSupported) {
		t.Errorf("%v, want ErrNotSupported", err)
	}
}

// More requests than the completion queue has room for wait in the engine, not in the kernel's overflow list.
func TestRingEngineKeepsToItsLimit(t *testing.T) {
	b, e := uringBed(t, func(o *LoopOptions) { o.RingEntries = 8 })
	f := b.file(64 << 10)
	const n = 300
	asks := make([]*ask, n)
	for i := range asks {
		asks[i] = b.ask(OpRead, int64(i%128)*512, b.buffer(512))
	}
	b.l.Plug()
	for _, a := range asks {
		f.Submit(&a.Request)
	}
	// Some may be back already: a full submission queue is handed over on the spot.
	if e.limit >= int(b.l.ring.CQEntries()) || e.flying > e.limit {
		t.Errorf("limit %d, in flight %d, waiting %d", e.limit, e.flying, e.waiting.n)
	}
	b.l.Unplug()
	for b.l.carried() > 0 {
		if e.flying > e.limit {
			t.Fatalf("%d in flight, limit %d", e.flying, e.limit)
		}
		b.l.turn(-1)
	}
	b.until(n - b.completed)
	if b.l.ring.CQOverflowed() || e.count.Requests != n {
		t.Errorf("overflowed %v, %d requests", b.l.ring.CQOverflowed(), e.count.Requests)
	}
}

// 32 requests of one turn are one system call, which is the wait as well.
func TestRingEngineBatchIsOneEnter(t *testing.T) {
	b, e := uringBed(t, nil)
	f := b.file(64 << 10)
	asks := make([]*ask, 32)
	for i := range asks {
		asks[i] = b.ask(OpRead, int64(i)*512, b.buffer(512))
	}
	b.l.Post(func() {
		for _, a := range asks {
			f.Submit(&a.Request)
		}
	})
	b.l.turn(-1)
	before := b.l.counters.SysCalls
	b.l.turn(-1)
	if n := b.l.counters.SysCalls - before; n != 1 || e.count.Submissions != 1 {
		t.Errorf("%d system calls, %d submissions", n, e.count.Submissions)
	}
	b.until(len(asks) - b.completed)
}

// EAGAIN and EINTR in a completion make the same request go out again.
func TestRingEngineAsksAgain(t *testing.T) {
	b, e := uringBed(t, nil)
	f := b.file(4096)
	for _, errno := range []syscall.Errno{syscall.EAGAIN, syscall.EINTR} {
		a := b.ask(OpRead, 0, b.buffer(512))
		// As if it had been in flight: the kernel of this machine does not answer so.
		a.Request.file, f.pending = f, f.pending+1
		e.flying++
		again := e.count.Resubmits
		e.complete(&a.Request, -int64(errno))
		if e.waiting.n != 1 || e.count.Resubmits != again+1 {
			t.Errorf("%v: %d waiting", errno, e.waiting.n)
		}
		b.l.Flush()
		for b.l.carried() > 0 {
			b.l.turn(-1)
		}
		b.l.turn(0)
	}
}

// A segment beyond what an entry can count is cut, not wrapped round.
func TestRingEngineBoundsASegment(t *testing.T) {
	var one byte
	for n, want := range map[uint64]uint64{1: 1, transferMax: transferMax, transferMax + 1: transferMax, 1 << 32: transferMax, math.MaxUint32: transferMax} {
		if got := bounded(IOVec{Base: &one, Len: n}).Len; got != want {
			t.Errorf("a segment of %d bytes gives an entry of %d, want %d", n, got, want)
		}
	}
}
