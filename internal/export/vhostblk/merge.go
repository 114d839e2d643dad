// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"unsafe"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
)

// Bounds of a merged request.
const (
	// mergeBytes is small against what a device carries at once: a deep queue becomes several requests, of which one can be
	// under way while the next is collected. A request of a megabyte makes guest and disk wait for each other in turns.
	mergeBytes = 128 << 10
	// mergeSegments is what half of that takes in segments of a sector, and a quarter of a vector. The kernel's own
	// bound is 1024.
	mergeSegments = 64
	// mergeRuns is how many runs are open at the same time: jobs that each read or write in order, in one queue. Each
	// request is compared with all of them, so there are few.
	mergeRuns = 4
)

// merger joins reads, or writes, that lie side by side on the disk and were found in the ring at the same time. It keeps a
// few runs open at their ends, and hands each to the disk when another one needs its place, or when nothing more was found.
// Each merged request is one for the disk, and its parts are answered one by one, each with a status of its own. Must be
// used on the queue's loop.
//
// The order of requests that touch the same bytes stays: what overlaps an open run closes it first. Anything but a read or
// a write closes all runs. Requests that the disk would carry by way of other memory stay alone, or they would take their
// neighbours along. Durable writes need no care: while the write cache is off every write is one, and the cache is switched
// between turns.
type merger struct {
	maxBytes    int64
	maxSegments int
	align       uint64 // mask of offsets, lengths, and the lengths of segments
	memAlign    uint64 // mask of addresses

	runs [mergeRuns]run // those with an empty list are closed
	next int            // where the next run is opened: the oldest one's place, or a free one
	vain int            // looks in a row that found no neighbours
}

// run is requests side by side.
type run struct {
	list       slotList
	start, end int64
	segments   int
	write      bool
}

// newMerger asks the node, since the handle hides its limits by splitting.
func newMerger(n block.Info) *merger {
	m := &merger{maxBytes: mergeBytes, maxSegments: mergeSegments}
	if n.MaxTransfer > 0 {
		m.maxBytes = min(m.maxBytes, n.MaxTransfer)
	}
	if n.MaxSegments > 0 {
		m.maxSegments = min(m.maxSegments, n.MaxSegments)
	}
	m.memAlign = uint64(max(n.MemAlign, 1)) - 1
	m.align = max(uint64(max(n.Align, 1))-1, m.memAlign)
	return m
}

// send hands what was collected to the disk.
func (q *queue) send() {
	if q.merger == nil || q.fresh.head == q.fresh.tail || !q.merger.worthwhile() {
		for s := q.fresh.pop(); s != nil; s = q.fresh.pop() {
			s.submit()
		}
		return
	}
	q.merger.send(&q.fresh, q.stats)
}

// Where nothing lies side by side, looking for it costs a null disk a tenth of its time. So after vainMax looks in a row
// that found nothing only each vainEvery-th batch is looked at, until one finds something again.
const (
	vainMax   = 16
	vainEvery = 8
)

// worthwhile tells whether a batch should be looked at.
func (m *merger) worthwhile() bool {
	if m.vain < vainMax {
		return true
	}
	m.vain++
	return m.vain%vainEvery == 0
}

// send merges a batch of more than one request.
func (m *merger) send(fresh *slotList, stats *QueueStats) {
	before := stats.Merges
	for s := fresh.pop(); s != nil; s = fresh.pop() {
		switch {
		case s.immediate:
			s.submit()
		case s.kind != virtioblk.TypeIn && s.kind != virtioblk.TypeOut:
			m.closeAll()
			s.submit()
		default:
			m.add(s)
		}
	}
	m.closeAll()
	if stats.Merges != before {
		m.vain = 0
	} else {
		m.vain++
	}
}

// add joins s to a run, or begins one with it.
func (m *merger) add(s *slot) {
	write, end := s.kind == virtioblk.TypeOut, s.offset+s.length
	var joins *run
	for i := range m.runs {
		r := &m.runs[i]
		switch {
		case r.list.head == nil:
		case r.end == s.offset && r.write == write && joins == nil && m.fits(r, s):
			joins = r
		case s.offset < r.end && r.start < end && (write || r.write):
			r.submit()
		}
	}
	if joins == nil {
		joins = &m.runs[m.next]
		m.next = (m.next + 1) % mergeRuns
		joins.submit()
		joins.start, joins.segments, joins.write = s.offset, 0, write
	}
	joins.list.push(s)
	joins.end = end
	joins.segments += len(s.data)
}

// fits tells whether s may be joined to r.
func (m *merger) fits(r *run, s *slot) bool {
	if s.offset+s.length-r.start > m.maxBytes || r.segments+len(s.data) > m.maxSegments {
		return false
	}
	return m.aligned(s) && m.aligned(r.list.tail)
}

func (m *merger) aligned(s *slot) bool {
	odd := uint64(s.offset|s.length) & m.align
	for i := range s.data {
		v := &s.data[i]
		// SAFETY: the address is looked at as a number, for its low bits, and never turned back into a pointer.
		odd |= v.Len&m.align | uint64(uintptr(unsafe.Pointer(v.Base)))&m.memAlign
	}
	return odd == 0
}

// closeAll closes the runs, the oldest first.
func (m *merger) closeAll() {
	for i := range mergeRuns {
		m.runs[(m.next+i)%mergeRuns].submit()
	}
}

// submit hands the run, if there is one, to the disk, and closes it. Its first request stands for all.
func (r *run) submit() {
	s := r.list.pop()
	switch {
	case s == nil:
		return
	case r.list.head == nil:
		s.submit()
		return
	}
	q := s.q
	s.joined, s.members = q.store.take(), r.list
	iov := append(s.joined[:0], s.data...)
	n := 1
	for m := r.list.head; m != nil; m = m.next {
		iov = append(iov, m.data...)
		n++
	}
	s.req.Length, s.req.Mem = r.end-r.start, iov
	q.inflight += n
	q.stats.Merges++
	q.stats.Merged += uint64(n)
	r.list = slotList{}
	q.face.Submit(&s.req)
}

// part ends a merged request: each of those that went out with s is answered, and s itself. When it failed nobody knows
// whose fault it was, so each is sent again alone, for an outcome of its own.
func (s *slot) part(err error) {
	q, members := s.q, s.members
	q.store.give(s.joined)
	s.joined, s.members = nil, slotList{}
	s.setData()
	if err != nil {
		q.stats.MergesFailed++
		q.face.Submit(&s.req)
		for m := members.pop(); m != nil; m = members.pop() {
			q.face.Submit(&m.req)
		}
		return
	}
	s.code = virtioblk.StatusOK
	s.settle()
	for m := members.pop(); m != nil; m = members.pop() {
		m.code = virtioblk.StatusOK
		m.req.ForgetTimes()
		m.req.AdoptTimes(&s.req)
		m.settle()
	}
}
