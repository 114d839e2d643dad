// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"fmt"
	"unsafe"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/format/sparse"
	"github.com/sluice-blk/sluice/internal/sys"
)

const (
	// maxWalkers is how many requests of one queue are carried out in pieces at the same time; more wait. Compressed images
	// have fewer: each walker has memory for one compressed grain, and the loop inflates them one after the other anyway.
	maxWalkers           = 64
	maxCompressedWalkers = 16
	// walkSegments bounds the segments of one piece.
	walkSegments = 128
)

// queue is the image on one loop.
type queue struct {
	n        *Node
	loop     *aio.Loop
	below    block.Queue
	fileSize int64

	// What below's Info says, which is not asked on the data plane.
	belowSize   int64
	maxSegments int

	memory  []byte // the mapping that the walkers' memory is cut from
	walkers []walker
	free    *walker
	waiting waitList
	giving  bool
	grains  *grainCache // nil: nothing is compressed
}

// init makes all that requests need, so that they allocate nothing.
func (q *queue) init() error {
	i := q.n.below.Info()
	q.belowSize, q.maxSegments = i.Size, walkSegments
	if i.MaxSegments > 0 {
		q.maxSegments = min(i.MaxSegments, walkSegments)
	}
	const segments = int(unsafe.Sizeof([walkSegments]block.IOVec{}))
	count, room := maxWalkers, 0
	if q.n.grain > 0 {
		count, room = maxCompressedWalkers, compressedRoom(q.n.grain)
		q.grains = newGrainCache(q.n.grain)
	}
	memory, err := sys.MmapAnon(count * (room + segments))
	if err != nil {
		return fmt.Errorf("map memory for reading %q: %w", q.n.name, err)
	}
	q.memory, q.walkers = memory, make([]walker, count)
	for i := range q.walkers {
		w := &q.walkers[i]
		w.q, w.child.Done = q, w
		w.packed, memory = memory[:room:room], memory[room:]
		// SAFETY: so much of the mapping is left, and rooms are whole pages.
		w.iov = (*[walkSegments]block.IOVec)(unsafe.Pointer(unsafe.SliceData(memory)))
		memory = memory[segments:]
		w.next, q.free = q.free, w
	}
	return nil
}

// compressedRoom is the memory for a compressed grain: twice the grain is the most that is accepted, and whole pages.
func compressedRoom(grain int64) int {
	page := int64(sys.PageSize())
	return int((2*grain + 2*page - 1) &^ (page - 1))
}

// Submit implements block.Queue.
func (q *queue) Submit(r *block.Request) {
	switch r.Op {
	case block.OpRead:
		e := q.n.where.Lookup(r.Offset, r.Length)
		if e.Kind == sparse.Data && e.Length == r.Length {
			r.Offset = e.Host
			q.below.Submit(r)
			return
		}
		q.walk(r)
	case block.OpFlush:
		q.loop.CompleteLater(r, nil)
	default:
		q.loop.CompleteLater(r, block.ErrReadOnly)
	}
}

// walk carries out a request in pieces, when a walker is free.
func (q *queue) walk(r *block.Request) {
	w := q.free
	if w == nil {
		q.waiting.push(r)
		return
	}
	q.free, w.next = w.next, nil
	w.begin(r)
}

// give takes a walker back and lets the next requests have it. It does not call itself by way of those that are carried out
// at once.
func (q *queue) give(w *walker) {
	w.next, q.free = q.free, w
	if q.giving {
		return
	}
	q.giving = true
	for q.free != nil && q.waiting.n > 0 {
		q.walk(q.waiting.pop())
	}
	q.giving = false
}

// Close implements block.Queue.
func (q *queue) Close() error {
	if q.memory != nil {
		err := sys.Munmap(q.memory)
		_ = err // of a mapping of our own: there is nothing that could be done
		q.memory, q.walkers, q.free = nil, nil, nil
	}
	return q.below.Close()
}

// waitList is a first-in, first-out list of requests. It keeps its memory, so that in the long run it allocates nothing.
type waitList struct {
	ring []*block.Request
	head int
	n    int
}

func (w *waitList) push(r *block.Request) {
	if w.n == len(w.ring) {
		bigger := make([]*block.Request, max(16, 2*w.n))
		for i := range w.n {
			bigger[i] = w.ring[(w.head+i)%len(w.ring)]
		}
		w.ring, w.head = bigger, 0
	}
	w.ring[(w.head+w.n)%len(w.ring)] = r
	w.n++
}

func (w *waitList) pop() *block.Request {
	r := w.ring[w.head]
	w.ring[w.head] = nil
	w.head = (w.head + 1) % len(w.ring)
	w.n--
	return r
}
