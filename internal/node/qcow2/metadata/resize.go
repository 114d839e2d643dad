// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// Resize changes the size of the disk, in bytes, a multiple of 512. A smaller one (EINVAL without shrink) loses what lies
// behind. A larger one has nothing allocated there, so what it reads is zeros but for two places, where the caller calls
// Zero or writes zeros: the rest of the cluster that the old end lies in, and where a backing file is longer than the
// old disk.
func (m *Image) Resize(size int64, shrink bool) error {
	if size < 0 || size%512 != 0 {
		return fmt.Errorf("resize to %d bytes: not a multiple of 512: %w", size, syscall.EINVAL)
	}
	// Bitmaps go on: no guest has written anything.
	if err := m.enterAlone(false); err != nil {
		return err
	}
	defer m.leaveAlone()
	if err := m.resize(size, shrink); err != nil {
		return fmt.Errorf("resize to %d bytes: %w", size, err)
	}
	return nil
}

func (m *Image) resize(size int64, shrink bool) error {
	need := m.g.L1EntriesFor(size)
	switch {
	case size == m.h.Size:
		return nil
	case m.g.Version < 3 && len(m.snapshots) > 0:
		return fmt.Errorf("image is of version 2 and has snapshots: %w", syscall.EOPNOTSUPP)
	case size < m.h.Size && !shrink:
		return fmt.Errorf("disk is larger now, and what lies behind would be lost (--shrink allows it): %w", syscall.EINVAL)
	case need > qcow2.MaxL1Bytes/8:
		return fmt.Errorf("disk is too large for clusters of this size: %w", syscall.EFBIG)
	}
	if err := m.suspendBitmaps(size); err != nil {
		return err
	}
	// What lies behind the end, old or new, must not come to light in a disk that grows, now or later.
	if err := m.cut(min(size, m.h.Size)); err != nil {
		return err
	}
	var err error
	if need > int64(len(m.l1.entries)) {
		err = m.growL1(int(need), size)
	} else {
		err = m.setDurable(func(h *qcow2.Header) { h.Size = size })
	}
	if err != nil {
		return err
	}
	return m.resumeBitmaps()
}

// growL1 moves the L1 table to where it has room for n entries, and changes the size with that.
func (m *Image) growL1(n int, size int64) error {
	longer := make([]qcow2.L1Entry, n)
	copy(longer, m.l1.entries)
	off, err := m.place("the L1 table", encodeL1(longer))
	if err != nil {
		return err
	}
	if err = m.settle(); err == nil {
		err = m.setDurable(func(h *qcow2.Header) { h.L1Offset, h.L1Entries, h.Size = off, uint32(n), size })
	}
	if err != nil {
		m.displace(off, int64(n)*8)
		return err
	}
	m.displace(m.l1.offset, int64(len(m.l1.entries))*8)
	m.l1.entries, m.l1.offset = longer, off
	return m.settle()
}

// cut lets go of all clusters that lie whole behind size.
func (m *Image) cut(size int64) error {
	first := m.g.Clusters(size)
	tables := int(m.g.L1EntriesFor(size))
	if tables > 0 && first < int64(tables)<<m.g.L2Bits {
		if err := m.cutTable(first, int64(tables)<<m.g.L2Bits); err != nil {
			return err
		}
	}
	var gone []qcow2.L1Entry
	for i := tables; i < len(m.l1.entries); i++ {
		if e := m.l1.entries[i]; e.Offset() != 0 {
			gone = append(gone, e)
			m.l1.entries[i] = 0
			m.l1.dirty.add(i)
		}
	}
	if err := m.settle(); err != nil {
		// the L1 table in memory stays cut, and so will be the one on disk; the clusters are leaked
		return err
	}
	m.forgetTables()
	m.releaseTables(gone)
	if err := m.unshare(gone, -1); err != nil {
		return err
	}
	return m.settle()
}

// cutTable makes the clusters from first to the end of an L2 table unallocated.
func (m *Image) cutTable(first, end int64) error {
	if m.l1.entries[m.l1Index(first)].Offset() == 0 {
		return nil
	}
	for c := first; c < end; c = (c | (1<<m.sliceBits - 1)) + 1 {
		p, err := m.ownSlice(c)
		if err != nil {
			return err
		}
		for k := c; k <= c|(1<<m.sliceBits-1); k++ {
			i := m.sliceIndex(k)
			if e := m.g.Entry(p.buf, i); e != (qcow2.L2Entry{}) {
				m.l2.change(p)
				m.g.PutEntry(p.buf, i, qcow2.L2Entry{})
				m.letGoEntry(e)
			}
		}
	}
	return nil
}
