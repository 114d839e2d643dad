// SPDX-License-Identifier: Apache-2.0

package blocktest

import (
	"sync/atomic"
	"syscall"
	"testing"
	"unsafe"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
)

// Shape is a node that says about the node below what the test wants, and fails the test when a request is not as its
// Info asks. It stands for devices that this machine does not have.
type Shape struct {
	t     testing.TB
	below block.Node
	info  block.Info

	// RefuseZeroes and RefuseDiscard answer EOPNOTSUPP although Info offers them, as some file systems do.
	RefuseZeroes, RefuseDiscard bool

	seen [block.OpWriteZeroes + 1]atomic.Int64
}

// NewShape puts a shape above n. change gets n's Info to change.
func NewShape(t testing.TB, n block.Node, change func(i *block.Info)) *Shape {
	s := &Shape{t: t, below: n, info: n.Info()}
	change(&s.info)
	return s
}

// Seen is how many requests of a kind came.
func (s *Shape) Seen(op block.Op) int64 { return s.seen[op].Load() }

// Info implements block.Node.
func (s *Shape) Info() block.Info { return s.info }

// Close implements block.Node.
func (s *Shape) Close() error { return s.below.Close() }

// Queue implements block.Node.
func (s *Shape) Queue(l *aio.Loop) (block.Queue, error) {
	q, err := s.below.Queue(l)
	if err != nil {
		return nil, err
	}
	return &shapeQueue{s: s, loop: l, below: q}, nil
}

type shapeQueue struct {
	s     *Shape
	loop  *aio.Loop
	below block.Queue
}

// Submit implements block.Queue.
func (q *shapeQueue) Submit(r *block.Request) {
	s := q.s
	s.seen[r.Op].Add(1)
	if problem := s.problem(r); problem != "" {
		s.t.Errorf("%s at %d of %d bytes in %d segments came to the node: %s", r.Op, r.Offset, r.Length, len(r.Mem), problem)
		q.loop.CompleteLater(r, syscall.EINVAL)
		return
	}
	if s.RefuseZeroes && r.Op == block.OpWriteZeroes || s.RefuseDiscard && r.Op == block.OpDiscard {
		q.loop.CompleteLater(r, syscall.EOPNOTSUPP)
		return
	}
	q.below.Submit(r)
}

// Close implements block.Queue.
func (q *shapeQueue) Close() error { return q.below.Close() }

func (s *Shape) problem(r *block.Request) string {
	i := &s.info
	align := int64(max(i.Align, 1))
	over := func(n, most int64) bool { return most > 0 && n > most }
	switch {
	case r.Op == block.OpFlush && i.Flush == block.None:
		return "it has no flush"
	case r.Op == block.OpFlush:
		return ""
	case r.Op != block.OpRead && i.ReadOnly:
		return "it is read-only"
	case r.Offset < 0 || r.Length <= 0 || r.Offset+r.Length > i.Size:
		return "out of range"
	case r.Offset%align != 0 || r.Length%align != 0:
		return "not aligned"
	case r.Flags&block.FlagFUA != 0 && (i.FUA != block.Native || r.Op == block.OpRead):
		return "it has no FUA"
	case r.Op == block.OpDiscard && (i.Discard == block.None || over(r.Length, i.MaxDiscard)):
		return "no such discard"
	case r.Op == block.OpWriteZeroes && (i.WriteZeroes == block.None || over(r.Length, i.MaxWriteZeroes)):
		return "no such write of zeroes"
	case r.Op == block.OpDiscard || r.Op == block.OpWriteZeroes:
		return ""
	case over(r.Length, i.MaxTransfer) || over(int64(len(r.Mem)), int64(i.MaxSegments)):
		return "too large"
	}
	var sum int64
	for _, v := range r.Mem {
		sum += int64(v.Len)
		// SAFETY: the address is looked at as a number.
		if int64(v.Len)%align != 0 || uintptr(unsafe.Pointer(v.Base))%uintptr(max(i.MemAlign, 1)) != 0 {
			return "a segment is not aligned"
		}
	}
	if sum != r.Length {
		return "the segments do not add up"
	}
	return ""
}
