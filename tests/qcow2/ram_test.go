// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"hash/maphash"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
)

// ram is a file in memory as a node, for an image to stand on. Requests take a few turns of the loop and come back in any
// order; what is discarded becomes garbage; all that happens is noted, as a device does.
type ram struct {
	log *log
	*rand.Rand
	of    int
	align int
	fixed bool // a disk with the size that it has, to read from

	mu     sync.Mutex
	file   []byte
	flying []event
	fault  func(op block.Op) error // asked before each request; nil never fails
	failed int
}

// log is what happened, of all files together.
type log struct {
	mu         sync.Mutex
	now        int
	record     bool
	events     []event // in the order of their beginning
	complaints []error
	lenient    bool // requests may touch the same bytes at the same time: that is no complaint
}

// Info implements block.Node.
func (n *ram) Info() block.Info {
	a := max(n.align, 1)
	size := int64(block.Unbounded)
	if n.fixed {
		size = int64(len(n.file))
	}
	return block.Info{
		Name: "ram", Size: size, ReadOnly: n.fixed, Align: a, MemAlign: a, LogicalBlock: 512, PhysicalBlock: 4096,
		Flush: block.Native, Discard: block.Native, WriteZeroes: block.Native, WriteCache: true,
		Durability: "a flush covers what completed before", Engine: "none",
	}
}

// Length implements block.Growable.
func (n *ram) Length() (int64, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return int64(len(n.file)), nil
}

// Truncate implements block.Growable.
func (n *ram) Truncate(size int64) error {
	start := n.log.begin(event{of: n.of, kind: truncated, n: size})
	n.mu.Lock()
	n.reach(size)
	n.file = n.file[:size:size]
	n.mu.Unlock()
	n.log.done(start)
	return nil
}

// Close implements block.Node.
func (n *ram) Close() error { return nil }

// Queue implements block.Node.
func (n *ram) Queue(l *aio.Loop) (block.Queue, error) { return &ramQueue{n, l}, nil }

type ramQueue struct {
	n *ram
	l *aio.Loop
}

// Close implements block.Queue.
func (q *ramQueue) Close() error { return nil }

// flight is a request on its way.
type flight struct {
	q     *ramQueue
	start int
	turns int // that it still takes
	apply int // the turn in which it is done
	err   error
	sum   uint64 // of the memory of a write
	e     event
}

var kinds = map[block.Op]eventKind{
	block.OpRead: looked, block.OpWrite: wrote, block.OpFlush: flushed, block.OpDiscard: discarded, block.OpWriteZeroes: zeroed,
}

// Submit implements block.Queue.
func (q *ramQueue) Submit(r *block.Request) {
	n := q.n
	e := event{of: n.of, kind: kinds[r.Op], off: r.Offset, n: r.Length}
	f := &flight{q: q, turns: n.IntN(4)}
	f.apply = n.IntN(f.turns + 1)
	if n.fault != nil {
		if f.err = n.fault(r.Op); f.err != nil {
			n.failed++
			q.l.CompleteLater(r, f.err)
			return
		}
	}
	if r.Op == block.OpWrite {
		e.data = joined(r)
		f.sum = maphash.Bytes(hashSeed, e.data)
	}
	f.e, f.start = e, n.log.begin(e)
	f.e.start = f.start
	n.meets(&f.e)
	n.flying = append(n.flying, f.e)
	if f.apply == f.turns {
		n.do(r, &f.e)
	}
	r.Intercept(f)
	q.l.CompleteLater(r, nil)
}

// Complete implements block.Completer: another turn has gone by.
func (f *flight) Complete(r *block.Request, _ error) {
	n := f.q.n
	if f.turns > 0 {
		f.turns--
		if f.apply == f.turns {
			n.do(r, &f.e)
		}
		r.Intercept(f)
		f.q.l.CompleteLater(r, nil)
		return
	}
	if r.Op == block.OpWrite && maphash.Bytes(hashSeed, joined(r)) != f.sum {
		n.log.complain("memory of a write of %d bytes at %#x changed while it was in flight", f.e.n, f.e.off)
	}
	n.flying = slices.DeleteFunc(n.flying, func(e event) bool { return e.start == f.start })
	n.log.done(f.start)
	r.Finish(nil)
}

func joined(r *block.Request) []byte {
	var b []byte
	for _, v := range r.Mem {
		b = append(b, v.Bytes()...)
	}
	return b
}

// meets complains of two that are in flight to the same bytes. A read of whole sectors may meet a write of whole sectors of
// which neither needs the common bytes.
func (n *ram) meets(e *event) {
	for _, f := range n.flying {
		read := e.kind == looked || f.kind == looked
		both := e.n > 0 && f.n > 0 && e.off < f.off+f.n && f.off < e.off+e.n
		if both && (!read || n.align == 1 && e.kind != f.kind) {
			n.log.complain("%v of %d bytes at %#x while %v of %d bytes at %#x is in flight on file %d", e.kind, e.n, e.off, f.kind, f.n, f.off, n.of)
		}
	}
}

func (n *ram) reach(end int64) {
	if more := end - int64(len(n.file)); more > 0 {
		n.file = append(n.file, make([]byte, more)...)
	}
}

func (n *ram) do(r *block.Request, e *event) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch e.kind {
	case looked:
		at := e.off
		for _, v := range r.Mem {
			copy(v.Bytes(), window(n.file, at, int64(v.Len)))
			at += int64(v.Len)
		}
	case flushed:
	case discarded:
		spoil(n.file, e.off, e.n)
	default:
		n.file = apply(n.file, e, nil, false)
	}
}
