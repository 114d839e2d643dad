// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// commits brings changes to disk. One commit runs at a time; who comes meanwhile shares the next.
type commits struct {
	running bool
	next    *round // gathers those who share the commit that has not begun
	done    uint64
	flushes uint64

	flushFailed bool
}

type round struct {
	done bool
	err  error
}

// Commit makes durable all that was linked, zeroed and discarded, and every write to the store that ended, before it was
// called. Calls that come while one runs share the next.
func (m *Image) Commit() error {
	if m.readOnly {
		return nil
	}
	if err := m.enter(); err != nil {
		return err
	}
	defer m.leave()
	return m.commit()
}

func (m *Image) commit() error {
	if m.next == nil {
		m.next = &round{}
	}
	r := m.next
	for !r.done {
		if m.running {
			if err := m.wait(func() bool { return r.done || !m.running }); err != nil {
				return err
			}
			continue
		}
		m.next, m.running = nil, true
		r.err = m.commitOnce(!m.h.IsLazy() || m.blocks.crowded())
		r.done, m.running = true, false
		m.done++
		m.reap()
	}
	return r.err
}

// relieve makes room in the caches where too much waits for a commit, and frees clusters where many could be reused.
func (m *Image) relieve() error {
	switch limit := m.maxPending(); {
	case m.l2.crowded() && !m.cachesAll(), m.blocks.crowded(), m.unlinkedClusters >= limit:
		return m.commit()
	case m.pending >= limit:
		m.reap()
	}
	return nil
}

// cachesAll tells whether the cache has room for the L2 tables of the whole disk: no change has to leave it before the
// guest asks for a flush.
func (m *Image) cachesAll() bool {
	return int64(m.l2.limit)<<(m.sliceBits+m.g.ClusterBits) >= m.h.Size
}

// maxPending is how many clusters may wait to be freed: a part of the disk, so that the file of an image that is trimmed and
// written without a flush stays near the size of the disk.
func (m *Image) maxPending() int64 {
	return max(16, min(m.h.Size/32, 64<<20)>>m.g.ClusterBits)
}

// settle commits until nothing is left to write or to free.
func (m *Image) settle() error {
	for range 4 {
		m.running = true
		err := m.commitOnce(true)
		m.running = false
		m.done++
		if err != nil {
			return err
		}
		m.reap()
		if m.broken != nil {
			return m.broken
		}
		if m.blocks.dirty == 0 && m.l2.dirty == 0 && len(m.unlinked)+len(m.committed)+len(m.waiting) == 0 {
			return nil
		}
	}
	return nil
}

// frozen is what one commit writes: everything as it was when it began. Others change the tables meanwhile.
type frozen struct {
	blocks  []*page
	table   []piece
	moved   bool // the table is whole and lies at a new place, which the header is to name
	offset  int64
	size    uint32
	hidden  []*page // slices of L2 tables that nothing on disk names
	slices  []*page // those of all others
	l1      []piece
	exposed []int // entries of the L1 table that are told to the disk
	l1Sect  []int
	tabSect []int
	gone    []run

	goneClusters int64
}

// piece is bytes and where they go.
type piece struct {
	b   []byte
	off int64
}

// commitOnce writes what is to be written, in the order of docs/QCOW2.md. counts says whether refcounts are among it.
func (m *Image) commitOnce(counts bool) error {
	if err := m.rewriteHidden(); err != nil {
		return fmt.Errorf("commit the tables: %w", err)
	}
	f := m.freeze(counts)
	err := m.writeOut(f)
	m.thaw(f, err == nil)
	if err != nil {
		return fmt.Errorf("commit the tables: %w", err)
	}
	return nil
}

// rewriteHidden makes the next commit write whole the L2 tables that nothing on disk names yet, when a flush has failed: the file
// may have forgotten what was written to them before, although it said nothing then and says nothing later.
func (m *Image) rewriteHidden() error {
	if !m.flushFailed {
		return nil
	}
	m.flushFailed = false
	for i := range m.l1.hidden {
		first := int64(i) << m.g.L2Bits
		for c := first; c < first+1<<m.g.L2Bits; c += 1 << m.sliceBits {
			p, err := m.slice(c)
			if err != nil {
				m.flushFailed = true
				return err
			}
			if p != nil && p.frozen == nil {
				m.l2.soil(p)
			}
		}
	}
	return nil
}

func (m *Image) freeze(counts bool) *frozen {
	f := &frozen{gone: m.unlinked, goneClusters: m.unlinkedClusters}
	m.unlinked, m.unlinkedClusters = nil, 0
	m.closePack()
	if counts {
		m.freezeRefcounts(f)
	}
	m.l2.freeze(func(p *page) {
		if m.l1.hidden[m.l1Index(p.key<<m.sliceBits)] {
			f.hidden = append(f.hidden, p)
		} else {
			f.slices = append(f.slices, p)
		}
	})
	m.freezeL1(f)
	sortPages(f.blocks)
	sortPages(f.hidden)
	sortPages(f.slices)
	return f
}

func sortPages(pages []*page) {
	slices.SortFunc(pages, func(a, b *page) int { return int(min(max(a.key-b.key, -1), 1)) })
}

// closePack makes the next compressed cluster begin in a sector of its own, so that writing it cannot hurt what is durable.
func (m *Image) closePack() {
	m.packed = (m.packed + 511) &^ 511
	if m.g.Aligned(m.packed) {
		m.packed = 0
	}
}

func (m *Image) freezeRefcounts(f *frozen) {
	m.blocks.freeze(func(p *page) { f.blocks = append(f.blocks, p) })
	f.moved, f.offset, f.size = m.moved, m.h.RefcountTableOffset, m.h.RefcountTableClusters
	f.tabSect = m.tableDirty.take()
	if m.moved {
		f.table = []piece{{encodeTable(m.table), m.tableOffset}}
		return
	}
	for _, i := range f.tabSect {
		from := i * sectorEntries
		to := min(from+sectorEntries, len(m.table))
		f.table = append(f.table, piece{encodeTable(m.table[from:to]), m.tableOffset + int64(from)*8})
	}
}

func encodeTable(entries []qcow2.RefcountTableEntry) []byte {
	b := make([]byte, len(entries)*8)
	for i, e := range entries {
		binary.BigEndian.PutUint64(b[i*8:], uint64(e))
	}
	return b
}

func (m *Image) freezeL1(f *frozen) {
	f.l1Sect = m.l1.dirty.take()
	for _, i := range f.l1Sect {
		from := i * sectorEntries
		to := min(from+sectorEntries, len(m.l1.entries))
		f.l1 = append(f.l1, piece{encodeL1(m.l1.entries[from:to]), m.l1.offset + int64(from)*8})
		for k := from; k < to; k++ {
			if m.l1.hidden[k] {
				f.exposed = append(f.exposed, k)
			}
		}
	}
}

// writeOut is the order of writes.
func (m *Image) writeOut(f *frozen) error {
	// First what nothing on disk leads to, and counts, which are right before and after.
	err := m.writeBlocksOf(f)
	if err == nil && f.moved {
		err = m.writePieces("the refcount table", f.table)
	}
	if err == nil {
		err = m.writeSlices(f.hidden)
	}
	if err == nil && m.o.Data != nil {
		err = m.o.Data.Flush()
	}
	if err == nil {
		err = m.flush() // guest data too
	}
	if err == nil {
		err = m.restore()
	}
	// Then the way to new counts.
	if err == nil && len(f.table) > 0 {
		if f.moved {
			err = m.on.change(m, func(h *qcow2.Header) { h.RefcountTableOffset, h.RefcountTableClusters = f.offset, f.size })
		} else {
			err = m.writePieces("the refcount table", f.table)
		}
		if err == nil {
			err = m.flush()
		}
	}
	// Then what leads to the data.
	if err == nil && len(f.slices)+len(f.l1) > 0 {
		if err = m.writeSlices(f.slices); err == nil {
			for _, i := range f.exposed {
				delete(m.l1.hidden, i) // from here on the disk may know it, also after an error
			}
			err = m.writePieces("the L1 table", f.l1)
		}
		if err == nil {
			err = m.flush()
		}
	}
	return err
}

func (m *Image) writeBlocksOf(f *frozen) error {
	for _, p := range f.blocks {
		if err := m.write("a refcount block", p.frozen, m.table[p.key].Offset()); err != nil {
			return err
		}
	}
	return nil
}

func (m *Image) writeSlices(pages []*page) error {
	for _, p := range pages {
		table := m.l1.entries[m.l1Index(p.key<<m.sliceBits)].Offset()
		if err := m.write("an L2 table", p.frozen, table+m.sliceOffset(p.key)); err != nil {
			return err
		}
	}
	return nil
}

func (m *Image) writePieces(what string, pieces []piece) error {
	for _, p := range pieces {
		if err := m.write(what, p.b, p.off); err != nil {
			return err
		}
	}
	return nil
}

// thaw ends a commit. What a commit that failed ought to have written is to be written by the next, from the beginning: the disk
// may have any part of it.
func (m *Image) thaw(f *frozen, durable bool) {
	for _, p := range f.blocks {
		m.blocks.thaw(p, durable)
	}
	for _, list := range [][]*page{f.hidden, f.slices} {
		for _, p := range list {
			m.l2.thaw(p, durable)
		}
	}
	if durable {
		m.moved = m.moved && m.h.RefcountTableOffset != f.offset
		for _, r := range f.gone {
			m.committed = appendRun(m.committed, r)
		}
		return
	}
	for _, i := range f.tabSect {
		m.tableDirty.add(i * sectorEntries)
	}
	for _, i := range f.l1Sect {
		m.l1.dirty.add(i * sectorEntries)
	}
	m.unlinked = append(f.gone, m.unlinked...)
	m.unlinkedClusters += f.goneClusters
}
