// SPDX-License-Identifier: Apache-2.0

package block

import (
	"fmt"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

const (
	// maxSteppers is how many requests of one queue go step by step at the same time; more wait. It is enough to keep a
	// device busy, and bounds the memory that a queue may need.
	maxSteppers = 64
	// stepSegments bounds the segments of one step: enough that 4 KiB segments fill a transfer of half a megabyte.
	stepSegments = 128
	// bounceSize is one piece of aligned memory: a whole request of the size that most guests send.
	bounceSize = 128 << 10
	// bounceCount bounds the aligned memory of one queue to 2 MiB. Untouched pieces cost nothing.
	bounceCount = 16
	// zeroSize is the memory that zeros are written from, stepSegments times over in one step.
	zeroSize = 64 << 10
)

// stepPool is what the requests of one queue need that go step by step. All of it is made with the queue, so that the
// steps allocate nothing. Memory is mapped and so costs nothing before it is used.
type stepPool struct {
	steppers []stepper
	free     *stepper // linked by next

	memory     []byte // the mapping: zeros first, then the pieces, then the steppers' segments
	zeros      []byte
	pieceSize  int
	pieces     [][]byte // those that are free
	pieceFirst *stepper // those that wait for one
	pieceLast  *stepper
}

func (p *stepPool) init(q *HandleQueue) error {
	align := max(q.h.info.Align, q.h.info.MemAlign)
	// A piece takes at least the two blocks that a small write across a boundary touches.
	p.pieceSize = max(bounceSize, 2*align)
	zeros := max(zeroSize, align)
	// A mapping is aligned to a page, which is finer than some devices want.
	slack := 0
	if align > sys.PageSize() {
		slack = align
	}
	const segments = int(unsafe.Sizeof([stepSegments]IOVec{}))
	length := slack + zeros + bounceCount*p.pieceSize + maxSteppers*segments
	memory, err := sys.MmapAnon(length)
	if err != nil {
		return fmt.Errorf("map %d bytes of bounce memory: %w", length, err)
	}
	p.memory = memory
	rest := memory[alignUp(memory, align):]
	p.zeros, rest = rest[:zeros:zeros], rest[zeros:]
	for range bounceCount {
		p.pieces = append(p.pieces, rest[:p.pieceSize:p.pieceSize])
		rest = rest[p.pieceSize:]
	}
	p.steppers = make([]stepper, maxSteppers)
	for i := range p.steppers {
		s := &p.steppers[i]
		s.q, s.child.Done, s.advanceFn = q, s, s.advance
		s.entry.s = s
		// SAFETY: so much of the mapping is left, and pieces are whole multiples of an IOVec's alignment.
		s.iov = (*[stepSegments]IOVec)(unsafe.Pointer(&rest[i*segments]))
		s.next, p.free = p.free, s
	}
	return nil
}

// release unmaps the memory. Nothing is in flight then.
func (p *stepPool) release() {
	if p.memory != nil {
		err := sys.Munmap(p.memory)
		_ = err // of a mapping of our own: there is nothing that could be done
		p.memory, p.zeros, p.pieces = nil, nil, nil
	}
}

// step carries out a request in steps of its own, when a stepper is free.
func (q *HandleQueue) step(r *Request) {
	if q.steps.free == nil {
		q.count.Waited++
		q.stepWaiter.push(r)
		return
	}
	q.steps.take().begin(r)
}

func (p *stepPool) take() *stepper {
	s := p.free
	p.free, s.next = s.next, nil
	return s
}

// giveStepper takes a stepper back and lets the next request have it.
func (q *HandleQueue) giveStepper(s *stepper) {
	s.next, q.steps.free = q.steps.free, s
	if q.stepWaiter.len() > 0 {
		q.steps.take().begin(q.stepWaiter.pop())
	}
}

// takePiece gives s a piece of aligned memory, or makes it wait in order.
func (q *HandleQueue) takePiece(s *stepper) bool {
	p := &q.steps
	if n := len(p.pieces); n > 0 {
		s.piece, p.pieces = p.pieces[n-1], p.pieces[:n-1]
		return true
	}
	q.count.Waited++
	if p.pieceLast == nil {
		p.pieceFirst = s
	} else {
		p.pieceLast.next = s
	}
	p.pieceLast = s
	return false
}

// givePiece takes the piece of s back, or hands it to the first who waits.
func (q *HandleQueue) givePiece(s *stepper) {
	p := &q.steps
	piece := s.piece
	s.piece = nil
	w := p.pieceFirst
	if w == nil {
		p.pieces = append(p.pieces, piece) // never beyond what it once held
		return
	}
	p.pieceFirst, w.next = w.next, nil
	if p.pieceFirst == nil {
		p.pieceLast = nil
	}
	w.piece = piece
	w.advance()
}
