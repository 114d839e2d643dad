// SPDX-License-Identifier: Apache-2.0

package create

import (
	"encoding/binary"
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// chunk is how much is written at once, in bytes: the buffer that everything goes through.
const chunk = 1 << 20

// image is an image that is being laid out and written. All places are host offsets, all counts clusters.
type image struct {
	s   Store
	o   *Options
	h   *qcow2.Header
	g   qcow2.Geometry
	buf []byte // one cluster or chunk, the larger

	table, blocks   int64 // refcount table and blocks
	l1, l2          int64 // clusters of the L1 table, L2 tables
	data            int64 // guest clusters that get a host cluster in this file
	tableAt, blkAt  int64
	l1At, l2At      int64
	dataAt, fileEnd int64
}

// Create writes an image to s, whatever was there before, and gives its header. On an error the file holds no image.
// It uses up to 2 MiB of memory whatever the size of the disk.
func Create(s Store, o *Options) (*qcow2.Header, error) {
	h, err := o.Header()
	if err != nil {
		return nil, err
	}
	m := &image{s: s, o: o, h: h, g: h.Geometry()}
	if err := m.layOut(); err != nil {
		return nil, err
	}
	header, err := h.Encode() // before anything is touched
	if err != nil {
		return nil, err
	}
	m.buf = make([]byte, max(chunk, m.g.ClusterSize))
	for _, step := range []func() error{m.begin, m.writeRefcounts, m.writeL1, m.writeL2, m.fill, s.Flush} {
		if err := step(); err != nil {
			return nil, fmt.Errorf("create image: %w", err)
		}
	}
	if err := s.Write(header, 0); err != nil {
		return nil, fmt.Errorf("create image: write header: %w", err)
	}
	if err := s.Flush(); err != nil {
		return nil, fmt.Errorf("create image: %w", err)
	}
	return h, nil
}

// layOut gives everything its place: header, refcount table, refcount blocks, L1, L2 tables, data. The refcount
// structures count all of it, themselves too.
func (m *image) layOut() error {
	g, h := &m.g, m.h
	if h.Size > g.MaxSize() {
		return fmt.Errorf("disk of %d bytes is too large for clusters of %d bytes (a larger cluster size helps): %w", h.Size, g.ClusterSize, syscall.EFBIG)
	}
	entries := max(1, g.L1EntriesFor(h.Size))
	m.l1 = g.Clusters(entries * 8)
	if m.o.prealloc() != Off {
		m.l2 = g.L1EntriesFor(h.Size)
		if !g.DataFile {
			m.data = g.Clusters(h.Size)
		}
	}
	m.table, m.blocks = g.RefcountClusters(1 + m.l1 + m.l2 + m.data)
	at := int64(0)
	place := func(clusters int64) int64 {
		p := at
		at += clusters << g.ClusterBits
		return p
	}
	place(1)
	m.tableAt, m.blkAt = place(m.table), place(m.blocks)
	m.l1At, m.l2At, m.dataAt = place(m.l1), place(m.l2), place(m.data)
	m.fileEnd = at
	h.L1Entries, h.L1Offset = uint32(entries), m.l1At
	h.RefcountTableOffset, h.RefcountTableClusters = m.tableAt, uint32(m.table)
	return h.Validate()
}

// begin makes the file empty and as long as it will be; what is not written of the tables reads as zeros, on a device too.
func (m *image) begin() error {
	if err := m.s.Truncate(0); err != nil {
		return err
	}
	if err := m.s.Truncate(m.fileEnd); err != nil {
		return err
	}
	return m.s.Zero(0, m.dataAt)
}

// writeRefcounts writes the table, and blocks that count one for each cluster of the file and zero beyond.
func (m *image) writeRefcounts() error {
	err := m.writeEntries(m.tableAt, m.blocks, func(i int64) uint64 { return uint64(m.blkAt + i<<m.g.ClusterBits) })
	if err != nil {
		return fmt.Errorf("write refcount table: %w", err)
	}
	left := m.fileEnd >> m.g.ClusterBits
	block := m.buf[:m.g.ClusterSize]
	for i := range m.blocks {
		n := min(left, m.g.RefcountBlockEntries())
		if i == 0 || n < m.g.RefcountBlockEntries() {
			clear(block)
			for j := range n {
				qcow2.SetRefcount(block, m.g.RefcountOrder, int(j), 1)
			}
		}
		if err := m.s.Write(block, m.blkAt+i<<m.g.ClusterBits); err != nil {
			return fmt.Errorf("write refcount block: %w", err)
		}
		left -= n
	}
	return nil
}

func (m *image) writeL1() error {
	err := m.writeEntries(m.l1At, m.l2, func(i int64) uint64 {
		return uint64(qcow2.NewL1Entry(m.l2At+i<<m.g.ClusterBits, true))
	})
	if err != nil {
		return fmt.Errorf("write L1 table: %w", err)
	}
	return nil
}

// writeEntries writes n table entries of 8 bytes each.
func (m *image) writeEntries(at, n int64, entry func(i int64) uint64) error {
	for i := int64(0); i < n; {
		b := m.buf[:min((n-i)*8, chunk)]
		for j := 0; j < len(b); j += 8 {
			binary.BigEndian.PutUint64(b[j:], entry(i))
			i++
		}
		if err := m.s.Write(b, at); err != nil {
			return err
		}
		at += int64(len(b))
	}
	return nil
}

// writeL2 maps guest cluster i to data cluster i; in an external file it lies where the guest sees it.
func (m *image) writeL2() error {
	clusters := m.g.Clusters(m.h.Size)
	table := m.buf[:m.g.ClusterSize]
	for t := range m.l2 {
		clear(table)
		first := t << m.g.L2Bits
		for i := range min(clusters-first, int64(m.g.L2Entries())) {
			host := m.dataAt + (first+i)<<m.g.ClusterBits
			if m.g.DataFile {
				host = (first + i) << m.g.ClusterBits
			}
			m.g.PutEntry(table, int(i), m.entry(host))
		}
		if err := m.s.Write(table, m.l2At+t<<m.g.ClusterBits); err != nil {
			return fmt.Errorf("write L2 table: %w", err)
		}
	}
	return nil
}

// entry is an L2 entry of a preallocated cluster. With subclusters the cluster is there and none of its subclusters is
// in use, so that the backing file shows through; a raw data file has no such middle state.
func (m *image) entry(host int64) qcow2.L2Entry {
	e := m.g.DataEntry(host, true)
	if m.g.Extended && !m.o.DataFileRaw {
		e.Bitmap = 0
	}
	return e
}

// fill makes the data what the preallocation promises.
func (m *image) fill() error {
	if m.g.DataFile {
		if m.o.Data == nil {
			return nil
		}
		if err := m.o.Data.Truncate(0); err != nil {
			return fmt.Errorf("empty data file: %w", err)
		}
		if err := m.o.Data.Truncate(m.h.Size); err != nil {
			return fmt.Errorf("grow data file: %w", err)
		}
		if err := m.preallocate(m.o.Data, 0, m.h.Size); err != nil {
			return fmt.Errorf("preallocate data file: %w", err)
		}
		return m.o.Data.Flush()
	}
	if err := m.preallocate(m.s, m.dataAt, m.data<<m.g.ClusterBits); err != nil {
		return fmt.Errorf("preallocate: %w", err)
	}
	return nil
}

func (m *image) preallocate(s Store, at, n int64) error {
	if n == 0 {
		return nil
	}
	switch m.o.Preallocation {
	case Falloc:
		a, ok := s.(Allocator)
		if !ok {
			return syscall.EOPNOTSUPP
		}
		return a.Allocate(at, n)
	case Full:
		clear(m.buf)
		for end := at + n; at < end; {
			b := m.buf[:min(end-at, int64(len(m.buf)))]
			if err := s.Write(b, at); err != nil {
				return err
			}
			at += int64(len(b))
		}
	}
	return nil
}
