// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// queue is one user's face of the image on its home loop.
type queue struct {
	h      *home
	closed bool
}

// Submit implements block.Queue.
func (q *queue) Submit(r *block.Request) {
	h := q.h
	switch r.Op {
	case block.OpRead:
		if e, ok := h.n.view.Lookup(r.Offset, r.Length); ok && e.Length == r.Length && h.readAtOnce(r, &e) {
			h.count.Direct++
			return
		}
	case block.OpWrite:
		if e, ok := h.n.view.Lookup(r.Offset, r.Length); ok && e.Length == r.Length && e.Kind == metadata.Data && e.InPlace && h.pass(r, e.Host) {
			h.count.Direct++
			return
		}
	}
	h.count.Indirect++
	h.begin(job{r: r})
}

// Close implements block.Queue.
func (q *queue) Close() error {
	if q.closed {
		return nil
	}
	q.closed = true
	return q.h.n.release(q.h)
}

// readAtOnce carries out a read that lies in one extent, where that needs no waiting for anything but the one transfer.
func (h *home) readAtOnce(r *block.Request, e *metadata.Extent) bool {
	switch e.Kind {
	case metadata.Data:
		return h.pass(r, e.Host)
	case metadata.Unallocated:
		if have := h.n.backingSize - r.Offset; have > 0 {
			if have < r.Length {
				return false
			}
			h.behind(r)
			return true
		}
	case metadata.Zero, metadata.ZeroAllocated:
	default:
		return false
	}
	h.loop.CompleteLater(r, zeroAll(r.Mem))
	return true
}
