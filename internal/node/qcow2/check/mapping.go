// SPDX-License-Identifier: Apache-2.0

package check

import (
	"encoding/binary"
	"fmt"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

func putUint64(b []byte, v uint64) { binary.BigEndian.PutUint64(b, v) }

// l1Chunk is how much of an L1 table is read at once.
const l1Chunk = 64 << 10

// l1Table is an L1 table and how many snapshots have it.
type l1Table struct {
	off     int64
	entries uint32
	active  bool
	times   uint64
}

// countL1s counts all L1 tables and what their entries name. Snapshots of a damaged image may all name the same table,
// or tables that overlap: each is read once, and all together may not be much longer than the file.
func (c *checker) countL1s() error {
	all := []l1Table{{c.h.L1Offset, c.h.L1Entries, true, 1}}
	seen := make(map[l1Table]int)
	for i := range c.snapshots {
		s := &c.snapshots[i]
		if !c.g.Aligned(s.L1Offset) {
			c.corrupt(1, false, "ERROR snapshot %s (%s) l1_offset=%#x: L1 table is not cluster aligned; snapshot table entry corrupted", s.ID, s.Name, uint64(s.L1Offset))
			continue
		}
		if s.L1Entries > qcow2.MaxL1Bytes/8 {
			c.corrupt(1, false, "ERROR snapshot %s (%s) l1_size=%#x: L1 table is too large; snapshot table entry corrupted", s.ID, s.Name, s.L1Entries)
			continue
		}
		t := l1Table{off: s.L1Offset, entries: s.L1Entries}
		if j, ok := seen[t]; ok {
			all[j].times++
			continue
		}
		seen[t] = len(all)
		t.times = 1
		all = append(all, t)
	}
	budget := 4*c.size + qcow2.MaxL1Bytes
	for _, t := range all {
		n := int64(t.entries) * 8
		if budget -= n; budget < 0 {
			c.failed("ERROR: L1 tables of snapshots are longer than the image; the rest is not looked at")
			return nil
		}
		c.use(t.off, n, t.times)
		if !c.inFile(t.off, n) {
			continue
		}
		if err := c.countL1(t, n); err != nil {
			return err
		}
	}
	c.total = c.done + 2*int64(len(c.tables)) // once more for the flags
	return nil
}

func (c *checker) countL1(t l1Table, n int64) error {
	buf := make([]byte, min(n, l1Chunk))
	for at := int64(0); at < n; at += int64(len(buf)) {
		buf = buf[:min(n-at, int64(len(buf)))]
		if err := c.s.Read(buf, t.off+at); err != nil {
			c.failed("ERROR: I/O error reading the L1 table at %#x: %v", t.off+at, err)
			return nil
		}
		for i := 0; i < len(buf); i += 8 {
			c.countL1Entry(qcow2.L1Entry(binary.BigEndian.Uint64(buf[i:])), t)
		}
	}
	return nil
}

func (c *checker) countL1Entry(e qcow2.L1Entry, t l1Table) {
	if e == 0 {
		return
	}
	if e.Reserved() != 0 {
		c.corrupt(t.times, false, "ERROR found L1 entry with reserved bits set: %x", uint64(e))
	}
	off := e.Offset()
	c.use(off, c.g.ClusterSize, t.times)
	if !c.g.Aligned(off) {
		c.corrupt(t.times, false, "ERROR l2_offset=%#x: Table is not cluster aligned; L1 entry corrupted", off)
	}
	if !c.inFile(off, c.g.ClusterSize) {
		return
	}
	l2 := c.byPlace[off]
	if l2 == nil {
		l2 = &table{off: off}
		c.byPlace[off] = l2
		c.tables = append(c.tables, l2)
	}
	l2.total += t.times
	if t.active {
		l2.active++
	}
}

// countL2 counts what the entries of a table refer to, as often as the table is referred to.
func (c *checker) countL2(t *table) error {
	if err := c.s.Read(c.buf, t.off); err != nil {
		c.failed("ERROR: I/O error reading the L2 table at %#x: %v", t.off, err)
		return nil
	}
	next := int64(0) // where the next cluster lies when it is not a fragment
	for i := range c.g.L2Entries() {
		e := c.g.Entry(c.buf, i)
		if e == (qcow2.L2Entry{}) {
			continue
		}
		if e.IsCompressed() {
			c.countCompressed(e, i, t)
			continue
		}
		if r := c.g.Reserved(e); r != 0 && !(c.g.Extended && r == 1) {
			c.corrupt(t.total, false, "ERROR found l2 entry with reserved bits set: %x", e.Word)
		}
		if !c.hasHost(e) {
			if c.g.Extended && e.Bitmap&qcow2.AllAllocated != 0 {
				c.corrupt(t.total, false, "ERROR: L2 entry %d: unallocated cluster with non-zero subcluster allocation bitmap", i)
			}
			continue
		}
		if c.isMisplaced(e, t) {
			continue
		}
		off := e.Offset()
		if t.active > 0 {
			c.r.AllocatedClusters += int64(t.active)
			if next != 0 && off != next {
				c.r.FragmentedClusters += int64(t.active)
			}
			next = off + c.g.ClusterSize
		}
		if !c.h.HasDataFile() {
			c.use(off, c.g.ClusterSize, t.total)
		}
	}
	return nil
}

func (c *checker) countCompressed(e qcow2.L2Entry, i int, t *table) {
	if c.h.HasDataFile() {
		c.corrupt(t.total, false, "ERROR compressed cluster %d with data file, entry=%#x", i, e.Word)
		return
	}
	if e.Copied() {
		c.corrupt(t.total, false, "ERROR: compressed cluster %d: copied flag must never be set for compressed clusters, entry=%#x", i, e.Word)
	}
	if e.Bitmap != 0 {
		c.corrupt(t.total, false, "ERROR compressed cluster %d with non-zero subcluster allocation bitmap, entry=%#x", i, e.Word)
		return
	}
	off, n, _ := c.g.Compressed(e)
	c.use(off, int64(n), t.total)
	c.r.AllocatedClusters += int64(t.active)
	c.r.CompressedClusters += int64(t.active)
	c.r.FragmentedClusters += int64(t.active) // by nature: neighbours share sectors, which are read again
}

// isMisplaced looks at the host offset and the bitmap of an allocated cluster. It tells whether a repair will take the
// offset away, so that it is not counted: a cluster without data needs no place.
func (c *checker) isMisplaced(e qcow2.L2Entry, t *table) (repair bool) {
	if uint32(e.Bitmap)&uint32(e.Bitmap>>32) != 0 {
		c.corrupt(t.total, false, "ERROR offset=%#x: Allocated cluster with corrupted subcluster allocation bitmap", e.Offset())
	}
	switch {
	case c.g.Aligned(e.Offset()):
		return false
	case c.hasData(e):
		c.corrupt(t.total, false, "ERROR offset=%x: Data cluster is not properly aligned; L2 entry corrupted.", e.Offset())
		return false
	}
	if c.fix&Errors == 0 {
		c.corrupt(t.total, false, "ERROR offset=%x: Preallocated cluster is not properly aligned; L2 entry corrupted.", e.Offset())
		return false
	}
	c.r.Corruptions += int64(t.total) // told when it has been repaired
	if n := len(c.misplaced); n == 0 || c.misplaced[n-1] != t {
		c.misplaced = append(c.misplaced, t)
	}
	return true
}

// hasHost tells whether a standard entry has a host cluster. One that reads as zeros has none at offset 0, not even in an
// external data file.
func (c *checker) hasHost(e qcow2.L2Entry) bool {
	if !c.g.Extended && e.Word&1 != 0 {
		return e.Offset() != 0
	}
	return c.g.HasHost(e)
}

func (c *checker) hasData(e qcow2.L2Entry) bool {
	if c.g.Extended {
		return e.Bitmap&qcow2.AllAllocated != 0
	}
	return e.Word&1 == 0
}

// repairEntries takes away the offsets that isMisplaced found. By now all references are known, and so whether the table
// is nothing else too.
func (c *checker) repairEntries() error {
	for _, t := range c.misplaced {
		if c.fix&Errors == 0 || !c.ownTable(t) {
			continue
		}
		if err := c.s.Read(c.buf, t.off); err != nil {
			return fmt.Errorf("read L2 table at %#x: %w", t.off, err)
		}
		for i := range c.g.L2Entries() {
			e := c.g.Entry(c.buf, i)
			if e.IsCompressed() || c.g.Aligned(e.Offset()) || c.hasData(e) {
				continue
			}
			zero := c.g.ZeroEntry(0, false)
			zero.Bitmap = e.Bitmap
			c.g.PutEntry(c.buf, i, zero)
			c.r.Corruptions -= int64(t.total)
			c.corrupt(t.total, true, "Repairing offset=%x: Preallocated cluster is not properly aligned; L2 entry corrupted.", e.Offset())
		}
		if err := c.s.Write(c.buf, t.off); err != nil {
			return fmt.Errorf("repair L2 table at %#x: %w", t.off, err)
		}
	}
	c.misplaced = nil
	return nil
}

// ownTable tells that nothing but L1 tables refers to the cluster of an L2 table, so that it may be written to.
func (c *checker) ownTable(t *table) bool {
	n, all := c.references(t.off)
	return c.g.Aligned(t.off) && all && n == t.total
}
