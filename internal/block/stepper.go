// SPDX-License-Identifier: Apache-2.0

package block

import (
	"syscall"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

// stepper carries out one request that the node cannot take as it is, by requests of its own, one after the other:
//
//   - too large, or too many segments: pieces of it, with the same memory;
//   - not aligned: whole blocks, by way of aligned memory. Where a write covers only a part of a block, the block is read
//     first, and the block table keeps other writes away until it has been written;
//   - zeroes or a discard: in pieces that the node takes; where it turns out that it cannot write zeroes, by writing zeros;
//   - durable, with a node that has no FUA: the write, then a flush.
//
// It never completes its request inside begin.
type stepper struct {
	q         *HandleQueue
	child     Request
	parent    *Request
	advanceFn func() // for another loop to post

	// The request as it came; the child may change its own.
	op     Op
	flags  Flags
	offset int64
	length int64
	mem    []IOVec

	done       int64 // bytes of the request that are finished
	seg        int   // where in mem the next byte stands
	segOffset  uint64
	stage      stage
	n          int64 // bytes that the step in flight will finish
	start, end int64 // blocks that a bounced step covers
	bounced    bool
	flushAfter bool
	entered    bool // in the block table
	untracked  bool // counted in the queue
	entry      blockEntry
	piece      []byte
	next       *stepper             // free list, or those who wait for a piece
	iov        *[stepSegments]IOVec // in the pool's memory: what it points to is kept alive by mem
}

// stage is what the child in flight does.
type stage uint8

const (
	stageFail    stage = iota // nothing: it brings an error that was known at once
	stageDirect               // the request's own memory, to or from the node
	stageGather               // a bounced read
	stageHead                 // reads the first block of a bounced write
	stageTail                 // reads the last one
	stageScatter              // a bounced write
	stageNative               // zeroes or discard by the node
	stageZeros                // zeros written
	stageFlush
)

// begin takes over a request that has passed the checks of the door.
func (s *stepper) begin(r *Request) {
	q := s.q
	s.parent, s.op, s.flags, s.offset, s.length, s.mem = r, r.Op, r.Flags, r.Offset, r.Length, r.Mem
	s.done, s.seg, s.segOffset = 0, 0, 0
	r.ForgetTimes()
	s.bounced, s.flushAfter, s.entered, s.untracked = false, false, false, false
	switch s.op {
	case OpRead, OpWrite:
		aligned, _ := q.inspect(r)
		s.bounced = !aligned
		if s.bounced {
			q.count.Bounced++
		} else if s.length > q.maxTransfer || len(s.mem) > q.maxSegments {
			q.count.Split++
		}
	case OpDiscard:
		s.trim()
	}
	if s.flags&FlagFUA != 0 && (s.op == OpWriteZeroes || !q.nativeFUA) {
		s.flags &^= FlagFUA
		s.flushAfter = true
		q.count.EmulatedFUA++
	}
	if s.op == OpRead || q.alignMask == 0 || s.enterBlocks() {
		s.advance()
	}
}

// trim leaves of a discard what covers whole blocks. The rest keeps its contents, as a discard may.
func (s *stepper) trim() {
	mask := s.q.spaceMask
	end := (s.offset + s.length) &^ mask
	s.offset = (s.offset + mask) &^ mask
	s.length = max(end-s.offset, 0)
}

// enterBlocks keeps this write apart from others, and tells whether it may go at once.
func (s *stepper) enterBlocks() bool {
	q, mask := s.q, int64(s.q.alignMask)
	e := &s.entry
	e.partial = (s.offset|s.length)&mask != 0
	if !e.partial && q.enterUntracked() {
		s.untracked = true
		return true
	}
	e.start, e.end = s.offset&^mask, (s.offset+s.length+mask)&^mask
	s.entered = true
	if q.h.blocks.enter(e) {
		return true
	}
	q.count.Waited++
	return false
}

// advance begins the next step. It is also where a stepper goes on that had to wait.
func (s *stepper) advance() {
	switch {
	case s.done == s.length && s.flushAfter && s.length > 0:
		s.flushAfter = false
		if s.q.h.info.Flush == None {
			s.fail(ErrNotSupported)
			return
		}
		s.submit(stageFlush, OpFlush, 0, 0, 0, nil)
	case s.done == s.length:
		s.fail(nil) // complete, but not on the caller's stack
	case s.op == OpDiscard:
		s.native(s.length-s.done, s.q.h.info.MaxDiscard)
	case s.op == OpWriteZeroes:
		s.zeroes()
	case s.bounced:
		s.bounce()
	default:
		s.direct()
	}
}

// fail brings an outcome that is known at once.
func (s *stepper) fail(err error) {
	s.stage = stageFail
	s.q.loop.CompleteLater(&s.child, err)
}

func (s *stepper) submit(st stage, op Op, flags Flags, offset, length int64, mem []IOVec) {
	s.stage = st
	s.child.Op, s.child.Flags, s.child.Offset, s.child.Length, s.child.Mem = op, flags, offset, length, mem
	s.child.ForgetTimes()
	s.q.below.Submit(&s.child)
}

// direct does as much of an aligned request as the node takes. Segments are cut at most at the end of a step, and at
// whole blocks, since each is a multiple of one.
func (s *stepper) direct() {
	room := s.q.maxTransfer
	iov := s.iov[:0]
	for seg, off := s.seg, s.segOffset; seg < len(s.mem) && room > 0 && len(iov) < min(len(s.iov), s.q.maxSegments); seg, off = seg+1, 0 {
		v := s.mem[seg]
		n := min(v.Len-off, uint64(room))
		if n == 0 {
			continue
		}
		// SAFETY: off is less than v.Len, so the address is inside the segment.
		iov = append(iov, IOVec{Base: (*byte)(unsafe.Add(unsafe.Pointer(v.Base), off)), Len: n})
		room -= int64(n)
	}
	s.n = s.q.maxTransfer - room
	s.submit(stageDirect, s.op, s.flags, s.offset+s.done, s.n, iov)
}

// bounce begins a step of an unaligned request: as many whole blocks as a piece of memory takes.
func (s *stepper) bounce() {
	if s.piece == nil && !s.q.takePiece(s) {
		return
	}
	at := s.offset + s.done
	s.cover(at, s.length-s.done)
	if s.op == OpRead {
		s.one(stageGather, OpRead, s.start, s.end)
		return
	}
	s.readEdges(at)
}

// cover sets the blocks of a step that begins at at and has up to rest bytes to do.
func (s *stepper) cover(at, rest int64) {
	mask := int64(s.q.alignMask)
	room := min(int64(len(s.piece))&^mask, s.q.maxTransfer)
	s.start = at &^ mask
	s.n = min(rest, s.start+room-at)
	s.end = (at + s.n + mask) &^ mask
}

// one submits a transfer of [start, end), which lies within the step's blocks, by way of the piece.
func (s *stepper) one(st stage, op Op, start, end int64) {
	s.iov[0] = sys.IOVecOf(s.piece[start-s.start : end-s.start])
	flags := Flags(0)
	if op == OpWrite {
		flags = s.flags & FlagFUA
	}
	s.submit(st, op, flags, start, end-start, s.iov[:1])
}

// readEdges reads the blocks that the step writes only a part of, the first one first.
func (s *stepper) readEdges(at int64) {
	align := int64(s.q.alignMask) + 1
	partial := at > s.start || at+s.n < s.end
	switch {
	case partial && s.q.memMask > s.q.alignMask:
		// The address of the last block in the piece is not aligned as memory must be: all blocks are read at once.
		s.q.count.Merged++
		s.one(stageTail, OpRead, s.start, s.end)
	case at > s.start || at+s.n < s.start+align:
		s.q.count.Merged++
		s.one(stageHead, OpRead, s.start, s.start+align)
	case at+s.n < s.end:
		s.q.count.Merged++
		s.one(stageTail, OpRead, s.end-align, s.end)
	default:
		s.scatter(at)
	}
}

// headRead goes on when the first block is there: the last one may be another one, and partly written too.
func (s *stepper) headRead() {
	at, align := s.offset+s.done, int64(s.q.alignMask)+1
	if at+s.n < s.end && s.end-align > s.start {
		s.q.count.Merged++
		s.one(stageTail, OpRead, s.end-align, s.end)
		return
	}
	s.scatter(at)
}

// scatter puts the request's bytes over the blocks and writes these.
func (s *stepper) scatter(at int64) {
	into := s.piece[at-s.start : at-s.start+s.n]
	if s.op == OpWriteZeroes {
		clear(into)
	} else if err := s.copyMem(into, false); err != nil {
		s.fail(err)
		return
	}
	s.one(stageScatter, OpWrite, s.start, s.end)
}

// gathered copies what a bounced read brought to the request's memory.
func (s *stepper) gathered() error {
	at := s.offset + s.done - s.start
	return s.copyMem(s.piece[at:at+s.n], true)
}

// copyMem copies between buf and the request's segments, from where the last copy ended. The segments may be guest
// memory, which can vanish: then it answers EFAULT.
func (s *stepper) copyMem(buf []byte, toMem bool) error {
	seg, off := s.seg, s.segOffset
	for len(buf) > 0 {
		b := s.mem[seg].Bytes()[off:]
		n := min(len(b), len(buf))
		dst, src := buf[:n], b[:n]
		if toMem {
			dst, src = src, dst
		}
		if err := sys.CopyGuarded(dst, src); err != nil {
			return err
		}
		buf = buf[n:]
		off += uint64(n)
		if n == len(b) {
			seg, off = seg+1, 0
		}
	}
	return nil
}

// consume moves the place in the segments on by the bytes of a finished step.
func (s *stepper) consume() {
	s.done += s.n
	for rest := uint64(s.n); rest > 0 && s.seg < len(s.mem); {
		n := min(rest, s.mem[s.seg].Len-s.segOffset)
		rest -= n
		s.segOffset += n
		if s.segOffset == s.mem[s.seg].Len {
			s.seg, s.segOffset = s.seg+1, 0
		}
	}
}

// Complete is the end of a step.
func (s *stepper) Complete(_ *Request, err error) {
	if s.stage != stageFail {
		s.parent.AdoptTimes(&s.child)
	}
	switch {
	case s.stage == stageNative && err != nil && s.forgo(err):
		s.advance()
		return
	case err != nil || s.stage == stageFail || s.stage == stageFlush:
		s.finish(err)
		return
	}
	switch s.stage {
	case stageHead:
		s.headRead()
		return
	case stageTail:
		s.scatter(s.offset + s.done)
		return
	case stageGather:
		if err := s.gathered(); err != nil {
			s.finish(err)
			return
		}
	}
	s.consume()
	if s.done == s.length && !s.flushAfter {
		s.finish(nil)
		return
	}
	s.advance()
}

// finish gives everything back and answers the request.
func (s *stepper) finish(err error) {
	q, r := s.q, s.parent
	if s.entered {
		q.h.blocks.leave(q, &s.entry)
	}
	if s.untracked {
		q.leaveUntracked()
	}
	if s.piece != nil {
		q.givePiece(s)
	}
	s.parent, s.mem, s.child.Mem = nil, nil, nil
	// The collector does not look into the pool's memory, but a store there tells it of what is overwritten. That must not be
	// an address which has been given back meanwhile.
	clear(s.iov[:])
	q.giveStepper(s)
	if err != nil {
		q.count.Errors++
	}
	r.Finish(err)
	q.leave()
}

// forgo remembers that the node cannot do natively what it was asked for, and tells whether there is another way.
func (s *stepper) forgo(err error) bool {
	if e := Errno(err); e != syscall.EOPNOTSUPP && e != syscall.ENOSYS && e != syscall.ENOTTY {
		return false
	}
	h := s.q.h
	switch {
	case s.op == OpDiscard:
		h.noDiscard.Store(true)
		return false
	case s.child.Flags&FlagUnmap != 0 && !h.noUnmap.Load():
		h.noUnmap.Store(true)
	default:
		h.noZeroes.Store(true)
	}
	return true
}
