// SPDX-License-Identifier: Apache-2.0

// Package null is the node that keeps nothing: writes vanish, reads leave the memory as it is, or fill it with zeros.
//
// It serves to measure everything above it, with a latency when a device is to be imitated. New, Info and Close are
// control plane, a queue belongs to its loop. It is no sink for data that matters, and says so in Info.
package null

import (
	"context"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/sys"
)

// Options describe the device that is imitated.
type Options struct {
	Size     int64 // bytes
	ReadOnly bool
	// Latency is how long each request takes, at least. 0 completes it in the turn of its submission.
	Latency time.Duration
	// ReadZeroes fills what is read with zeros, as a guest expects of memory that it trusts. Without it a read leaves
	// the memory as it is.
	ReadZeroes bool
}

// Node implements block.Node.
type Node struct{ o Options }

// New makes a node. It cannot fail.
func New(o Options) *Node { return &Node{o: o} }

// Info implements block.Node.
func (n *Node) Info() block.Info {
	i := block.Info{
		Name:          "null",
		Size:          n.o.Size,
		ReadOnly:      n.o.ReadOnly,
		Align:         1,
		MemAlign:      1,
		LogicalBlock:  512,
		PhysicalBlock: 4096,
		Flush:         block.Native,
		FUA:           block.Native,
		Discard:       block.Native,
		WriteZeroes:   block.Native,
		Durability:    "nothing is kept, so flush and FUA do nothing",
		Engine:        "none: requests are answered at once",
	}
	if n.o.Latency > 0 {
		i.Engine = "none: requests are answered after " + n.o.Latency.String()
	}
	if n.o.ReadOnly {
		i.Discard, i.WriteZeroes = block.None, block.None
	}
	return i
}

// Queue implements block.Node. Must be called on the loop.
func (n *Node) Queue(l *aio.Loop) (block.Queue, error) {
	return &queue{loop: l, latency: n.o.Latency, fill: n.o.ReadZeroes}, nil
}

// Map implements block.Mapper. Memory that a read leaves as it is counts as data.
func (n *Node) Map(ctx context.Context, off, length int64, each func(block.Extent) error) error {
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return each(block.Extent{Offset: off, Length: length, Data: !n.o.ReadZeroes, Zero: n.o.ReadZeroes, Present: true, Host: -1, File: "null"})
}

// Close implements block.Node.
func (n *Node) Close() error { return nil }

type queue struct {
	loop    *aio.Loop
	latency time.Duration
	fill    bool
	timer   *aio.Timer
	late    lateList
}

// Submit implements block.Queue.
func (q *queue) Submit(r *block.Request) {
	var err error
	if q.fill && r.Op == block.OpRead {
		err = fill(r.Mem)
	}
	if q.latency == 0 || err != nil {
		q.loop.CompleteLater(r, err)
		return
	}
	q.late.push(entry{r, q.loop.Now() + int64(q.latency)})
	if q.late.n == 1 {
		q.arm(q.latency)
	}
}

func (q *queue) arm(d time.Duration) {
	if q.timer == nil {
		q.timer = q.loop.Timer(d, q)
		return
	}
	q.timer.Reset(d)
}

// HandleTimer answers what is due. All have the same latency, so they are due in the order in which they came.
func (q *queue) HandleTimer(*aio.Timer) {
	now := q.loop.Now()
	for q.late.n > 0 && q.late.first().due <= now {
		q.loop.CompleteLater(q.late.pop().r, nil)
	}
	if q.late.n > 0 {
		q.arm(time.Duration(q.late.first().due - now))
	}
}

// Close implements block.Queue.
func (q *queue) Close() error {
	if q.timer != nil {
		q.timer.Stop()
	}
	return nil
}

var zeros [64 << 10]byte

// fill zeroes the segments, which may be guest memory that vanishes: EFAULT then.
func fill(mem []block.IOVec) error {
	for _, v := range mem {
		for b := v.Bytes(); len(b) > 0; {
			n := min(len(b), len(zeros))
			if err := sys.CopyGuarded(b[:n], zeros[:n]); err != nil {
				return err
			}
			b = b[n:]
		}
	}
	return nil
}

type entry struct {
	r   *block.Request
	due int64 // on the loop's clock
}

// lateList is first in, first out, and keeps its memory.
type lateList struct {
	ring    []entry
	head, n int
}

func (l *lateList) push(e entry) {
	if l.n == len(l.ring) {
		bigger := make([]entry, max(64, 2*l.n))
		for i := range l.n {
			bigger[i] = l.ring[(l.head+i)%len(l.ring)]
		}
		l.ring, l.head = bigger, 0
	}
	l.ring[(l.head+l.n)%len(l.ring)] = e
	l.n++
}

func (l *lateList) first() *entry { return &l.ring[l.head] }

func (l *lateList) pop() entry {
	e := l.ring[l.head]
	l.ring[l.head] = entry{}
	l.head = (l.head + 1) % len(l.ring)
	l.n--
	return e
}
