// SPDX-License-Identifier: Apache-2.0

package block

import (
	"context"
	"fmt"
	"sync"
)

// Drain closes the door of the handle on every loop and waits until nothing is in flight and nothing is queued, at any
// depth below. Requests submitted meanwhile, and from then on, wait at the door in their order until Resume. Drains are
// counted: each one that returned nil needs its Resume. When ctx ends first, the door is as it was before.
//
// It waits for the loops, so it must not be called on one, and a loop that has ended makes it wait until ctx ends. Otherwise safe for concurrent use.
func (h *Handle) Drain(ctx context.Context) error {
	h.mu.Lock()
	h.drains++
	queues := append([]*HandleQueue(nil), h.queues...)
	h.mu.Unlock()

	var idle sync.WaitGroup
	for _, q := range queues {
		idle.Add(1)
		q.loop.Post(func() { q.shut(&idle) })
	}
	done := make(chan struct{})
	go func() {
		idle.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		h.Resume()
		return fmt.Errorf("drain %s: %w", h.info.Name, context.Cause(ctx))
	}
}

// Resume takes back one Drain. With the last one the requests that wait at the door go on, in their order. It does not
// wait for that. May be called from any goroutine.
func (h *Handle) Resume() {
	h.mu.Lock()
	h.drains--
	queues := append([]*HandleQueue(nil), h.queues...)
	h.mu.Unlock()
	for _, q := range queues {
		q.loop.Post(q.reopen)
	}
}

// shut closes the door once more, and tells idle when everybody is out.
func (q *HandleQueue) shut(idle *sync.WaitGroup) {
	if q.closed {
		idle.Done()
		return
	}
	q.gate++
	// What the engines have queued and not yet submitted would be waited for without end otherwise, were the caller
	// inside a plugged section.
	q.loop.Flush()
	if q.inflight == 0 {
		idle.Done()
		return
	}
	q.drainers = append(q.drainers, idle)
}

// reopen takes one closing of the door back.
func (q *HandleQueue) reopen() {
	if q.closed {
		return
	}
	q.gate--
	for q.gate == 0 && q.door.len() > 0 {
		q.admit(q.door.pop())
	}
}

// leave is the last thing that happens to an admitted request, after its owner has been told.
func (q *HandleQueue) leave() {
	q.inflight--
	if q.inflight == 0 && len(q.drainers) > 0 {
		for i, idle := range q.drainers {
			idle.Done()
			q.drainers[i] = nil
		}
		q.drainers = q.drainers[:0]
	}
}
