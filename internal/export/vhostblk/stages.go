// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"github.com/sluice-blk/sluice/internal/hist"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
)

// Stage is one part of a request's way. They follow each other without gaps, except that a request which no engine
// carried has neither StageQueued nor StageKernel, and that StageNotify is outside StageTotal.
//
// The clock is read once a turn and once a batch, never for a request: all requests of a batch have the same moments.
type Stage uint8

const (
	// StageRing is from the beginning of the turn that found the request to its batch being popped. How long it stood in
	// the ring before that nobody but the guest knows.
	StageRing Stage = iota
	// StageGraph is from there until an engine had it, or until the answer where none was asked. Only a request that
	// waited (for a drain, a block, a timer) spends measurable time there.
	StageGraph
	// StageQueued is from the engine's queue to the hand-over to the kernel. The turn's work for the rest of the batch is
	// in it.
	StageQueued
	// StageKernel is from the hand-over to the beginning of the turn that took the completion. The loop's waking up is in
	// it, and the end of the turn before when that was still under way.
	StageKernel
	// StagePublish is from there to the used index being moved.
	StagePublish
	// StageNotify is from there to the guest having been called. Batches that the guest did not want to be called for
	// have none. Where calls wait for more completions, it counts from the first that waited.
	StageNotify
	// StageTotal is from the beginning of StageRing to the end of StagePublish.
	StageTotal
	// StageCount is how many there are.
	StageCount
)

var stageNames = [StageCount]string{"ring", "graph", "queued", "kernel", "publish", "notify", "total"}

// String is the stage's name in reports.
func (s Stage) String() string {
	if s < StageCount {
		return stageNames[s]
	}
	return "unknown"
}

// Stages are the latencies of a queue's requests, in nanoseconds.
type Stages [StageCount]hist.Hist

// Merge adds what o counted.
func (s *Stages) Merge(o *Stages) {
	for i := range s {
		s[i].Merge(&o[i])
	}
}

// record is what one queue counts. It is made when the queue is first started and kept until the device ends, so that a
// guest's restart does not begin anew. Only its loop touches the figures, also those of a queue that has stopped.
type record struct {
	index int
	QueueStats
	stages Stages
}

// taken counts a batch of n requests that spent so long in StageRing.
func (r *record) taken(n uint64, nanos int64) {
	r.Requests += n
	r.Batches++
	r.PerBatch.Add(n)
	r.stages[StageRing].AddN(span(nanos), n)
}

// settled counts the outcome of a request.
func (r *record) settled(s *slot, now int64) {
	nanos := span(now - s.found)
	switch s.kind {
	case virtioblk.TypeIn:
		r.Reads++
		r.BytesRead += uint64(s.length)
		r.ReadNanos += nanos
	case virtioblk.TypeOut:
		r.Writes++
		r.BytesWritten += uint64(s.length)
		r.WriteNanos += nanos
	case virtioblk.TypeFlush:
		r.Flushes++
		r.FlushNanos += nanos
	case virtioblk.TypeDiscard, virtioblk.TypeWriteZeroes:
		r.Discards++
	}
	if s.code != virtioblk.StatusOK {
		r.Errors++
	}
}

// published counts the slots of a list that were published together. Neighbours mostly went the same way at the same time,
// and are counted as one with a weight.
func (r *record) published(first *slot, completed, published int64) {
	var count, alike uint64
	for s := first; s != nil; s = s.next {
		alike++
		if s.next == nil || !s.wentWith(s.next) {
			r.way(s, completed, published, alike)
			count += alike
			alike = 0
		}
	}
	r.Publishes++
	r.PerPublish.Add(count)
}

// wentWith tells whether two requests that are published together have all moments in common. Those that were popped
// together were found together.
func (s *slot) wentWith(o *slot) bool {
	queued, submitted := s.req.Times()
	queuedToo, submittedToo := o.req.Times()
	return (s.popped^o.popped)|(queued^queuedToo)|(submitted^submittedToo) == 0
}

// way books the stages of n requests that went the way of s. completed is when the first of their turn did, which is
// before those were popped that came in the same turn.
func (r *record) way(s *slot, completed, published int64, n uint64) {
	st := &r.stages
	last := s.popped
	// What is older than the request is left from the slot's last use.
	if queued, submitted := s.req.Times(); submitted >= s.popped {
		st[StageGraph].AddN(span(queued-s.popped), n)
		st[StageQueued].AddN(span(submitted-queued), n)
		last = submitted
		completed = max(completed, last)
		st[StageKernel].AddN(span(completed-last), n)
	} else {
		completed = max(completed, last)
		st[StageGraph].AddN(span(completed-last), n)
	}
	st[StagePublish].AddN(span(published-completed), n)
	st[StageTotal].AddN(span(published-s.found), n)
}

// notified counts a call of the guest for n requests: sum were published since the call before, for some of which it had
// asked for none.
func (r *record) notified(n, sum uint64, nanos int64) {
	r.Notifications++
	r.PerNotification.Add(sum)
	r.stages[StageNotify].AddN(span(nanos), n)
}

// span is a difference of two moments as a histogram takes it.
func span(nanos int64) uint64 { return uint64(max(nanos, 0)) }
