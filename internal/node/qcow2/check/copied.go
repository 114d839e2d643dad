// SPDX-License-Identifier: Apache-2.0

package check

import (
	"fmt"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// checkCopied looks at the COPIED flags of the active disk: one says that its cluster counts one. They are repaired by
// the refcounts, so only where these are right. A table whose own refcount cannot be read is passed over.
func (c *checker) checkCopied() error {
	fix := c.fix&Errors != 0 ||
		c.fix&Leaks != 0 && c.r.CheckErrors == 0 && c.r.Corruptions == 0 && c.r.Leaks == 0
	n := int64(c.h.L1Entries) * 8
	if !c.inFile(c.h.L1Offset, n) {
		return nil
	}
	seen := make(map[int64]bool)
	buf := make([]byte, min(n, l1Chunk))
	for at := int64(0); at < n; at += int64(len(buf)) {
		buf = buf[:min(n-at, int64(len(buf)))]
		if err := c.s.Read(buf, c.h.L1Offset+at); err != nil {
			c.failed("ERROR: I/O error reading the L1 table at %#x: %v", c.h.L1Offset+at, err)
			return nil
		}
		dirty, err := c.checkCopiedL1(buf, at/8, fix, seen)
		if err != nil {
			return err
		}
		if !dirty {
			continue
		}
		if err := c.s.Write(buf, c.h.L1Offset+at); err != nil {
			return fmt.Errorf("repair L1 table: %w", err)
		}
	}
	return nil
}

// ownL1 tells that the active L1 table shares its clusters with nothing, so that it may be written to.
func (c *checker) ownL1() bool {
	for k := c.h.L1Offset >> c.g.ClusterBits; k < c.g.Clusters(c.h.L1Offset+int64(c.h.L1Entries)*8); k++ {
		if n, all := c.references(k << c.g.ClusterBits); n != 1 || !all {
			return false
		}
	}
	return true
}

// checkCopiedL1 looks at a piece of the L1 table that begins with entry first, and at the L2 tables that it names.
func (c *checker) checkCopiedL1(buf []byte, first int64, fix bool, seen map[int64]bool) (dirty bool, err error) {
	plain := qcow2.NewGeometry(3, c.h.ClusterBits, 4, false, false)
	fixL1 := fix && c.ownL1()
	for i := range len(buf) / 8 {
		e := plain.Entry(buf, i)
		off := qcow2.L1Entry(e.Word).Offset()
		if off == 0 {
			continue
		}
		n, ok := c.refcount(off)
		if !ok {
			continue
		}
		if (n == 1) != e.Copied() {
			c.copied(1, fixL1, "OFLAG_COPIED L2 cluster: l1_index=%d l1_entry=%x refcount=%d", first+int64(i), e.Word, n)
			plain.PutEntry(buf, i, e.WithCopied(n == 1))
			dirty = dirty || fixL1
		}
		t := c.byPlace[off]
		if t == nil || seen[off] {
			continue
		}
		seen[off] = true
		if err := c.checkCopiedL2(t, fix); err != nil {
			return dirty, err
		}
		c.step()
	}
	return dirty, nil
}

// checkCopiedL2 looks at a table once, and counts what it finds for each entry of the active L1 table that names it.
func (c *checker) checkCopiedL2(t *table, fix bool) error {
	if err := c.s.Read(c.buf, t.off); err != nil {
		c.failed("ERROR: I/O error reading the L2 table at %#x: %v", t.off, err)
		return nil
	}
	fix = fix && c.ownTable(t)
	times := t.active
	if fix {
		times = 1
	}
	dirty := false
	for i := range c.g.L2Entries() {
		e := c.g.Entry(c.buf, i)
		if e.Word == 0 || e.IsCompressed() || !c.hasHost(e) {
			continue
		}
		n, ok := uint64(1), true
		if !c.h.HasDataFile() {
			n, ok = c.refcount(e.Offset())
		}
		if ok && (n == 1) != e.Copied() {
			c.copied(times, fix, "OFLAG_COPIED data cluster: l2_entry=%x refcount=%d", e.Word, n)
			c.g.PutEntry(c.buf, i, e.WithCopied(n == 1))
			dirty = fix
		}
	}
	if !dirty {
		return nil
	}
	if err := c.s.Write(c.buf, t.off); err != nil {
		return fmt.Errorf("repair L2 table at %#x: %w", t.off, err)
	}
	return nil
}

// copied counts a flag that is wrong.
func (c *checker) copied(times uint64, fix bool, text string, args ...any) {
	word := "ERROR "
	if fix {
		word = "Repairing "
	}
	c.corrupt(times, fix, word+text, args...)
}

// refcount is what the image counts for the cluster at off; false where that cannot be read.
func (c *checker) refcount(off int64) (uint64, bool) {
	k := off >> c.g.ClusterBits
	return c.have.get(k), !c.refcounts.bad[k>>c.g.RefcountBlockBits]
}
