// SPDX-License-Identifier: Apache-2.0

package check

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// refcounts are the refcount structures of the image: the table whole, and one block at a time.
type refcounts struct {
	table []qcow2.RefcountTableEntry
	bad   map[int64]bool // blocks that cannot be read from where the table says
}

// countRefcounts counts the refcount table and the blocks. A block that is not alone in its cluster, or not where
// a block can be, cannot be repaired where it is.
func (c *checker) countRefcounts() error {
	c.refcounts = &refcounts{bad: make(map[int64]bool)}
	if c.h.RefcountTableClusters == 0 {
		return nil // compare will miss every block
	}
	n := int64(c.h.RefcountTableClusters) << c.g.ClusterBits
	c.use(c.h.RefcountTableOffset, n, 1)
	if err := c.readTable(min(n, max(0, c.size-c.h.RefcountTableOffset))); err != nil {
		return err
	}
	for i, e := range c.refcounts.table {
		if e != 0 {
			c.countBlock(int64(i), e)
		}
	}
	return nil
}

// readTable reads as much of the refcount table as lies in the file.
func (c *checker) readTable(n int64) error {
	b := make([]byte, n&^7)
	if err := c.s.Read(b, c.h.RefcountTableOffset); err != nil {
		return fmt.Errorf("read refcount table: %w", err)
	}
	c.refcounts.table = make([]qcow2.RefcountTableEntry, len(b)/8)
	for i := range c.refcounts.table {
		c.refcounts.table[i] = qcow2.RefcountTableEntry(binary.BigEndian.Uint64(b[i*8:]))
	}
	return nil
}

func (c *checker) countBlock(i int64, e qcow2.RefcountTableEntry) {
	off := e.Offset()
	if off < 0 || !c.g.Aligned(off) {
		c.refcounts.bad[i] = true
	}
	switch {
	case e.Reserved() != 0:
		c.corrupt(1, false, "ERROR refcount table entry %d has reserved bits set", i)
		c.rebuild = true
	case !c.g.Aligned(off):
		c.corrupt(1, false, "ERROR refcount block %d is not cluster aligned; refcount table entry corrupted", i)
		c.rebuild = true
	case off < 0 || off>>c.g.ClusterBits >= c.file:
		c.corrupt(1, false, "ERROR refcount block %d is outside image", i)
		c.rebuild = true
	default:
		c.use(off, c.g.ClusterSize, 1)
		n, all := c.references(off)
		if n != 1 {
			c.corrupt(1, false, "ERROR refcount block %d refcount=%d", i, n)
		}
		c.rebuild = c.rebuild || n != 1 || !all
	}
}

// readBlock reads refcount block i to b; what is not there, or not in the file, counts nothing.
func (c *checker) readBlock(i int64, b []byte) error {
	var off int64
	if i < int64(len(c.refcounts.table)) {
		off = c.refcounts.table[i].Offset()
	}
	if off <= 0 || off >= c.size {
		clear(b)
		return nil
	}
	return c.s.Read(b, off)
}

// blocks are the numbers of all refcount blocks that exist or should, in ascending order, as far as the file goes.
func (c *checker) blocks() []int64 {
	end := int64(0)
	if c.file > 0 {
		end = (c.file-1)>>c.g.RefcountBlockBits + 1
	}
	needed := c.want.blocks(c.g.ClusterSize)
	for i, e := range c.refcounts.table {
		if e != 0 && int64(i) < end {
			needed[int64(i)] = true
		}
	}
	return slices.Sorted(maps.Keys(needed))
}

// compare finds clusters whose refcount is not the number of their references, and repairs refcounts: first it looks at
// all of them, to know whether they can be repaired where they are. have is what the image counts afterwards.
func (c *checker) compare() error {
	c.file = max(c.file, c.want.highest()+1)
	work := c.blocks()
	c.total += int64(len(work))
	before := c.r
	last, err := c.compareAll(work, Nothing)
	if err != nil {
		return err
	}
	switch {
	case c.rebuild && c.fix&Errors != 0:
		return c.rebuildAll()
	case c.rebuild || c.fix == Nothing || c.r == before:
	default:
		c.r = before
		if last, err = c.compareAll(work, c.fix); err != nil {
			return err
		}
	}
	c.r.ImageEndOffset = (last + 1) << c.g.ClusterBits
	return nil
}

func (c *checker) compareAll(work []int64, fix Repair) (last int64, err error) {
	c.have = newCounts(&c.g)
	for _, i := range work {
		n, err := c.compareBlock(i, fix)
		if err != nil {
			return 0, err
		}
		last = max(last, n)
		c.step()
	}
	return last, nil
}

// compareBlock compares the clusters of one block, and tells the last that counts.
func (c *checker) compareBlock(i int64, fix Repair) (last int64, err error) {
	first := i << c.g.RefcountBlockBits
	n := min(c.g.RefcountBlockEntries(), c.file-first)
	if c.refcounts.bad[i] {
		return c.unreadable(first, n, "the block is at no possible place")
	}
	want, have := make([]byte, c.g.ClusterSize), c.buf
	c.want.block(i, want)
	if err := c.readBlock(i, have); err != nil {
		c.refcounts.bad[i] = true
		return c.unreadable(first, n, err.Error())
	}
	dirty := false
	if !bytes.Equal(want, have) {
		for j := range n {
			if c.compareCluster(first+j, int(j), want, have, fix) {
				dirty = true
			}
		}
	}
	for j := n - 1; j >= 0 && last == 0; j-- {
		if qcow2.Refcount(have, c.g.RefcountOrder, int(j)) != 0 || qcow2.Refcount(want, c.g.RefcountOrder, int(j)) != 0 {
			last = first + j
		}
	}
	c.have.setBlock(i, have)
	if !dirty {
		return last, nil
	}
	if err := c.s.Write(have, c.refcounts.table[i].Offset()); err != nil {
		return last, fmt.Errorf("repair refcount block %d: %w", i, err)
	}
	return last, nil
}

// unreadable counts an error for each cluster whose refcount cannot be known.
func (c *checker) unreadable(first, n int64, why string) (int64, error) {
	c.failed("Can't get refcount for clusters %d to %d: %s", first, first+n-1, why)
	c.r.CheckErrors += n - 1
	return 0, nil
}

// compareCluster compares one refcount, and tells whether it changed it in have.
func (c *checker) compareCluster(cluster int64, j int, want, have []byte, fix Repair) (changed bool) {
	ref, n := qcow2.Refcount(want, c.g.RefcountOrder, j), qcow2.Refcount(have, c.g.RefcountOrder, j)
	switch {
	case ref == n:
		return false
	case n > ref && fix&Leaks != 0:
		c.r.LeaksFixed++
		c.report(Leak, true, "Repairing cluster %d refcount=%d reference=%d", cluster, n, ref)
	case n > ref:
		c.r.Leaks++
		c.report(Leak, false, "Leaked cluster %d refcount=%d reference=%d", cluster, n, ref)
		return false
	case fix&Errors != 0:
		c.r.CorruptionsFixed++
		c.report(Corruption, true, "Repairing cluster %d refcount=%d reference=%d", cluster, n, ref)
	default:
		c.r.Corruptions++
		c.report(Corruption, false, "ERROR cluster %d refcount=%d reference=%d", cluster, n, ref)
		c.rebuild = c.rebuild || c.missing(cluster)
		return false
	}
	qcow2.SetRefcount(have, c.g.RefcountOrder, j, ref)
	return true
}

// missing tells that there is no block for the cluster's refcount.
func (c *checker) missing(cluster int64) bool {
	i := cluster >> c.g.RefcountBlockBits
	return i >= int64(len(c.refcounts.table)) || c.refcounts.table[i].Offset() == 0
}
