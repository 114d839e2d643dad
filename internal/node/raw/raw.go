// SPDX-License-Identifier: Apache-2.0

// Package raw is the node of the raw format: the bytes of the disk are the bytes of the node below, or of a window of it.
//
// It moves a request by the window's offset and hands on the very same request, so that it is not there on the way back.
// Its thread rule is that of every node: New, Info and Close are control plane, a queue belongs to its loop. It checks no
// bounds: a request that is not inside the window would read and write what is beside it, which is what a Handle is for.
package raw

import (
	"context"
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
)

// Options say which window is shown. The zero value shows all.
type Options struct {
	Offset int64 // bytes; a multiple of the alignment of the node below
	Size   int64 // bytes; 0 is up to the end of the node below
}

// Node is a window. It implements block.Node.
type Node struct {
	below  block.Node
	offset int64
	size   int64
}

// New shows a window of below and takes it over: closing the window closes it. When New fails, below stays the caller's.
func New(below block.Node, o *Options) (*Node, error) {
	n := &Node{below: below}
	if o != nil {
		n.offset, n.size = o.Offset, o.Size
	}
	i := below.Info()
	align := int64(max(i.Align, 1))
	switch {
	case n.offset < 0 || n.size < 0:
		return nil, fmt.Errorf("set up a window of %s: offset and size must not be negative: %w", i.Name, syscall.EINVAL)
	case n.offset > i.Size || n.size > i.Size-n.offset:
		return nil, fmt.Errorf("set up a window of %s: %d bytes at %d reach beyond its size of %d: %w", i.Name, n.size, n.offset, i.Size, syscall.EINVAL)
	}
	if n.size == 0 {
		n.size = i.Size - n.offset
	}
	if n.offset%align != 0 || n.size%align != 0 {
		return nil, fmt.Errorf("set up a window of %s: offset %d and size %d must be multiples of %d: %w (use cache=writeback)",
			i.Name, n.offset, n.size, align, syscall.EINVAL)
	}
	return n, nil
}

// Info implements block.Node: what the node below says, with the window's size.
func (n *Node) Info() block.Info {
	i := n.below.Info()
	i.Size = n.size
	if i.SpaceAlign != 0 && n.offset%i.SpaceAlign != 0 {
		i.WriteZeroes, i.Discard, i.SpaceAlign = block.None, block.None, 0 // the window's blocks are not the device's
	}
	return i
}

// Queue implements block.Node. Must be called on the loop.
func (n *Node) Queue(l *aio.Loop) (block.Queue, error) {
	q, err := n.below.Queue(l)
	if err != nil || n.offset == 0 {
		return q, err // without an offset there is nothing to do, and so nobody in between
	}
	return &queue{below: q, offset: n.offset}, nil
}

// Map implements block.Mapper: what the node below says of the window.
func (n *Node) Map(ctx context.Context, off, length int64, each func(block.Extent) error) error {
	return block.Map(ctx, n.below, n.offset+off, length, func(e block.Extent) error {
		e.Offset -= n.offset
		return each(e)
	})
}

// Below implements block.Filter.
func (n *Node) Below() block.Node { return n.below }

// Close implements block.Node.
func (n *Node) Close() error { return n.below.Close() }

type queue struct {
	below  block.Queue
	offset int64
}

// Submit implements block.Queue.
func (q *queue) Submit(r *block.Request) {
	r.Offset += q.offset
	q.below.Submit(r)
}

// Close implements block.Queue.
func (q *queue) Close() error { return q.below.Close() }
