// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"encoding/binary"
	"fmt"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// l1Table is the active L1 table, whole in memory.
type l1Table struct {
	entries []qcow2.L1Entry
	offset  int64 // where it lies
	dirty   sectors
	// hidden are the entries that the file has never been told: what they point to is reached from nowhere yet, so that it
	// may be written before what it points to is durable.
	hidden map[int]bool
	making map[int]bool // tables being made or copied
}

// sectors is a set of pieces of a table of 8-byte entries, each of which the disk writes whole or not at all.
type sectors struct {
	is   []bool
	list []int
}

const sectorEntries = 64

func (s *sectors) add(entry int) {
	i := entry / sectorEntries
	for len(s.is) <= i {
		s.is = append(s.is, false)
	}
	if !s.is[i] {
		s.is[i] = true
		s.list = append(s.list, i)
	}
}

func (s *sectors) take() []int {
	list := s.list
	for _, i := range list {
		s.is[i] = false
	}
	s.list = nil
	return list
}

// readL1 reads the active table.
func (m *Image) readL1() error {
	entries, err := m.readL1At("the L1 table", m.h.L1Offset, int(m.h.L1Entries))
	m.l1 = l1Table{entries: entries, offset: m.h.L1Offset, hidden: make(map[int]bool), making: make(map[int]bool)}
	return err
}

// readL1At reads an L1 table whose size and place have been validated.
func (m *Image) readL1At(what string, off int64, n int) ([]qcow2.L1Entry, error) {
	if n > 0 && off >= m.fileEnd {
		return nil, &qcow2.CorruptError{Offset: off, What: what[len("the "):] + " lies beyond the end of the file"}
	}
	entries := make([]qcow2.L1Entry, n)
	err := m.readEntries(what, off, n, func(i int, e uint64) { entries[i] = qcow2.L1Entry(e) })
	return entries, err
}

// readEntries reads a table of n entries piece by piece, as far as the file goes, and hands each to set. What lies behind
// the end is zeros, for which no memory is touched.
func (m *Image) readEntries(what string, off int64, n int, set func(i int, e uint64)) error {
	const piece = 64 << 10
	buf := make([]byte, min(piece, n*8))
	for i := 0; i < n && off+int64(i)*8 < m.fileEnd; {
		b := buf[:min(len(buf), (n-i)*8)]
		if err := m.read(what, b, off+int64(i)*8); err != nil {
			return err
		}
		for ; len(b) > 0; i, b = i+1, b[8:] {
			if e := binary.BigEndian.Uint64(b); e != 0 {
				set(i, e)
			}
		}
	}
	return nil
}

func encodeL1(entries []qcow2.L1Entry) []byte {
	b := make([]byte, len(entries)*8)
	for i, e := range entries {
		binary.BigEndian.PutUint64(b[i*8:], uint64(e))
	}
	return b
}

// set changes an entry to a table that was just made.
func (t *l1Table) set(i int, e qcow2.L1Entry) {
	t.entries[i] = e
	t.dirty.add(i)
	t.hidden[i] = true
}

// table is where the L2 table of an L1 entry lies, 0 for none. A place that cannot be is damage.
func (m *Image) l2Table(e qcow2.L1Entry) (int64, error) {
	off := e.Offset()
	switch {
	case off == 0:
		return 0, nil
	case !m.g.Aligned(off):
		return 0, m.damage(off, "L2 table is not aligned to a cluster")
	case off >= m.fileEnd:
		return 0, m.damage(off, "L2 table lies beyond the end of the file")
	case m.claims.contested(off>>m.g.ClusterBits, 1):
		return 0, m.damage(off, "L2 table overlaps with another table")
	}
	return off, nil
}

// sliceKey is the slice that describes a guest cluster; sliceIndex the entry in it.
func (m *Image) sliceKey(cluster int64) int64 { return cluster >> m.sliceBits }
func (m *Image) sliceIndex(cluster int64) int { return int(cluster & (1<<m.sliceBits - 1)) }

// sliceOffset is where a slice lies in its table.
func (m *Image) sliceOffset(key int64) int64 {
	return key & (1<<(m.g.L2Bits-m.sliceBits) - 1) * m.sliceBytes
}

func (m *Image) l1Index(cluster int64) int { return int(cluster >> m.g.L2Bits) }

// slice is the slice that describes a guest cluster; nil where there is no table. It is good until the next suspension.
func (m *Image) slice(cluster int64) (*page, error) {
	key := m.sliceKey(cluster)
	for {
		if p := m.l2.get(key); p != nil {
			if !p.loading {
				m.l2.hits++
				p.used = true
				return p, nil
			}
			if err := m.wait(func() bool { return p.key != key || !p.loading }); err != nil {
				return nil, err
			}
			continue
		}
		off, err := m.l2Table(m.l1.entries[m.l1Index(cluster)])
		if off == 0 || err != nil {
			return nil, err
		}
		m.l2.misses++
		p := m.l2.take(key)
		if err := m.read("an L2 table", p.buf, off+m.sliceOffset(key)); err != nil {
			m.l2.drop(p)
			return nil, err
		}
		p.loading = false
		return p, nil
	}
}

// ownSlice is slice for changing it: the table is made where there is none, and copied where snapshots share it.
func (m *Image) ownSlice(cluster int64) (*page, error) {
	i := m.l1Index(cluster)
	for {
		if e := m.l1.entries[i]; e.Offset() == 0 || !e.Copied() {
			if err := m.ownTable(i); err != nil {
				return nil, err
			}
			continue
		}
		p, err := m.slice(cluster)
		if err != nil || p != nil && m.l1.entries[i].Copied() {
			return p, err
		}
	}
}

// ownTable gives entry i of the L1 table an L2 table that is its alone.
func (m *Image) ownTable(i int) error {
	if m.l1.making[i] {
		return m.wait(func() bool { return !m.l1.making[i] })
	}
	m.l1.making[i] = true
	err := m.makeTable(i)
	delete(m.l1.making, i)
	return err
}

// makeTable writes the new table whole before anything points to it, so that the space is there when a commit wants it. Where
// refcounts are lazy the image is marked before that: another request's commit may write the L1 entry as soon as it is set.
func (m *Image) makeTable(i int) error {
	if m.h.IsLazy() {
		if err := m.mark(); err != nil {
			return err
		}
	}
	old, err := m.l2Table(m.l1.entries[i])
	if err != nil {
		return err
	}
	c, err := m.allocateTable(1)
	if err != nil {
		return err
	}
	off := c << m.g.ClusterBits
	if err := m.copyCluster("an L2 table", off, old); err != nil {
		m.giveBack(c, 1)
		return err
	}
	m.claims.claim(c, 1)
	m.l1.set(i, qcow2.NewL1Entry(off, true))
	if old != 0 {
		m.claims.release(old>>m.g.ClusterBits, 1)
		m.letGo(old>>m.g.ClusterBits, 1)
	}
	return nil
}

// copyCluster fills a cluster with what lies at from, or with zeros when from is 0.
func (m *Image) copyCluster(what string, to, from int64) error {
	b := make([]byte, m.g.ClusterSize)
	if from != 0 {
		if err := m.read(what, b, from); err != nil {
			return err
		}
	}
	return m.write(what, b, to)
}

// forgetTables empties the cache of slices after the L1 table was replaced. Nothing is dirty and nobody else inside.
func (m *Image) forgetTables() { m.l2.reset() }

// badEntry tells what is wrong with an L2 entry of kind Invalid, or whose host cluster cannot be.
func (m *Image) badEntry(cluster int64, e qcow2.L2Entry) error {
	table := m.l1.entries[m.l1Index(cluster)].Offset()
	at := table + cluster&(1<<m.g.L2Bits-1)*int64(m.g.L2EntrySize)
	return m.damage(at, "%s", fmt.Sprintf("L2 entry of the guest offset %#x is not sound (%#x)", cluster<<m.g.ClusterBits, e.Word))
}
