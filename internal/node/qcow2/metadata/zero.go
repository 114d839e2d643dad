// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// ZeroUnit is the size of the pieces that Zero can change, in bytes: a cluster, or a subcluster. Does not wait.
func (m *Image) ZeroUnit() int64 { return int64(1) << m.g.SubclusterBits }

// Zero makes a prefix of [off, off+n) read as zeros, and says how many bytes that is. 0 means that the tables cannot say
// it: the caller writes zeros up to the end of the piece (ZeroUnit) that off lies in, or to off+n, as an ordinary write,
// and goes on behind. unmap lets the host clusters go; without, they stay allocated.
func (m *Image) Zero(off, n int64, unmap bool) (int64, error) {
	if err := m.enter(); err != nil {
		return 0, err
	}
	defer m.leave()
	x, err := m.Map(off, n)
	if err != nil {
		return 0, err
	}
	keep := !unmap || m.o.KeepOnDiscard
	if m.readsZero(x.Kind) && (keep || x.Kind != ZeroAllocated) {
		return x.Length, nil
	}
	unit := m.ZeroUnit()
	if m.g.Version < 3 && m.backing || m.h.IsDataFileRaw() || off&(unit-1) != 0 {
		return 0, nil
	}
	end := off + n
	if end != m.h.Size {
		end &^= unit - 1
	}
	if end <= off {
		return 0, nil
	}
	return m.zeroPart(off, end, keep)
}

// readsZero tells whether a kind reads as zeros without looking at a backing file.
func (m *Image) readsZero(k Kind) bool {
	return k == Zero || k == ZeroAllocated || k == Unallocated && !m.backing
}

// Discard lets go of the clusters that lie whole in [off, off+n). They read as zeros afterwards, or keep their data where
// the format cannot say so (version 2 with a backing file). The space is given back after the next Commit.
func (m *Image) Discard(off, n int64) error {
	if err := m.enter(); err != nil {
		return err
	}
	defer m.leave()
	v2 := m.g.Version < 3
	if v2 && (m.backing || m.o.KeepOnDiscard) || m.h.IsDataFileRaw() {
		return nil
	}
	end := off + n
	if end != m.h.Size {
		end &^= m.g.ClusterSize - 1
	}
	off = (off + m.g.ClusterSize - 1) &^ (m.g.ClusterSize - 1)
	for off < end {
		n, err := m.zeroPart(off, end, m.o.KeepOnDiscard)
		if err != nil {
			return err
		}
		off += n
	}
	return nil
}

// zeroPart does a first part of [off, end), which begins and ends at a piece's border or the disk's end.
func (m *Image) zeroPart(off, end int64, keep bool) (int64, error) {
	if x, state := m.lookupSlice(off, end-off); state == found && m.readsZero(x.Kind) && x.Kind != ZeroAllocated {
		return x.Length, nil
	}
	if err := m.prepare(); err != nil {
		return 0, err
	}
	if err := m.relieve(); err != nil {
		return 0, err
	}
	if m.h.IsLazy() {
		if err := m.mark(); err != nil {
			return 0, err
		}
	}
	first := off >> m.g.ClusterBits
	for {
		p, err := m.ownSlice(first)
		if err != nil {
			return 0, err
		}
		last := min((end-1)>>m.g.ClusterBits, first|(1<<m.sliceBits-1))
		at, held := m.heldFrom(first, last)
		if held && at == first {
			if err := m.awaitCluster(first); err != nil {
				return 0, err
			}
			continue
		}
		if held {
			last = at - 1
		}
		end = min(end, (last+1)<<m.g.ClusterBits)
		if m.g.DataFile && !keep {
			return m.zeroDataFile(p, off, end)
		}
		return m.zeroClusters(p, off, end, keep)
	}
}

// zeroDataFile is zeroClusters where guest data lie in an external file, and gives their space back there: at once, since
// each cluster has its place and nobody else will get it, but when nothing durable leads there any more. Nobody writes to
// the clusters meanwhile.
func (m *Image) zeroDataFile(p *page, off, end int64) (int64, error) {
	a := Allocation{first: off >> m.g.ClusterBits, last: (end - 1) >> m.g.ClusterBits, slice: p}
	stored := false
	for c := a.first; c <= a.last; c++ {
		k := m.g.Kind(m.g.Entry(p.buf, m.sliceIndex(c)))
		stored = stored || k == Data || k == qcow2.Mixed
	}
	p.pins++
	m.list(&a)
	defer m.end(&a)
	n, err := m.zeroClusters(p, off, end, false)
	if err == nil && n > 0 && stored && !m.o.NoDiscard && m.commit() == nil {
		_ = m.o.Data.Discard(off, n) // a file that cannot give space back keeps it
	}
	return n, err
}

// zeroClusters changes the entries of a slice. Nobody holds the clusters.
func (m *Image) zeroClusters(p *page, off, end int64, keep bool) (int64, error) {
	at := off
	for at < end {
		cluster := at >> m.g.ClusterBits
		stop := min(end, (cluster+1)<<m.g.ClusterBits)
		i := m.sliceIndex(cluster)
		old := m.g.Entry(p.buf, i)
		if err := m.checkEntry(cluster, old); err != nil {
			return 0, err
		}
		e, ok := m.zeroed(old, cluster, at, stop, keep)
		if !ok {
			break
		}
		if e != old {
			m.l2.change(p)
			m.g.PutEntry(p.buf, i, e)
			if !m.sameHost(e, old) {
				m.letGoEntry(old)
			}
		}
		at = stop
	}
	return at - off, nil
}

func (m *Image) sameHost(e, old qcow2.L2Entry) bool {
	return !old.IsCompressed() && e.Offset() == old.Offset()
}

// zeroed is what an entry becomes when its cluster is to read as zeros from at to stop; false when no entry can say so.
// Otherwise than a host cluster that is shared, one that is ours stays when it is to be kept.
func (m *Image) zeroed(old qcow2.L2Entry, cluster, at, stop int64, keep bool) (qcow2.L2Entry, bool) {
	kind := m.g.Kind(old)
	base := cluster << m.g.ClusterBits
	whole := at == base && (stop == base+m.g.ClusterSize || stop == m.h.Size)
	if kind == Zero || kind == Unallocated && !m.backing {
		return old, true
	}
	if m.g.Extended && !whole {
		return m.zeroedSubclusters(old, at-base, stop-base, keep)
	}
	if m.g.Version < 3 {
		return qcow2.L2Entry{}, true // there is no backing file
	}
	if m.g.DataFile {
		return m.g.ZeroEntry(base, m.g.HasHost(old)), true
	}
	if keep && !old.IsCompressed() && old.Offset() != 0 && old.Copied() {
		return m.g.ZeroEntry(old.Offset(), true), true
	}
	return m.g.ZeroEntry(0, false), true
}

// zeroedSubclusters is zeroed for a part of a cluster that has subclusters.
func (m *Image) zeroedSubclusters(old qcow2.L2Entry, from, to int64, keep bool) (qcow2.L2Entry, bool) {
	if old.IsCompressed() {
		return old, false
	}
	first := int(from >> m.g.SubclusterBits)
	last := int((to - 1) >> m.g.SubclusterBits)
	mask := qcow2.SubclusterMask(first, last-first+1)
	e := old
	e.Bitmap = old.Bitmap&^mask | mask<<32
	if !keep && uint32(e.Bitmap) == 0 && !m.g.DataFile {
		e.Word = 0 // nothing is left in the host cluster
	}
	return e, true
}
