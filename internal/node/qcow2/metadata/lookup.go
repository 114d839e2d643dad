// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// maxEmptyTables bounds how many absent L2 tables one Lookup looks at.
const maxEmptyTables = 4096

// Lookup translates from tables in memory alone: the longest run of one kind from off on, at most n bytes (n > 0, inside
// the disk). It is false where that takes a read, or where the entry is not sound: Map tells. Does not wait, and takes no
// memory.
func (m *Image) Lookup(off, n int64) (Extent, bool) {
	x, state := m.lookup(off, n)
	if state == found {
		m.l2.hits++
	}
	return x, state == found
}

type lookupState uint8

const (
	found   lookupState = iota
	absent              // the slice must be read
	unsound             // the first entry must not be used
)

func (m *Image) lookup(off, n int64) (Extent, lookupState) {
	x, state := m.lookupSlice(off, n)
	for state == found && x.Length < n && x.Kind != Compressed && (off+x.Length)&m.sliceMask() == 0 {
		more, s := m.lookupSlice(off+x.Length, n-x.Length)
		if s != found || !x.joins(&more) {
			break
		}
		x.Length += more.Length
	}
	return x, state
}

// sliceMask is the bytes that a slice describes, less one.
func (m *Image) sliceMask() int64 { return int64(1)<<(m.sliceBits+m.g.ClusterBits) - 1 }

// joins tells whether y goes on where x ends.
func (x *Extent) joins(y *Extent) bool {
	if x.Kind != y.Kind || x.InPlace != y.InPlace {
		return false
	}
	switch x.Kind {
	case Data, ZeroAllocated:
		return x.Host+x.Length == y.Host
	case Compressed:
		return false
	}
	return true
}

// lookupSlice is lookup within what one slice describes, or within L2 tables that do not exist.
func (m *Image) lookupSlice(off, n int64) (Extent, lookupState) {
	cluster := off >> m.g.ClusterBits
	p := m.l2.get(m.sliceKey(cluster))
	if p == nil || p.loading {
		return m.lookupAbsent(off, n, p)
	}
	p.used = true
	n = min(n, m.sliceMask()+1-off&m.sliceMask())
	return m.run(p.buf, off, n)
}

// lookupAbsent answers for L2 tables that do not exist.
func (m *Image) lookupAbsent(off, n int64, p *page) (Extent, lookupState) {
	i := int(off >> (m.g.L2Bits + m.g.ClusterBits))
	if p != nil || m.l1.entries[i].Offset() != 0 {
		return Extent{}, absent
	}
	length := m.g.L2Coverage() - off&(m.g.L2Coverage()-1)
	for k := 1; k < maxEmptyTables && length < n && i+k < len(m.l1.entries) && m.l1.entries[i+k].Offset() == 0; k++ {
		length += m.g.L2Coverage()
	}
	return Extent{Kind: Unallocated, Length: min(n, length)}, found
}

// run is the longest run of one kind in a slice from off on.
func (m *Image) run(buf []byte, off, n int64) (Extent, lookupState) {
	if m.g.Extended {
		return m.runExtended(buf, off, n)
	}
	cluster, in := off>>m.g.ClusterBits, off&(m.g.ClusterSize-1)
	i := m.sliceIndex(cluster)
	e := m.g.Entry(buf, i)
	kind := m.g.Kind(e)
	if kind == Compressed {
		return m.compressedExtent(e, n, in)
	}
	if kind == qcow2.Invalid || m.g.DataFile && m.misplaced(cluster, e) {
		return Extent{}, unsound
	}
	x := Extent{Kind: kind, Length: m.g.ClusterSize - in}
	var step uint64
	if kind == Data || kind == ZeroAllocated {
		x.Host = e.Offset() + in
		step = uint64(m.g.ClusterSize)
	}
	for w := e.Word + step; x.Length < n && m.g.Entry(buf, i+1).Word == w; w += step {
		x.Length += m.g.ClusterSize
		i++
	}
	x.Length = min(x.Length, n)
	x.InPlace = kind == Data && e.Copied() && m.mayOverwrite(cluster, x.Host, x.Length)
	return x, found
}

// runExtended is run where clusters have subclusters.
func (m *Image) runExtended(buf []byte, off, n int64) (Extent, lookupState) {
	cluster, in := off>>m.g.ClusterBits, off&(m.g.ClusterSize-1)
	i, sub := m.sliceIndex(cluster), m.g.Subcluster(off)
	unit := int64(1) << m.g.SubclusterBits
	e := m.g.Entry(buf, i)
	kind, count := m.g.SubclusterRun(e, sub)
	if kind == Compressed {
		return m.compressedExtent(e, n, in)
	}
	if kind == qcow2.Invalid || m.g.DataFile && m.misplaced(cluster, e) {
		return Extent{}, unsound
	}
	x := Extent{Kind: kind, Length: int64(count)*unit - in&(unit-1)}
	hosted := kind == Data || kind == ZeroAllocated
	if hosted {
		x.Host = e.Offset() + in
	}
	copied := e.Copied()
	for last := e; x.Length < n && (off+x.Length)&(m.g.ClusterSize-1) == 0; {
		i++
		e = m.g.Entry(buf, i)
		k, count := m.g.SubclusterRun(e, 0)
		if k != kind || hosted && (e.Offset() != last.Offset()+m.g.ClusterSize || e.Copied() != copied) {
			break
		}
		x.Length += int64(count) * unit
		last = e
	}
	x.Length = min(x.Length, n)
	x.InPlace = kind == Data && copied && m.mayOverwrite(cluster, x.Host, x.Length)
	return x, found
}

func (m *Image) compressedExtent(e qcow2.L2Entry, n, in int64) (Extent, lookupState) {
	host, size, ok := m.g.Compressed(e)
	if !ok {
		return Extent{}, unsound
	}
	return Extent{Kind: Compressed, Length: min(n, m.g.ClusterSize-in), Host: host, CompressedLen: size}, found
}

// misplaced tells whether an entry names another place in the external data file than its own.
func (m *Image) misplaced(cluster int64, e qcow2.L2Entry) bool {
	return m.g.HasHost(e) && e.Offset() != cluster<<m.g.ClusterBits
}

// mayOverwrite tells whether data whose entry says that nobody shares them may be overwritten: changes are allowed and
// prepared, the table is not shared either, and no table lies there.
func (m *Image) mayOverwrite(cluster, host, n int64) bool {
	if !m.ready || m.broken != nil || !m.l1.entries[m.l1Index(cluster)].Copied() {
		return false
	}
	first := host >> m.g.ClusterBits
	return m.g.DataFile || !m.claims.any(first, (host+n-1)>>m.g.ClusterBits-first+1)
}

// Map is Lookup that may wait. An entry that breaks the rules of the format is EIO, and marks a writable image corrupt.
func (m *Image) Map(off, n int64) (Extent, error) {
	for {
		x, state := m.lookup(off, n)
		switch state {
		case found:
			return x, nil
		case unsound:
			cluster := off >> m.g.ClusterBits
			p := m.l2.get(m.sliceKey(cluster))
			return Extent{}, m.badEntry(cluster, m.g.Entry(p.buf, m.sliceIndex(cluster)))
		}
		if _, err := m.slice(off >> m.g.ClusterBits); err != nil {
			return Extent{}, err
		}
	}
}
