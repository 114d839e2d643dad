// SPDX-License-Identifier: Apache-2.0

package block

import (
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

// zeroes begins a step of a write of zeroes: a part of a block by reading it and writing it back; whole blocks by the
// node when it can, else by writing zeros. The node's blocks may be larger for zeroes than they are for data.
func (s *stepper) zeroes() {
	at, rest, mask := s.offset+s.done, s.length-s.done, int64(s.q.alignMask)
	if at&mask != 0 || rest <= mask {
		s.partialZeroes(at, rest)
		return
	}
	rest &^= mask
	unmap := s.flags&FlagUnmap != 0 && !s.q.h.noUnmap.Load()
	if s.q.h.info.WriteZeroes != None && (unmap || !s.q.h.noZeroes.Load()) {
		if edge := -at & s.q.spaceMask; edge != 0 {
			rest = min(rest, edge)
		} else if rest > s.q.spaceMask {
			s.native(rest&^s.q.spaceMask, s.q.h.info.MaxWriteZeroes)
			return
		}
	}
	s.writeZeros(at, rest)
}

// native has the node do up to rest bytes by itself. Steps are whole blocks.
func (s *stepper) native(rest, most int64) {
	s.n = min(rest, max(limit(most)&^s.q.spaceMask, s.q.spaceMask+1))
	flags := s.flags
	if s.q.h.noUnmap.Load() {
		flags &^= FlagUnmap
	}
	s.submit(stageNative, s.op, flags, s.offset+s.done, s.n, nil)
}

// partialZeroes zeroes a part of one block.
func (s *stepper) partialZeroes(at, rest int64) {
	if s.piece == nil && !s.q.takePiece(s) {
		return
	}
	block := int64(s.q.alignMask) + 1
	s.start = at &^ (block - 1)
	s.end = s.start + block
	s.n = min(rest, s.end-at)
	s.readEdges(at)
}

// writeZeros writes the queue's zeros, as often as one step takes.
func (s *stepper) writeZeros(at, rest int64) {
	if s.done == 0 || s.stage != stageZeros {
		s.q.count.EmulatedZeroes++
	}
	s.n = min(rest, s.q.maxTransfer)
	iov := s.iov[:0]
	left := s.n
	for left > 0 && len(iov) < min(len(s.iov), s.q.maxSegments) {
		n := min(left, int64(len(s.q.steps.zeros)))
		iov = append(iov, sys.IOVecOf(s.q.steps.zeros[:n]))
		left -= n
	}
	s.n -= left
	s.submit(stageZeros, OpWrite, 0, at, s.n, iov)
}

// alignUp is how many bytes of b stand before its first address that is a multiple of align.
func alignUp(b []byte, align int) int {
	// SAFETY: the address is looked at as a number and never turned back into a pointer.
	address := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	return int(-address & uintptr(align-1))
}
