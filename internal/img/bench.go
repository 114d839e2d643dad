// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
)

// Bench sends requests to a disk, one size and one direction, and keeps a number of them in flight. The zero value of what
// is not said is used as it is: see BenchDefaults.
type Bench struct {
	Disk    *Disk
	Write   bool
	Count   int
	Depth   int
	Size    int64 // bytes of a request
	Step    int64 // from one request to the next; 0 is Size
	Offset  int64 // of the first
	Pattern byte  // what is written

	FlushInterval int  // a flush after so many writes; 0: none
	NoDrain       bool // the flush does not wait for the writes before it

	queue    *block.HandleQueue
	slots    []benchSlot
	free     []*benchSlot
	flush    benchSlot
	at       int64
	left     int // not yet sent
	inFlight int
	due      int // writes until the next flush
	flushing bool
	err      error
	done     chan struct{}
}

// benchSlot is one request, used again and again.
type benchSlot struct {
	b   *Bench
	req block.Request
	mem [1]aio.IOVec
}

// Run sends all requests and tells how long it took. The first error ends it.
func (b *Bench) Run(ctx context.Context) (time.Duration, error) {
	if b.Step == 0 {
		b.Step = b.Size
	}
	b.prepare()
	start := time.Now()
	if b.left > 0 {
		b.queue.Loop().Post(b.fill)
		select {
		case <-b.done:
		case <-ctx.Done():
			b.queue.Loop().Post(b.stop)
			<-b.done
			return 0, context.Cause(ctx)
		}
	}
	if b.err != nil {
		return 0, Wordedf("Failed request: %s", b.err)
	}
	return time.Since(start), nil
}

// benchAlign is what direct I/O asks of memory at most.
const benchAlign = 4096

// prepare makes the slots, each with memory of its own.
func (b *Bench) prepare() {
	b.queue, b.done = b.Disk.face, make(chan struct{}, 1)
	b.at, b.left, b.due = b.Offset, b.Count, b.FlushInterval
	b.slots = make([]benchSlot, b.Depth)
	room := (b.Size + benchAlign - 1) &^ (benchAlign - 1)
	memory := alignedBytes(room * int64(b.Depth))
	for i := range memory {
		memory[i] = b.Pattern
	}
	for i := range b.slots {
		s := &b.slots[i]
		s.b = b
		s.mem[0] = aio.IOVecOf(memory[int64(i)*room:][:b.Size])
		s.req.Done = s
		b.free = append(b.free, s)
	}
	b.flush.b, b.flush.req.Done = b, &b.flush
}

// fill sends as many requests as may be sent. It runs on the loop, as all that follows.
func (b *Bench) fill() {
	for b.left > 0 && b.err == nil && len(b.free) > 0 && !b.flushIsDue() {
		s := b.free[len(b.free)-1]
		b.free = b.free[:len(b.free)-1]
		op := block.OpRead
		if b.Write {
			op = block.OpWrite
			b.due--
		}
		s.req.Op, s.req.Offset, s.req.Length, s.req.Mem = op, b.at, b.Size, s.mem[:]
		b.left--
		b.inFlight++
		if b.at += b.Step; b.at >= b.Disk.Size() && b.Disk.Size() > 0 {
			b.at %= b.Disk.Size()
		}
		b.queue.Submit(&s.req)
	}
	if b.inFlight == 0 && !b.flushing && (b.left == 0 || b.err != nil) {
		b.done <- struct{}{}
	}
}

// flushIsDue sends a flush when it is time for one, and tells whether the writes have to wait for it.
func (b *Bench) flushIsDue() bool {
	switch {
	case b.FlushInterval == 0 || b.due > 0:
		return false
	case b.flushing:
		return true
	case !b.NoDrain && b.inFlight > 0:
		return true
	}
	b.flushing, b.due = true, b.FlushInterval
	b.flush.req.Op, b.flush.req.Offset, b.flush.req.Length, b.flush.req.Mem = block.OpFlush, 0, 0, nil
	b.queue.Submit(&b.flush.req)
	return !b.NoDrain
}

// Complete takes a request back.
func (s *benchSlot) Complete(_ *block.Request, err error) {
	b := s.b
	if err != nil && b.err == nil {
		b.err = err
	}
	if s == &b.flush {
		b.flushing = false
	} else {
		b.inFlight--
		b.free = append(b.free, s)
	}
	b.fill()
}

// stop sends nothing more.
func (b *Bench) stop() {
	b.left = 0
	b.fill()
}
