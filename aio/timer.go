// SPDX-License-Identifier: Apache-2.0

package aio

import "time"

// TimerHandler hears that a timer is due.
type TimerHandler interface {
	// HandleTimer is called on the loop. It may reset and stop any timer, its own too.
	HandleTimer(t *Timer)
}

// Timer calls its handler once, some time after it was set. It is made by [Loop.Timer] and can be set again and again
// without allocating.
type Timer struct {
	loop *Loop
	h    TimerHandler
	at   int64  // when it is due, on the loop's clock
	seq  uint64 // order among those due at the same time: first set, first called
	pos  int32  // place in the heap; -1 is not set
}

// Timer makes a timer that is due in d, counted from now. Below one nanosecond counts as one: it is due in the next turn
// and never in this one. Timers that are due in the same turn are called in the order of their due times, and of their
// setting where those are equal.
//
// Must be called on the loop, or before it runs.
func (l *Loop) Timer(d time.Duration, h TimerHandler) *Timer {
	t := &Timer{loop: l, h: h, pos: -1}
	t.Reset(d)
	return t
}

// Reset makes the timer due in d from now, whether it was set or not. Must be called on the loop, or before it runs.
func (t *Timer) Reset(d time.Duration) {
	l := t.loop
	l.assertOnLoop()
	t.Stop()
	t.at = l.Now() + max(int64(d), 1)
	l.timerSeq++
	t.seq = l.timerSeq
	l.timers = append(l.timers, t)
	t.pos = int32(len(l.timers) - 1)
	l.timers.up(t.pos)
}

// Stop makes the timer not due at all. It tells whether it was set. A stopped timer's handler is not called, even if the
// timer is due in this very turn. Must be called on the loop, or before it runs.
func (t *Timer) Stop() bool {
	t.loop.assertOnLoop()
	if t.pos < 0 {
		return false
	}
	t.loop.timers.remove(t.pos)
	return true
}

// runTimers calls what is due at the turn's time. A handler that sets its timer again makes it due later than that, so
// that this ends.
func (l *Loop) runTimers() {
	for len(l.timers) > 0 && l.timers[0].at <= l.now {
		t := l.timers[0]
		l.timers.remove(0)
		l.counters.Timers++
		t.h.HandleTimer(t)
	}
}

// timerHeap is a binary heap of timers, the one due first at the top. Each timer knows its place, so that any can be
// removed.
type timerHeap []*Timer

func (h timerHeap) less(i, j int32) bool {
	a, b := h[i], h[j]
	return a.at < b.at || a.at == b.at && a.seq < b.seq
}

func (h timerHeap) swap(i, j int32) {
	h[i], h[j] = h[j], h[i]
	h[i].pos, h[j].pos = i, j
}

func (h timerHeap) up(i int32) {
	for i > 0 {
		parent := (i - 1) / 2
		if !h.less(i, parent) {
			return
		}
		h.swap(i, parent)
		i = parent
	}
}

func (h timerHeap) down(i int32) {
	for n := int32(len(h)); ; {
		child := 2*i + 1
		if child >= n {
			return
		}
		if child+1 < n && h.less(child+1, child) {
			child++
		}
		if !h.less(child, i) {
			return
		}
		h.swap(i, child)
		i = child
	}
}

func (h *timerHeap) remove(i int32) {
	last := int32(len(*h) - 1)
	t := (*h)[i]
	if i != last {
		h.swap(i, last)
	}
	(*h)[last] = nil
	*h = (*h)[:last]
	if i != last {
		h.down(i)
		h.up(i)
	}
	t.pos = -1
}
