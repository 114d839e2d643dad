// SPDX-License-Identifier: Apache-2.0

package check

import (
	"encoding/binary"
	"fmt"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// readSnapshots reads the snapshot table. In version 3 its entries say how large their disks are; a repair writes those
// that do not anew, and cuts what is too long or too many.
func (c *checker) readSnapshots() error {
	err := c.h.ValidateSnapshots()
	if err == nil {
		c.snapshots, c.snapshotBytes, err = qcow2.ReadSnapshots(c.s.Read, c.h)
	}
	if err != nil {
		return c.salvageSnapshots(err)
	}
	if c.h.Version < 3 {
		return nil
	}
	incomplete := 0
	for i := range c.snapshots {
		if c.snapshots[i].ExtraSize < 16 {
			word, fix := c.word(Errors)
			c.corrupt(1, fix, "%s snapshot table entry %d is incomplete", word, i)
			incomplete++
		}
	}
	if incomplete == 0 || c.fix&Errors == 0 {
		return nil
	}
	return c.writeSnapshots()
}

// salvageSnapshots keeps what can be kept of a table that breaks the limits. Snapshots that are lost are leaks from then on.
func (c *checker) salvageSnapshots(why error) error {
	if c.fix&Errors == 0 {
		return fmt.Errorf("read snapshot table: %w", why)
	}
	all, cut, lost, err := qcow2.SalvageSnapshots(c.s.Read, c.h)
	if err != nil {
		return fmt.Errorf("read snapshot table: %w", err)
	}
	if cut > 0 {
		c.corrupt(uint64(cut), true, "Discarding excess extra data of %d snapshots", cut)
	}
	if lost > 0 {
		c.corrupt(uint64(lost), true, "Discarding %d overhanging snapshots", lost)
	}
	c.snapshots = all
	return c.writeSnapshots()
}

// writeSnapshots puts the table behind everything else: the old one is a leak from then on, and the refcounts of the
// new one are found wrong and repaired in the same run.
func (c *checker) writeSnapshots() error {
	table, err := qcow2.EncodeSnapshots(c.snapshots)
	if err != nil {
		return err
	}
	at := c.file << c.g.ClusterBits
	if err := c.append(table, at); err != nil {
		return fmt.Errorf("write snapshot table: %w", err)
	}
	if err := c.s.Flush(); err != nil {
		return fmt.Errorf("write snapshot table: %w", err)
	}
	c.h.Snapshots, c.h.SnapshotsOffset, c.snapshotBytes = uint32(len(c.snapshots)), at, int64(len(table))
	field := c.h.SnapshotsField()
	if err := c.s.Write(field[:], qcow2.OffsetSnapshots); err != nil {
		return fmt.Errorf("write header: %w", err)
	}
	return nil
}

// append writes b at the end of the file, which becomes whole clusters long.
func (c *checker) append(b []byte, at int64) error {
	end := at + c.g.Clusters(int64(len(b)))<<c.g.ClusterBits
	if err := c.s.Write(b, at); err != nil {
		return err
	}
	if err := c.s.Truncate(end); err != nil {
		return err
	}
	c.size, c.file = end, end>>c.g.ClusterBits
	return nil
}

// countBitmaps counts the bitmap directory, the tables it names and what these name. Bitmaps that are not consistent are
// there all the same, and take space.
func (c *checker) countBitmaps() error {
	e, ok, err := c.h.Bitmaps()
	if err != nil || !ok {
		return nil // Validate has looked at it
	}
	c.use(e.DirectoryOffset, e.DirectorySize, 1)
	all, err := qcow2.ReadBitmaps(c.s.Read, c.h)
	if err != nil {
		c.corrupt(1, false, "ERROR: bitmap directory: %v", err)
		return nil
	}
	for i := range all {
		if err := c.countBitmap(&all[i]); err != nil {
			return err
		}
	}
	return nil
}

func (c *checker) countBitmap(m *qcow2.Bitmap) error {
	n := int64(m.TableEntries) * 8
	c.use(m.TableOffset, n, 1)
	if !c.inFile(m.TableOffset, n) {
		return nil
	}
	buf := make([]byte, min(n, l1Chunk))
	for at := int64(0); at < n; at += int64(len(buf)) {
		buf = buf[:min(n-at, int64(len(buf)))]
		if err := c.s.Read(buf, m.TableOffset+at); err != nil {
			c.failed("ERROR: I/O error reading the table of bitmap %q: %v", m.Name, err)
			return nil
		}
		for i := 0; i < len(buf); i += 8 {
			c.countBitmapEntry(qcow2.BitmapEntry(binary.BigEndian.Uint64(buf[i:])), m)
		}
	}
	return nil
}

func (c *checker) countBitmapEntry(e qcow2.BitmapEntry, m *qcow2.Bitmap) {
	if e.Reserved() != 0 || !c.g.Aligned(e.Offset()) {
		c.corrupt(1, false, "ERROR: bitmap %q has an entry that is not sound: %#x", m.Name, uint64(e))
		return
	}
	if off := e.Offset(); off != 0 {
		c.use(off, c.g.ClusterSize, 1)
	}
}
