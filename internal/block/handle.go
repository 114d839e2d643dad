// SPDX-License-Identifier: Apache-2.0

package block

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/sluice-blk/sluice/aio"
)

// HandleOptions say how a node is shown to its user. The zero value shows it as it is.
type HandleOptions struct {
	// ReadOnly refuses everything that changes the node, whatever the node allows.
	ReadOnly bool
	// LogicalBlockSize is what Info shows in place of the node's own. 0 keeps the node's. Requests need not keep to it.
	LogicalBlockSize int
	// IgnoreDiscard does not offer discard, takes one that comes all the same as done, and never lets a write of zeroes
	// give space back.
	IgnoreDiscard bool
	// Cache CacheWritethrough begins with the write cache switched off. Other modes begin with it as the node has it.
	Cache CacheMode
}

// Handle is the guard before a node. Make one for each user of a node, and one [HandleQueue] for each loop of that user.
//
// Its methods are safe for concurrent use, except where they say otherwise.
type Handle struct {
	node Node
	info Info // as the node gave it, with the size cut to whole blocks
	o    HandleOptions

	noDiscard atomic.Bool // the node turned out not to discard
	noZeroes  atomic.Bool // the node turned out not to write zeroes, keeping the space
	noUnmap   atomic.Bool // and not to write zeroes giving the space back

	blocks blockTable

	mu     sync.Mutex
	queues []*HandleQueue
	drains int // nested
	past   Counters
	closed bool
}

// NewHandle puts a guard before n and takes it over: closing the handle closes the node. o may be nil.
func NewHandle(n Node, o *HandleOptions) *Handle {
	h := &Handle{node: n, info: n.Info()}
	if o != nil {
		h.o = *o
	}
	h.info.Align, h.info.MemAlign = max(h.info.Align, 1), max(h.info.MemAlign, 1)
	h.info.Size -= h.info.Size % int64(h.info.Align)
	return h
}

// Node is the node behind the guard. Requests that go to it directly are neither checked nor drained.
func (h *Handle) Node() Node { return h.node }

// Info is what the user of the handle sees: any byte range within Size is served, whatever the node's alignment and
// limits, and what is done by other means is told as Emulated. The write cache is as it is for a new queue.
func (h *Handle) Info() Info {
	i := h.info
	i.Engine = h.node.Info().Engine // known when the first queue has been opened
	i.Align, i.MemAlign, i.MaxTransfer, i.MaxSegments, i.MaxDiscard, i.MaxWriteZeroes, i.SpaceAlign = 1, 1, 0, 0, 0, 0, 0
	i.ReadOnly = i.ReadOnly || h.o.ReadOnly
	if h.o.LogicalBlockSize != 0 {
		i.LogicalBlock = h.o.LogicalBlockSize
	}
	i.LogicalBlock = max(i.LogicalBlock, 1)
	i.PhysicalBlock = max(i.PhysicalBlock, i.LogicalBlock)
	i.WriteCache = h.cacheWhen(h.o.Cache != CacheWritethrough)
	if i.Flush == None && !h.info.WriteCache {
		i.Flush = Emulated // there is nothing to do
	}
	if i.FUA == None && i.Flush != None {
		i.FUA = Emulated
	}
	if i.ReadOnly || h.o.IgnoreDiscard || h.noDiscard.Load() {
		i.Discard = None
	}
	switch {
	case i.ReadOnly:
		i.WriteZeroes = None
	case i.WriteZeroes == None || h.noZeroes.Load():
		i.WriteZeroes = Emulated
	}
	if h.info.WriteCache && !i.WriteCache {
		i.Durability = "write cache is switched off: each write is durable when it completes; " + i.Durability
	}
	return i
}

// cacheWhen tells whether there is a write cache when it is switched on or off. A node that has none, and one that can
// make nothing durable, are not changed by the switch.
func (h *Handle) cacheWhen(on bool) bool {
	canDoWithout := h.info.Flush != None || h.info.FUA == Native
	return h.info.WriteCache && (on || !canDoWithout)
}

// Queue makes the handle's face for one loop. Must be called on the loop (see aio.Loop.Call).
func (h *Handle) Queue(l *aio.Loop) (*HandleQueue, error) {
	below, err := h.node.Queue(l)
	if err != nil {
		return nil, fmt.Errorf("open a queue of %s: %w", h.info.Name, err)
	}
	q := &HandleQueue{h: h, loop: l, below: below}
	if err := q.init(); err != nil {
		return nil, errors.Join(fmt.Errorf("open a queue of %s: %w", h.info.Name, err), below.Close())
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		q.freeMemory()
		return nil, errors.Join(fmt.Errorf("open a queue of %s: handle is closed: %w", h.info.Name, syscall.EBADF), below.Close())
	}
	q.gate = h.drains
	h.queues = append(h.queues, q)
	h.blocks.addQueue(q)
	return q, nil
}

// forget takes a queue that is closing off the list. Must be called on the loop of q.
func (h *Handle) forget(q *HandleQueue) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range h.queues {
		if h.queues[i] == q {
			h.queues = append(h.queues[:i:i], h.queues[i+1:]...)
			h.past.add(&q.count)
			break
		}
	}
	h.blocks.removeQueue(q)
}

// Stats is the sum over all queues, closed ones included. It asks each loop, so it must not be called on one.
func (h *Handle) Stats(ctx context.Context) (Counters, error) {
	h.mu.Lock()
	sum, queues := h.past, append([]*HandleQueue(nil), h.queues...)
	h.mu.Unlock()
	for _, q := range queues {
		part := new(Counters) // its own, since the call may run after ctx has ended
		err := q.loop.Call(ctx, func() error {
			*part = q.count
			return nil
		})
		if err != nil {
			return Counters{}, fmt.Errorf("read the counters of %s: %w", h.info.Name, err)
		}
		sum.add(part)
	}
	return sum, nil
}

// Close closes the node. All queues must be closed: it answers ErrBusy otherwise and does nothing. A second Close does
// no harm.
func (h *Handle) Close() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil
	}
	if n := len(h.queues); n > 0 {
		return fmt.Errorf("close %s: %d queues are open: %w (close them on their loops first)", h.info.Name, n, ErrBusy)
	}
	h.closed = true
	return h.node.Close()
}

// limit turns "0 is no limit" into a number to compare with.
func limit(n int64) int64 {
	if n <= 0 {
		return math.MaxInt64
	}
	return n
}
