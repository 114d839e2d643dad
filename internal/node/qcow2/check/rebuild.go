// SPDX-License-Identifier: Apache-2.0

package check

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// rebuildAll writes new refcount structures behind everything else, and gives the old ones up. All references are
// counted anew without these; what is still wrong then was wrong elsewhere.
func (c *checker) rebuildAll() error {
	c.report(Corruption, true, "Rebuilding refcount structure")
	before, used := c.r, c.want.highest()+1 // the old structures are still in use
	c.r = Result{TotalClusters: before.TotalClusters}
	c.again = true
	err := c.countReferences()
	c.again = false
	if err != nil {
		return err
	}
	if c.r.CheckErrors != 0 {
		return fmt.Errorf("rebuild refcounts: not all tables can be read: %w", syscall.EIO)
	}
	if err := c.writeRefcounts(used); err != nil {
		return fmt.Errorf("rebuild refcounts: %w", err)
	}
	c.have, c.rebuild = c.want, false
	c.r.LeaksFixed = before.LeaksFixed + before.Leaks
	c.r.CorruptionsFixed = before.CorruptionsFixed + max(0, before.Corruptions-c.r.Corruptions)
	c.r.ImageEndOffset = (c.want.highest() + 1) << c.g.ClusterBits
	return nil
}

// writeRefcounts gives the table and blocks for want a place, writes them and makes the header name them. The place is
// behind the end of the file; where that cannot grow, on a block device, it is behind the clusters that are in use.
func (c *checker) writeRefcounts(used int64) error {
	start := max(c.file, used)
	blocks, table, err := c.newBlocks(start)
	if err == nil && c.s.Truncate((start+table+int64(len(blocks)))<<c.g.ClusterBits) != nil {
		start = used
		blocks, table, err = c.newBlocks(start)
	}
	if err != nil {
		return err
	}
	end := start + table + int64(len(blocks))
	for k := start; k < end; k++ {
		c.want.set(k, 1)
	}
	at := start + table
	entries := make([]byte, table<<c.g.ClusterBits)
	for n, i := range blocks {
		c.want.block(i, c.buf)
		off := (at + int64(n)) << c.g.ClusterBits
		if err := c.s.Write(c.buf, off); err != nil {
			return err
		}
		binary.BigEndian.PutUint64(entries[i*8:], uint64(off))
	}
	if err := c.s.Write(entries, start<<c.g.ClusterBits); err != nil {
		return err
	}
	if err := c.s.Flush(); err != nil {
		return err
	}
	c.h.RefcountTableOffset, c.h.RefcountTableClusters = start<<c.g.ClusterBits, uint32(table)
	if err := c.nameRefcounts(); err != nil {
		return err
	}
	c.file = max(c.file, end)
	c.refcounts = &refcounts{bad: make(map[int64]bool)} // the table is sound and not needed again
	return c.s.Flush()
}

// nameRefcounts makes the header name the table, and say how wide its counts are: one write of a few bytes, so that the
// old structures are valid or the new ones.
func (c *checker) nameRefcounts() error {
	const orderAt = 96
	b := make([]byte, orderAt+4-qcow2.OffsetRefcountTable)
	if err := c.s.Read(b, qcow2.OffsetRefcountTable); err != nil {
		return err
	}
	field := c.h.RefcountTableField()
	n := copy(b, field[:])
	if c.h.Version >= 3 {
		binary.BigEndian.PutUint32(b[orderAt-qcow2.OffsetRefcountTable:], c.h.RefcountOrder)
		n = len(b)
	}
	return c.s.Write(b[:n], qcow2.OffsetRefcountTable)
}

// newBlocks tells which refcount blocks there must be, and how many clusters of table, when they lie from cluster start
// on and count themselves.
func (c *checker) newBlocks(start int64) (blocks []int64, table int64, err error) {
	needed := c.want.blocks(c.g.ClusterSize)
	for {
		n := table + int64(len(needed))
		for i := start >> c.g.RefcountBlockBits; i <= (start+n)>>c.g.RefcountBlockBits; i++ {
			needed[i] = true
		}
		last := int64(0)
		for i := range needed {
			last = max(last, i)
		}
		per := c.g.RefcountTableEntries()
		table = (last + per) / per
		if table<<c.g.ClusterBits > qcow2.MaxRefcountTableBytes {
			return nil, 0, fmt.Errorf("refcount table would be too large: %w", syscall.EFBIG)
		}
		if table+int64(len(needed)) == n {
			return slices.Sorted(maps.Keys(needed)), table, nil
		}
	}
}
