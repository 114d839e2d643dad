// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// refcounts counts how often each host cluster is used. A count in memory is never less than what the file, as it may be
// after a crash, has references: it goes up before a reference is written, and down after one is durably gone. So blocks may be
// written at any time, and whatever is 0 may be used at once.
type refcounts struct {
	blocks *cache // by number in the table
	table  []qcow2.RefcountTableEntry
	// tableOffset is where the table in memory lies; moved says that the header on disk names the place before.
	tableOffset int64
	tableDirty  sectors
	moved       bool
	growing     bool // a block or a table is being made

	free      int64 // no cluster before it is free
	highWater int64 // no cluster from it on has ever been written
	packed    int64 // where the next compressed cluster may begin, 0 for a new host cluster

	allocated, freed uint64
}

// readRefcountTable reads the table; blocks are read when they are needed.
func (m *Image) readRefcountTable() error {
	off, n := m.h.RefcountTableOffset, int64(m.h.RefcountTableClusters)<<m.g.ClusterBits
	m.highWater = m.g.Clusters(m.fileEnd)
	if m.readOnly {
		return nil
	}
	if off >= m.fileEnd {
		return &qcow2.CorruptError{Offset: off, What: "refcount table lies beyond the end of the file"}
	}
	m.tableOffset = off
	m.table = make([]qcow2.RefcountTableEntry, n/8)
	return m.readEntries("the refcount table", off, len(m.table), func(i int, e uint64) {
		m.table[i] = qcow2.RefcountTableEntry(e)
	})
}

func (m *Image) perBlock() int64             { return m.g.RefcountBlockEntries() }
func (m *Image) blockOf(cluster int64) int64 { return cluster >> m.g.RefcountBlockBits }
func (m *Image) indexOf(cluster int64) int   { return int(cluster & (m.perBlock() - 1)) }
func (m *Image) count(p *page, i int) uint64 { return qcow2.Refcount(p.buf, m.g.RefcountOrder, i) }
func (m *Image) setCount(p *page, i int, n uint64) {
	m.blocks.change(p)
	qcow2.SetRefcount(p.buf, m.g.RefcountOrder, i, n)
}

// block is refcount block b. Where there is none it is made, or nil without create. It is good until the next suspension.
func (m *Image) block(b int64, create bool) (*page, error) {
	for {
		if b < int64(len(m.table)) && m.table[b].Offset() != 0 {
			p, err := m.loadBlock(b)
			if p != nil || err != nil {
				return p, err
			}
			continue
		}
		if !create {
			return nil, nil
		}
		if err := m.makeBlock(b); err != nil {
			return nil, err
		}
	}
}

// loadBlock is nil without an error when it had to wait: look again.
func (m *Image) loadBlock(b int64) (*page, error) {
	if p := m.blocks.get(b); p != nil {
		if !p.loading {
			m.blocks.hits++
			p.used = true
			return p, nil
		}
		return nil, m.wait(func() bool { return p.key != b || !p.loading })
	}
	off := m.table[b].Offset()
	switch {
	case off < 0 || !m.g.Aligned(off):
		return nil, m.damage(off, "refcount block is not aligned to a cluster")
	case off >= m.fileEnd:
		return nil, m.damage(off, "refcount block lies beyond the end of the file")
	case m.claims.contested(off>>m.g.ClusterBits, 1):
		return nil, m.damage(off, "refcount block overlaps with another table")
	}
	m.blocks.misses++
	p := m.blocks.take(b)
	if err := m.read("a refcount block", p.buf, off); err != nil {
		m.blocks.drop(p)
		return nil, err
	}
	p.loading = false
	return p, nil
}

// makeBlock makes block b, in turn with others who want one.
func (m *Image) makeBlock(b int64) error {
	if m.growing {
		return m.wait(func() bool { return !m.growing })
	}
	m.growing = true
	var err error
	if b < int64(len(m.table)) {
		err = m.newBlock(b)
	} else {
		_, err = m.newArea(0, b+1)
	}
	m.growing = false
	return err
}

// newBlock puts the block into the first cluster that it counts, which is free, and writes it, so that the space is there
// when a commit wants it.
func (m *Image) newBlock(b int64) error {
	c := b << m.g.RefcountBlockBits
	if err := m.usable(c, 1); err != nil {
		return err
	}
	p := m.blocks.take(b)
	clear(p.buf)
	qcow2.SetRefcount(p.buf, m.g.RefcountOrder, 0, 1)
	if err := m.write("a refcount block", p.buf, c<<m.g.ClusterBits); err != nil {
		m.blocks.drop(p)
		return err
	}
	p.loading = false
	m.blocks.soil(p)
	m.setBlock(b, c)
	return nil
}

// setBlock enters a block that has been written into the table.
func (m *Image) setBlock(b, cluster int64) {
	m.table[b] = qcow2.RefcountTableEntry(cluster << m.g.ClusterBits)
	m.tableDirty.add(int(b))
	m.claims.claim(cluster, 1)
	m.allocated++
}

// usable refuses clusters that no entry could name, and those that are counted as free but hold a table.
func (m *Image) usable(c, n int64) error {
	if c+n > qcow2.MaxHostOffset>>m.g.ClusterBits {
		return fmt.Errorf("find room in the image: it would become too large: %w", syscall.EFBIG)
	}
	if m.claims.any(c, n) {
		return m.damage(c<<m.g.ClusterBits, "cluster is counted as free, but a table lies there")
	}
	return nil
}

// layout is how newArea divides what lies behind all that is counted.
type layout struct {
	firstBlock, blocks int64 // their numbers
	start              int64 // first cluster: the blocks, then the table, then what was asked for
	table              int64 // clusters of a new refcount table, 0 when the old one is long enough
	n                  int64
}

func (l *layout) total() int64 { return l.blocks + l.table + l.n }

// newArea takes n contiguous clusters behind all that is counted, with the blocks that count them and, where that needs a
// longer table (or entries of it are wanted), a new table, all in one piece: so nothing needs to be counted by what does
// not exist yet. It tells the first of the n. The caller has set growing.
func (m *Image) newArea(n, entries int64) (int64, error) {
	l, err := m.plan(n, entries)
	if err != nil {
		return 0, err
	}
	if err := m.usable(l.start, l.total()); err != nil {
		return 0, err
	}
	pages, err := m.writeBlocks(&l)
	if err == nil && l.table > 0 {
		err = m.writeTable(&l)
	}
	if err != nil {
		for _, p := range pages {
			m.blocks.drop(p)
		}
		return 0, err
	}
	if l.table > 0 {
		m.moveTable(&l)
	}
	for i, p := range pages {
		p.loading = false
		m.blocks.soil(p)
		m.setBlock(l.firstBlock+int64(i), l.start+int64(i))
	}
	m.highWater = max(m.highWater, l.start+l.total())
	m.allocated += uint64(l.table + l.n)
	return l.start + l.blocks + l.table, nil
}

func (m *Image) plan(n, entries int64) (layout, error) {
	l := layout{firstBlock: int64(len(m.table)), n: n}
	for l.firstBlock > 0 && m.table[l.firstBlock-1].Offset() == 0 {
		l.firstBlock--
	}
	l.start = l.firstBlock << m.g.RefcountBlockBits
	for {
		blocks := (l.total() + m.perBlock() - 1) >> m.g.RefcountBlockBits
		want := max(entries, l.firstBlock+blocks)
		table := int64(0)
		if have := int64(len(m.table)); want > have {
			limit := int64(qcow2.MaxRefcountTableBytes / 8)
			if want > limit {
				return l, fmt.Errorf("find room in the image: its refcount table would become too large: %w", syscall.EFBIG)
			}
			table = m.g.Clusters(min(limit, max(want, have+have/2)) * 8)
		}
		if blocks == l.blocks && table == l.table {
			return l, nil
		}
		l.blocks, l.table = max(blocks, l.blocks), max(table, l.table)
	}
}

// writeBlocks makes the blocks of an area. They are loading until the area is in use.
func (m *Image) writeBlocks(l *layout) (pages []*page, err error) {
	left := l.total()
	for i := range l.blocks {
		p := m.blocks.take(l.firstBlock + i)
		pages = append(pages, p)
		clear(p.buf)
		for k := range min(left, m.perBlock()) {
			qcow2.SetRefcount(p.buf, m.g.RefcountOrder, int(k), 1)
		}
		left -= m.perBlock()
		if err := m.write("a refcount block", p.buf, (l.start+i)<<m.g.ClusterBits); err != nil {
			return pages, err
		}
	}
	return pages, nil
}

// writeTable writes the longer table once, so that its space is there; a commit writes it again as it is then.
func (m *Image) writeTable(l *layout) error {
	b := make([]byte, l.table<<m.g.ClusterBits)
	return m.write("the refcount table", b, (l.start+l.blocks)<<m.g.ClusterBits)
}

// moveTable uses the longer table from now on. The old one is let go, and free when the header on disk has forgotten it.
func (m *Image) moveTable(l *layout) {
	old, n := m.tableOffset>>m.g.ClusterBits, m.g.Clusters(int64(len(m.table))*8)
	m.claims.release(old, n)
	m.letGo(old, n)
	longer := make([]qcow2.RefcountTableEntry, l.table<<m.g.ClusterBits/8)
	copy(longer, m.table)
	m.table = longer
	m.tableOffset = (l.start + l.blocks) << m.g.ClusterBits
	m.h.RefcountTableOffset, m.h.RefcountTableClusters = m.tableOffset, uint32(l.table)
	m.claims.claim(l.start+l.blocks, l.table)
	m.moved = true
}

// allocate takes up to n contiguous clusters, the first that are free, and tells how many it got.
func (m *Image) allocate(n int64) (start, got int64, err error) {
	for b := m.blockOf(m.free); ; b++ {
		p, err := m.block(b, true)
		if err != nil {
			return 0, 0, err
		}
		from := 0
		if free := m.blockOf(m.free); free == b {
			from = m.indexOf(m.free)
		} else if free > b {
			continue // others took all of it while it was read
		}
		i, k := m.freeRun(p, from, n, false)
		if k == 0 {
			if m.blockOf(m.free) == b {
				m.free = (b + 1) << m.g.RefcountBlockBits
			}
			continue
		}
		c := b<<m.g.RefcountBlockBits + int64(i)
		if err := m.usable(c, k); err != nil {
			return 0, 0, err
		}
		if m.blockOf(m.free) == b {
			m.free = c + k
		}
		m.use(p, i, c, k)
		return c, k, nil
	}
}

// freeRun finds free entries of a block: the first run from an index on, cut to n, or with whole the first that has n.
func (m *Image) freeRun(p *page, from int, n int64, whole bool) (i int, k int64) {
	end := int(m.perBlock())
	for i = from; i < end; i++ {
		if m.count(p, i) != 0 {
			continue
		}
		k = 1
		for k < n && i+int(k) < end && m.count(p, i+int(k)) == 0 {
			k++
		}
		if k == n || !whole {
			return i, k
		}
		i += int(k)
	}
	return 0, 0
}

// use counts k free clusters from entry i of a block on.
func (m *Image) use(p *page, i int, c, k int64) {
	for j := range int(k) {
		m.setCount(p, i+j, 1)
	}
	m.highWater = max(m.highWater, c+k)
	m.allocated += uint64(k)
}

// allocateTable takes n contiguous clusters for a table.
func (m *Image) allocateTable(n int64) (int64, error) {
	if n == 1 {
		c, _, err := m.allocate(1)
		return c, err
	}
	for b := m.blockOf(m.free); b < int64(len(m.table)) && n < m.perBlock(); b++ {
		p, err := m.block(b, false)
		if err != nil {
			return 0, err
		}
		if p == nil {
			break
		}
		if i, k := m.freeRun(p, 0, n, true); k == n {
			c := b<<m.g.RefcountBlockBits + int64(i)
			if err := m.usable(c, n); err != nil {
				return 0, err
			}
			m.use(p, i, c, n)
			return c, nil
		}
	}
	if err := m.wait(func() bool { return !m.growing }); err != nil {
		return 0, err
	}
	m.growing = true
	c, err := m.newArea(n, 0)
	m.growing = false
	return c, err
}

// addRef counts one more use of a cluster that is in use.
func (m *Image) addRef(c int64) error {
	p, err := m.block(m.blockOf(c), false)
	if err != nil {
		return err
	}
	i := m.indexOf(c)
	switch {
	case p == nil || m.count(p, i) == 0:
		return m.damage(c<<m.g.ClusterBits, "cluster is in use, but counted as free")
	case m.count(p, i) >= m.g.MaxRefcount():
		return errRefcountFull
	}
	m.setCount(p, i, m.count(p, i)+1)
	return nil
}

// errRefcountFull says that refcounts have too few bits for one more use of a cluster.
var errRefcountFull = fmt.Errorf("share a cluster once more: refcounts of this image have too few bits for that: %w", syscall.ERANGE)

// refcount of a cluster, 0 where nothing counts it.
func (m *Image) refcount(c int64) (uint64, error) {
	p, err := m.block(m.blockOf(c), false)
	if err != nil || p == nil {
		return 0, err
	}
	return m.count(p, m.indexOf(c)), nil
}
