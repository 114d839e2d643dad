// SPDX-License-Identifier: Apache-2.0

package block

import (
	"context"
	"testing"

	"github.com/sluice-blk/sluice/aio"
)

// stub completes requests when the test says so.
type stub struct {
	info Info
	held []*Request
}

func (s *stub) Info() Info                     { return s.info }
func (s *stub) Queue(*aio.Loop) (Queue, error) { return s, nil }
func (s *stub) Submit(r *Request)              { s.held = append(s.held, r) }
func (s *stub) Close() error                   { return nil }

func (s *stub) finish() {
	for i := 0; i < len(s.held); i++ { // what finishes may submit more
		s.held[i].Finish(nil)
	}
	s.held = s.held[:0]
}

type sink struct{ n int }

func (s *sink) Complete(*Request, error) { s.n++ }

// The walk of a request through a handle allocates nothing, on the straight way and on the others.
func TestNothingIsAllocatedOnTheWalk(t *testing.T) {
	l, err := aio.NewLoop(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, c := range []struct {
		name string
		info Info
		r    Request
	}{
		{"read", Info{Align: 512, MemAlign: 1}, Request{Op: OpRead, Length: 4096}},
		{"write", Info{Align: 512, MemAlign: 1}, Request{Op: OpWrite, Length: 4096}},
		{"bytes", Info{Align: 1, MemAlign: 1}, Request{Op: OpWrite, Length: 4096}},
		{"flush", Info{Flush: Native}, Request{Op: OpFlush}},
		{"bounced read", Info{Align: 4096, MemAlign: 1}, Request{Op: OpRead, Offset: 512, Length: 4096}},
		{"partial write", Info{Align: 4096, MemAlign: 1}, Request{Op: OpWrite, Offset: 512, Length: 4096}},
		{"split", Info{MaxTransfer: 512}, Request{Op: OpRead, Length: 4096}},
		{"durable", Info{Flush: Native, WriteCache: true}, Request{Op: OpWrite, Flags: FlagFUA, Length: 4096}},
		{"zeroes", Info{Align: 512}, Request{Op: OpWriteZeroes, Length: 4096}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.info.Size = 1 << 20
			s := &stub{info: c.info, held: make([]*Request, 0, 64)}
			h := NewHandle(s, nil)
			q, err := h.Queue(l)
			if err != nil {
				t.Fatal(err)
			}
			defer q.Close()
			done := &sink{}
			r := c.r
			r.Done = done
			if r.Op == OpRead || r.Op == OpWrite {
				r.Mem = []IOVec{aio.IOVecOf(make([]byte, r.Length))}
			}
			offset, flags := r.Offset, r.Flags
			n := testing.AllocsPerRun(100, func() {
				r.Offset, r.Flags = offset, flags
				q.Submit(&r)
				s.finish()
			})
			if n != 0 {
				t.Errorf("%v allocations", n)
			}
			for i := range q.steps.steppers {
				if *q.steps.steppers[i].iov != ([stepSegments]IOVec{}) {
					t.Error("a stepper that is free remembers addresses, of which the collector would hear when they mean nothing any more")
					break
				}
			}
			if done.n == 0 || q.InFlight() != 0 {
				t.Errorf("%d completions, %d in flight", done.n, q.InFlight())
			}
		})
	}
}

// Writes are tracked while there are partial ones, and a while longer.
func TestTrackingEnds(t *testing.T) {
	l, err := aio.NewLoop(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := &stub{info: Info{Align: 4096, Size: 1 << 20}}
	h := NewHandle(s, nil)
	q, err := h.Queue(l)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	mem := []IOVec{aio.IOVecOf(make([]byte, 4096))}
	half := []IOVec{aio.IOVecOf(make([]byte, 512))}
	r := Request{Op: OpWrite, Length: 512, Mem: half, Done: &sink{}}
	q.Submit(&r)
	if !h.blocks.tracking.Load() {
		t.Fatal("a partial write is not tracked")
	}
	s.finish()
	for i := range calmWrites {
		if !h.blocks.tracking.Load() {
			t.Fatalf("tracking ends after %d writes", i)
		}
		r.Op, r.Length, r.Mem = OpWrite, 4096, mem
		q.Submit(&r)
		s.finish()
	}
	if h.blocks.tracking.Load() {
		t.Error("tracking does not end")
	}
}

// A partial write waits for whole ones that were not tracked, and goes when the last of them is back.
func TestPartialWriteWaitsForUntracked(t *testing.T) {
	l, err := aio.NewLoop(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := &stub{info: Info{Align: 4096, Size: 1 << 20}}
	h := NewHandle(s, nil)
	q, err := h.Queue(l)
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	done := &sink{}
	whole := Request{Op: OpWrite, Length: 4096, Mem: []IOVec{aio.IOVecOf(make([]byte, 4096))}, Done: done}
	part := Request{Op: OpWrite, Length: 512, Mem: []IOVec{aio.IOVecOf(make([]byte, 512))}, Done: done}
	later := Request{Op: OpWrite, Offset: 0, Length: 4096, Mem: whole.Mem, Done: done}
	q.Submit(&whole)
	q.Submit(&part)
	q.Submit(&later)
	if len(s.held) != 1 {
		t.Fatalf("%d requests came to the node, want the first alone", len(s.held))
	}
	s.held[0].Finish(nil)
	if len(s.held) != 2 || s.held[1].Op != OpRead {
		t.Fatal("the partial write does not read its block next")
	}
	s.held[1].Finish(nil)
	if len(s.held) != 3 || s.held[2].Op != OpWrite {
		t.Fatal("the partial write does not write its block next")
	}
	s.held[2].Finish(nil)
	if len(s.held) != 4 || done.n != 2 {
		t.Fatal("the write that came last does not go last")
	}
	s.held[3].Finish(nil)
	if done.n != 3 || q.InFlight() != 0 {
		t.Errorf("%d completions, %d in flight", done.n, q.InFlight())
	}
	s.held = s.held[:0]
}

// A drain that is given up leaves the door as it was.
func TestDrainGivenUp(t *testing.T) {
	l, err := aio.NewLoop(nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	s := &stub{info: Info{Size: 1 << 20}}
	h := NewHandle(s, nil)
	var q *HandleQueue
	done := &sink{}
	r := Request{Op: OpRead, Length: 512, Mem: []IOVec{aio.IOVecOf(make([]byte, 512))}, Done: done}
	err = l.Call(ctx, func() (err error) {
		if q, err = h.Queue(l); err == nil {
			q.Submit(&r)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	soon, stop := context.WithCancel(ctx)
	stop()
	if err := h.Drain(soon); err == nil {
		t.Error("drained with a request in flight")
	}
	err = l.Call(ctx, func() error {
		if q.gate != 0 {
			t.Errorf("door is shut %d times", q.gate)
		}
		s.finish()
		return q.Close()
	})
	if err != nil || done.n != 1 {
		t.Errorf("%v, %d completions", err, done.n)
	}
	cancel()
	<-ended
}
