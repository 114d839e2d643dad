// SPDX-License-Identifier: Apache-2.0

// Package fault is a node that lets requests through, except those that a short text tells it to fail, to cut short or
// to hold up. It may stand above any node; tests put it there, and so may users who want to see how a guest takes it.
//
// # The language
//
//	text      = statement { ( ";" | newline ) statement }        "#" begins a comment, up to the end of the line
//	statement = operation [ range ] { key "=" value }
//	operation = "read" | "write" | "flush" | "discard" | "write-zeroes" | "any"
//	range     = first [ "-" last ]          bytes, the last one included; K, M, G, T stand for powers of 1024
//
//	error=EIO      fail with this errno, by name or number; the node below does not see the request
//	short=512      only that many bytes reach the node below, then the request fails with error (EIO by default): a torn
//	               write, a read that fills a part of the memory
//	delay=10ms     hold the request up; alone it is carried out after that, with error it fails after that
//	after=3        let the first 3 requests that match pass
//	count=1        then apply to 1 request only; without it to all
//
// For example
//
//	read 4096-8191 error=EIO count=1 after=3; write delay=10ms; flush error=ENOSPC; write 1M short=512
//
// A request matches a statement when the operation is right and its range touches the statement's; a flush has no range
// and matches statements without one. Statements are tried in order; the first one that matches and applies is it. Those
// tried before it count the request as one that matched.
//
// # Threads
//
// New, Set, Info and Close are control plane and safe for concurrent use; a queue belongs to its loop. Counts are shared
// by all loops. It changes no data, and needs a Handle above it like any node.
package fault

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
)

// Node implements block.Node.
type Node struct {
	below    block.Node
	rules    atomic.Pointer[[]*rule]
	injected atomic.Uint64
}

// New puts faults before below and takes it over: closing the node closes it. When New fails, below stays the caller's.
// An empty text lets everything pass.
func New(below block.Node, text string) (*Node, error) {
	n := &Node{below: below}
	if err := n.Set(text); err != nil {
		return nil, err
	}
	return n, nil
}

// Set replaces all statements; their counts begin anew. When it fails nothing is changed. What is held up stays so.
func (n *Node) Set(text string) error {
	rules, err := parse(text)
	if err != nil {
		return fmt.Errorf("set faults: %w", err)
	}
	n.rules.Store(&rules)
	return nil
}

// Injected is how many requests were failed, cut short or held up.
func (n *Node) Injected() uint64 { return n.injected.Load() }

// Info implements block.Node: what the node below says.
func (n *Node) Info() block.Info { return n.below.Info() }

// Below implements block.Filter.
func (n *Node) Below() block.Node { return n.below }

// Close implements block.Node.
func (n *Node) Close() error { return n.below.Close() }

// Map implements block.Mapper: no faults here, what the node below says.
func (n *Node) Map(ctx context.Context, off, length int64, each func(block.Extent) error) error {
	return block.Map(ctx, n.below, off, length, each)
}

// Length implements block.Growable: that of the node below.
func (n *Node) Length() (int64, error) { return block.Length(n.below) }

// Truncate implements block.Growable.
func (n *Node) Truncate(length int64) error { return block.Truncate(n.below, length) }

// Queue implements block.Node. Must be called on the loop.
func (n *Node) Queue(l *aio.Loop) (block.Queue, error) {
	q, err := n.below.Queue(l)
	if err != nil {
		return nil, err
	}
	return &queue{n: n, loop: l, below: q}, nil
}

type queue struct {
	n     *Node
	loop  *aio.Loop
	below block.Queue
	free  *held
}

// Submit implements block.Queue.
func (q *queue) Submit(r *block.Request) {
	f := q.n.decide(r)
	if f == nil {
		q.below.Submit(r)
		return
	}
	q.n.injected.Add(1)
	switch {
	case f.delay > 0:
		q.take(r, f).wait()
	case f.short >= 0:
		q.take(r, f).act()
	default:
		q.loop.CompleteLater(r, f.err)
	}
}

// Close implements block.Queue.
func (q *queue) Close() error { return q.below.Close() }

// decide finds the statement that applies to r.
func (n *Node) decide(r *block.Request) *rule {
	for _, f := range *n.rules.Load() {
		if f.matches(r) && f.applies() {
			return f
		}
	}
	return nil
}

// held is a request that is held up or cut short.
type held struct {
	q     *queue
	r     *block.Request
	f     *rule
	timer *aio.Timer
	child block.Request
	mem   []block.IOVec
	next  *held
}

func (q *queue) take(r *block.Request, f *rule) *held {
	h := q.free
	if h == nil {
		h = &held{q: q}
		h.child.Done = h
	} else {
		q.free = h.next
	}
	h.r, h.f = r, f
	return h
}

func (h *held) give() {
	h.r, h.f, h.mem, h.child.Mem = nil, nil, h.mem[:0], nil
	h.next, h.q.free = h.q.free, h
}

func (h *held) wait() {
	if h.timer == nil {
		h.timer = h.q.loop.Timer(h.f.delay, h)
		return
	}
	h.timer.Reset(h.f.delay)
}

// HandleTimer ends a delay.
func (h *held) HandleTimer(*aio.Timer) { h.act() }

// act does what the statement says, now that the delay is over.
func (h *held) act() {
	q, r, f := h.q, h.r, h.f
	switch {
	case f.short >= 0 && (r.Op == block.OpFlush || f.short == 0):
		h.give()
		q.loop.CompleteLater(r, f.err)
	case f.short >= 0:
		h.cut()
	case f.err != nil:
		h.give()
		q.loop.CompleteLater(r, f.err)
	default:
		h.give()
		q.below.Submit(r)
	}
}

// cut sends the first bytes of the request to the node below.
func (h *held) cut() {
	c := &h.child
	c.Op, c.Flags, c.Offset, c.Length = h.r.Op, h.r.Flags, h.r.Offset, min(h.f.short, h.r.Length)
	rest := c.Length
	for _, v := range h.r.Mem {
		if rest == 0 {
			break
		}
		n := min(int64(v.Len), rest)
		h.mem = append(h.mem, block.IOVec{Base: v.Base, Len: uint64(n)})
		rest -= n
	}
	c.Mem = h.mem
	h.q.below.Submit(c)
}

// Complete fails the request after a part of it was done. What the node below says of the part does not matter.
func (h *held) Complete(*block.Request, error) {
	r, err := h.r, h.f.err
	h.give()
	r.Finish(err)
}
