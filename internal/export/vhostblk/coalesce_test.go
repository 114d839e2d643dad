// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"testing"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/null"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
)

func TestWhatIsOwedIsPaid(t *testing.T) {
	const bound = 100 * time.Microsecond
	for _, c := range []struct {
		name     string
		c        coalescer
		inflight int
		want     bool
	}{
		{"off", coalescer{held: 1}, 63, true},
		{"many to come", coalescer{bound: bound, held: 1}, 63, false},
		{"half of them held", coalescer{bound: bound, held: 32}, 32, true},
		{"one less than half", coalescer{bound: bound, held: 31}, 33, false},
		{"nothing to come", coalescer{bound: bound, held: 1}, 0, true},
		{"one by one", coalescer{bound: bound, held: 1, gap: int64(bound) + 1}, 63, true},
		{"just often enough", coalescer{bound: bound, held: 1, gap: int64(bound)}, 63, false},
	} {
		if got := c.c.pays(c.inflight); got != c.want {
			t.Errorf("%s: pays %v", c.name, got)
		}
	}
}

func TestRateOfCompletionsIsMeasured(t *testing.T) {
	c := coalescer{bound: 100 * time.Microsecond}
	now := int64(time.Hour)
	for range 100 {
		now += 50_000
		c.measure(now, 10) // one in 5 us
		c.measure(now, 0)
	}
	if c.gap < 4_000 || c.gap > 6_000 {
		t.Errorf("gap %d, want about 5000", c.gap)
	}
	c.measure(now+int64(time.Hour), 1)
	if c.gap > int64(c.bound) {
		t.Errorf("gap %d after one silence", c.gap)
	}
}

// gate is a disk that answers a read when the test says so.
type gate struct {
	block.Node
	loop *aio.Loop
	in   []*block.Request
}

func (g *gate) Queue(l *aio.Loop) (block.Queue, error) { g.loop = l; return g, nil }
func (g *gate) Submit(r *block.Request)                { g.in = append(g.in, r) }
func (g *gate) Close() error                           { return nil }

// answer completes the n requests that wait longest, in one turn.
func (g *gate) answer(r *rig, n int) {
	r.t.Helper()
	must(r.t, r.loop.Call(r.t.Context(), func() error {
		for range n {
			g.loop.CompleteLater(g.in[0], nil)
			g.in = g.in[1:]
		}
		return nil
	}))
}

// called tells whether the guest was called since it was last asked.
func (q *rigQueue) called() bool { return sys.EventfdTake(q.call) == nil }

// coalescingRig is a queue with so many requests in flight, whose completions are believed to come all the time. One was
// answered before: the first notification is made whether it is asked for or not.
func coalescingRig(t *testing.T, bound time.Duration, requests int) (*rig, *rigQueue, *gate) {
	g := &gate{Node: null.New(null.Options{Size: diskSize})}
	r := newRig(t, g, rigOptions{coalesce: bound})
	q := r.queues[0]
	send := func(n int) {
		for range n {
			q.add(r.standard(virtioblk.TypeIn, 0, 512))
		}
		q.ring()
		waitFor(t, "the requests to be in flight", func() bool {
			in := 0
			must(t, r.loop.Call(t.Context(), func() error { in = len(g.in); return nil }))
			return in == n
		})
	}
	send(1)
	g.answer(r, 1)
	q.next()
	send(requests)
	must(t, r.loop.Call(t.Context(), func() error {
		c := &r.dev.queues[0].calls
		c.gap, c.last = 0, r.loop.Now()
		return nil
	}))
	q.called()
	return r, q, g
}

// One completion with more to come: the call is put off, shown in the used ring all the same, and shared by those that
// follow until as many are held as are in flight.
func TestNotificationIsShared(t *testing.T) {
	r, q, g := coalescingRig(t, time.Hour, 8)
	q.d.ArmCalls(1)
	for range 3 {
		g.answer(r, 1)
	}
	must(t, r.loop.Call(t.Context(), func() error { return nil })) // the turn is over
	if q.called() {
		t.Error("called with 3 held and 5 in flight")
	}
	if head, _, ok := q.d.Used(); !ok {
		t.Errorf("what was put off is not in the used ring (head %d)", head)
	}
	g.answer(r, 1)
	waitFor(t, "the call for 4 held with 4 in flight", q.called)
	// Asked anew: the event index is behind what is published by then.
	for q.d.Out() > 4 {
		q.d.Used()
	}
	q.d.ArmCalls(1)
	g.answer(r, 4)
	waitFor(t, "the call for the last ones", q.called)
	for range 4 {
		q.next()
	}
	s, err := r.dev.Stats(t.Context())
	must(t, err)
	if s.Held != 1 || s.Notifications != 3 { // with the first of all
		t.Errorf("%d held, %d notifications", s.Held, s.Notifications)
	}
}

// The bound holds although nothing else happens.
func TestNotificationIsNotPutOffForEver(t *testing.T) {
	r, q, g := coalescingRig(t, 5*time.Millisecond, 8)
	q.d.ArmCalls(1)
	g.answer(r, 1)
	waitFor(t, "the call at the bound", q.called)
	s, err := r.dev.Stats(t.Context())
	must(t, err)
	if s.Held != 1 || s.Notifications != 2 {
		t.Errorf("%d held, %d notifications", s.Held, s.Notifications)
	}
	g.answer(r, 7)
}

// Who did not ask is not called.
func TestHeldNotificationsAreOnlyThoseAskedFor(t *testing.T) {
	r, q, g := coalescingRig(t, time.Millisecond, 8)
	q.d.ArmCalls(8)
	g.answer(r, 7)
	time.Sleep(20 * time.Millisecond)
	if q.called() {
		t.Error("called before the eighth completion")
	}
	g.answer(r, 1)
	waitFor(t, "the call for the eighth", q.called)
}

// A queue that is stopped with a call put off has paid it.
func TestStopPaysWhatIsOwed(t *testing.T) {
	r, q, g := coalescingRig(t, time.Hour, 8)
	q.d.ArmCalls(1)
	g.answer(r, 1)
	stopped := make(chan error)
	go func() {
		_, err := r.dev.StopQueue(0)
		stopped <- err
	}()
	g.answer(r, 7)
	must(t, <-stopped)
	if !q.called() {
		t.Error("the call was never made")
	}
	for range 8 {
		q.next()
	}
}

// Goal: no notification is lost, whatever the timing. Method: many rounds of requests of several sizes on a disk with
// some latency, each round waited for by a driver that sleeps until it is called.
func TestCoalescingLosesNothing(t *testing.T) {
	for _, noEventIdx := range []bool{false, true} {
		r := newRig(t, slowDisk(50*time.Microsecond), rigOptions{coalesce: 200 * time.Microsecond, noEventIdx: noEventIdx})
		q := r.queues[0]
		req := r.standard(virtioblk.TypeIn, 0, 512)
		for round := range 1500 {
			for q.d.Out() < 1+round%40 {
				q.add(req)
			}
			q.ring()
			q.next()
		}
		for q.d.Out() > 0 {
			q.next()
		}
	}
}
