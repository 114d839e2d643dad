// SPDX-License-Identifier: Apache-2.0

package block

import (
	"sync"
	"sync/atomic"
)

// blockTable keeps writes apart that touch the same aligned block when at least one of them writes only a part of it:
// such a write reads the block first, and would put old bytes over what the other one wrote meanwhile. The other one may
// come from another loop.
//
// Most handles never see a partial write, and for them the table must cost nothing. So there are two regimes. While
// tracking is off, a write only counts itself in its queue (HandleQueue.untracked). The first partial write switches
// tracking on, and waits until every queue's count is 0; from then on each write of the handle has an entry here, in the
// order of arrival, and may go when no earlier entry stands in its way. After a run of writes without a partial one
// tracking is switched off again.
//
// The count and the switch are read and written crosswise: a write counts itself and then looks at the switch, a partial
// write sets the switch and then looks at the counts. Go's atomics are sequentially consistent, so one of the two sees
// the other.
type blockTable struct {
	tracking atomic.Bool // written under mu

	mu         sync.Mutex
	queues     []*HandleQueue
	head, tail *blockEntry
	calm       int // tracked writes since the last partial one
}

// calmWrites is how many whole writes in a row switch tracking off: many enough that a mixed load does not switch to
// and fro (each partial write would wait for everything in flight), few enough that one odd write is soon forgotten.
const calmWrites = 1024

// blockEntry is one write in the table. It is a part of its stepper.
type blockEntry struct {
	s          *stepper
	start, end int64 // whole blocks
	partial    bool
	held       bool
	next, prev *blockEntry
	wake       *blockEntry // list of those to wake, once the mutex is free
}

func (t *blockTable) addQueue(q *HandleQueue) {
	t.mu.Lock()
	t.queues = append(t.queues, q)
	t.mu.Unlock()
}

func (t *blockTable) removeQueue(q *HandleQueue) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.queues {
		if t.queues[i] == q {
			t.queues = append(t.queues[:i:i], t.queues[i+1:]...)
			return
		}
	}
}

// enterUntracked counts a write of whole blocks, unless writes are tracked at the moment.
func (q *HandleQueue) enterUntracked() bool {
	q.untracked.Add(1)
	if !q.h.blocks.tracking.Load() {
		return true
	}
	q.leaveUntracked()
	return false
}

// leaveUntracked counts the write out, and lets those go that waited for the last one.
func (q *HandleQueue) leaveUntracked() {
	if q.untracked.Add(-1) == 0 && q.h.blocks.tracking.Load() {
		q.h.blocks.review(q)
	}
}

// enter puts e in the table and tells whether its write may go at once. If not, e's stepper is woken when it may.
func (t *blockTable) enter(e *blockEntry) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.partial {
		t.calm = 0
		t.tracking.Store(true)
	} else {
		t.calm++
	}
	e.next, e.prev, e.held = nil, t.tail, false
	if t.tail == nil {
		t.head = e
	} else {
		t.tail.next = e
	}
	t.tail = e
	e.held = t.mayGo(e)
	return e.held
}

// leave takes e off and wakes whom it stood in the way of. Must be called on the loop of q, the queue of e.
func (t *blockTable) leave(q *HandleQueue, e *blockEntry) {
	t.mu.Lock()
	if e.prev == nil {
		t.head = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		t.tail = e.prev
	} else {
		e.next.prev = e.prev
	}
	e.next, e.prev = nil, nil
	if t.head == nil && t.calm >= calmWrites {
		t.tracking.Store(false)
	}
	wake := t.grant()
	t.mu.Unlock()
	wakeAll(q, wake)
}

// review looks for writes that may go now. Must be called on the loop of q.
func (t *blockTable) review(q *HandleQueue) {
	t.mu.Lock()
	wake := t.grant()
	t.mu.Unlock()
	wakeAll(q, wake)
}

// grant marks all that may go, and gives them as a list.
func (t *blockTable) grant() *blockEntry {
	var first, last *blockEntry
	for e := t.head; e != nil; e = e.next {
		if e.held || !t.mayGo(e) {
			continue
		}
		e.held, e.wake = true, nil
		if last == nil {
			first = e
		} else {
			last.wake = e
		}
		last = e
	}
	return first
}

// mayGo tells whether nothing that came before e stands in its way. The table is as long as there are writes in flight,
// which the pools of steppers bound.
func (t *blockTable) mayGo(e *blockEntry) bool {
	if e.partial {
		for _, q := range t.queues {
			if q.untracked.Load() != 0 {
				return false
			}
		}
	}
	for f := t.head; f != e; f = f.next {
		if f.start < e.end && e.start < f.end && (e.partial || f.partial) {
			return false
		}
	}
	return true
}

// wakeAll lets the writes of the list go on, each on its own loop.
func wakeAll(q *HandleQueue, e *blockEntry) {
	for e != nil {
		next := e.wake
		e.wake = nil
		if e.s.q == q {
			e.s.advance()
		} else {
			e.s.q.loop.Post(e.s.advanceFn)
		}
		e = next
	}
}
