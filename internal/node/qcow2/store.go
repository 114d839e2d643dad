// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/sys"
)

// store is the image file as the tables see it. Each call suspends the routine that runs, and with it this one request; see
// metadata.Store for what the calls mean.
type store struct{ n *Node }

// part cuts a range to what the node below has: a device ends, a file does not.
func (s store) part(off, n int64) int64 {
	return max(min(n, s.n.limit-off), 0)
}

// Read implements metadata.Store.
func (s store) Read(p []byte, off int64) error {
	have := s.part(off, int64(len(p)))
	clear(p[have:])
	if have == 0 {
		return nil
	}
	return s.io(block.OpRead, p[:have], off)
}

// Write implements metadata.Store.
func (s store) Write(p []byte, off int64) error {
	if s.part(off, int64(len(p))) < int64(len(p)) {
		return fmt.Errorf("write %d bytes at %d of %s: %w", len(p), off, s.n.info.Name, syscall.ENOSPC)
	}
	return s.io(block.OpWrite, p, off)
}

func (s store) io(op block.Op, p []byte, off int64) error {
	if len(p) == 0 {
		return nil
	}
	c := s.n.home.running
	c.one[0] = sys.IOVecOf(p)
	err := c.do(s.n.home.meta, op, 0, off, int64(len(p)), c.one[:])
	c.one[0] = block.IOVec{}
	return err
}

// Zero implements metadata.Store.
func (s store) Zero(off, n int64) error {
	if s.part(off, n) < n {
		return fmt.Errorf("write %d zeros at %d of %s: %w", n, off, s.n.info.Name, syscall.ENOSPC)
	}
	c := s.n.home.running
	if err := c.do(s.n.home.meta, block.OpWriteZeroes, block.FlagUnmap, off, n, nil); err != nil {
		return err
	}
	return s.grow(off + n)
}

// grow makes the file at least end bytes long, by a write at its end: a length that is set could take away what somebody
// writes at the same time.
func (s store) grow(end int64) error {
	length, err := s.Size()
	if err != nil || length >= end || s.n.limit != block.Unbounded {
		return err
	}
	step := min(end-length, max(512, int64(s.n.file.Node().Info().Align)), int64(len(s.n.zeros)))
	return s.io(block.OpWrite, s.n.zeros[:step], end-step)
}

// Discard implements metadata.Store. Where space cannot be given back it is kept.
func (s store) Discard(off, n int64) error {
	return discard(s.n.home.running, s.n.home.meta, off, s.part(off, n))
}

// Flush implements metadata.Store. It covers guest data too, wherever it lies.
func (s store) Flush() error {
	h := s.n.home
	h.clusters.forget() // compressed clusters that were let go before it may be written anew after it
	c := h.running
	h.count.FileFlushes++
	if h.host != h.meta {
		if err := c.do(h.host, block.OpFlush, 0, 0, 0, nil); err != nil {
			return err
		}
	}
	return c.do(h.meta, block.OpFlush, 0, 0, 0, nil)
}

// Size implements metadata.Store.
func (s store) Size() (int64, error) { return block.Length(s.n.file.Node()) }

// Truncate implements metadata.Store.
func (s store) Truncate(n int64) error { return block.Truncate(s.n.file.Node(), n) }

// dataStore is the external data file, of which the tables only want that ranges are discarded.
type dataStore struct{ store }

// Discard implements metadata.Store.
func (s dataStore) Discard(off, n int64) error {
	h := s.n.home
	return discard(h.running, h.host, off, max(min(n, s.n.host.Info().Size-off), 0))
}

func discard(c *routine, q *block.HandleQueue, off, n int64) error {
	if n == 0 {
		return nil
	}
	err := c.do(q, block.OpDiscard, 0, off, n, nil)
	if errors.Is(err, syscall.EOPNOTSUPP) {
		return nil
	}
	return err
}
