// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// control runs fn in a routine of the image, on its home loop or, where it has none, on a loop of its own. When ctx ends
// first, fn goes on all the same. Must not be called on a loop.
func (n *Node) control(ctx context.Context, fn func() error) error {
	n.mu.Lock()
	defer n.mu.Unlock() // on the loop of its own nobody else may come between
	if n.closed {
		return fmt.Errorf("image %s is closed: %w", n.info.Name, syscall.EBADF)
	}
	h := n.home
	if h == nil {
		return n.alone(fn)
	}
	h.users++
	n.mu.Unlock()
	defer n.mu.Lock()
	done := make(chan error, 1)
	run := func() {
		err := fn()
		// Not in the routine, which the last user takes down; and before the answer, after which the image may be closed.
		h.loop.Post(func() { done <- errors.Join(err, n.release(h)) })
	}
	if err := h.loop.Call(ctx, func() error { h.begin(job{fn: run}); return nil }); err != nil {
		return err
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// alone runs fn in a routine on a loop of its own. The image is at home nowhere else, and does not come to be.
func (n *Node) alone(fn func() error) error {
	l, err := aio.NewLoop(&aio.LoopOptions{Name: "qcow2"}) // the best poller, since the engine may need it
	if err != nil {
		return err
	}
	ctx, end := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	err = n.onLoop(l, fn)
	end()
	if lerr := <-ended; err == nil && !errors.Is(lerr, context.Canceled) {
		err = lerr
	}
	return err
}

func (n *Node) onLoop(l *aio.Loop, fn func() error) error {
	ctx := context.Background()
	var h *home
	done := make(chan error, 1)
	err := l.Call(ctx, func() (err error) {
		if h, err = newHome(n, l); err != nil {
			return err
		}
		n.home = h
		h.begin(job{fn: func() { done <- fn() }})
		return nil
	})
	if err != nil {
		return err
	}
	err = <-done
	return errors.Join(err, l.Call(ctx, func() error {
		n.home = nil
		return h.close()
	}))
}

// mapBatch is how many extents are asked for at a time: the loop serves others in between.
const mapBatch = 512

// Map implements block.Mapper. What the image does not have is told as the nodes behind it tell it, one deeper.
func (n *Node) Map(ctx context.Context, off, length int64, each func(block.Extent) error) error {
	batch := make([]block.Extent, 0, mapBatch)
	for end := off + length; off < end; {
		batch = batch[:0]
		if err := context.Cause(ctx); err != nil {
			return err
		}
		// It is waited for in any case, since it fills the batch; it is short.
		err := n.control(context.WithoutCancel(ctx), func() (err error) {
			batch, err = n.extents(batch, off, end-off)
			return err
		})
		// What was found before a fault is told first; the next look begins where the fault is.
		if err != nil && len(batch) == 0 {
			return fmt.Errorf("map image %s at %d: %w", n.info.Name, off, err)
		}
		for _, e := range batch {
			off = e.Offset + e.Length
			if e.Present {
				err = each(e)
			} else {
				err = n.mapBehind(ctx, e, each)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// extents appends what the tables say of a range, up to the capacity of list. Must be called in a routine.
func (n *Node) extents(list []block.Extent, off, length int64) ([]block.Extent, error) {
	for length > 0 && len(list) < cap(list) {
		x, err := n.view.Map(off, length)
		if err != nil {
			return list, err
		}
		e := block.Extent{Offset: off, Length: x.Length, Host: -1, Present: true}
		switch x.Kind {
		case metadata.Data:
			e.Data, e.Host, e.File = true, x.Host, n.host.Node().Info().Name
		case metadata.Compressed:
			e.Data, e.Compressed, e.File = true, true, n.info.Name
		case metadata.ZeroAllocated:
			e.Zero, e.Host, e.File = true, x.Host, n.host.Node().Info().Name
		case metadata.Zero:
			e.Zero, e.File = true, n.info.Name
		default:
			e.Present = false
		}
		list = append(list, e)
		off, length = off+x.Length, length-x.Length
	}
	return list, nil
}

// mapBehind tells what stands behind a stretch that the image does not have.
func (n *Node) mapBehind(ctx context.Context, e block.Extent, each func(block.Extent) error) error {
	have := min(max(n.backingSize-e.Offset, 0), e.Length)
	if have > 0 {
		err := block.Map(ctx, n.backing.Node(), e.Offset, have, func(x block.Extent) error {
			x.Depth++
			return each(x)
		})
		if err != nil {
			return err
		}
	}
	if have == e.Length {
		return nil
	}
	return each(block.Extent{Offset: e.Offset + have, Length: e.Length - have, Zero: true, Host: -1})
}
