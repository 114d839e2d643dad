// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"slices"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// Bitmaps are kept, and changed by the methods here; writes are not tracked. So the first change of guest data marks the
// bitmaps that are enabled as in use, which they stay: their content must not be trusted any more. Those that are
// disabled stay what they are.

// Bitmaps are the entries of the bitmap directory; none where the image says that it is not consistent. Does not wait.
func (m *Image) Bitmaps() []qcow2.Bitmap { return slices.Clone(m.bitmaps) }

// defaultGranularity is how many bytes of the disk one bit stands for when nobody says.
const defaultGranularity = 64 << 10

// AddBitmap makes an empty one. granularity is a power of two from 512 to 2 GiB, in bytes; 0 means 65536.
func (m *Image) AddBitmap(name string, granularity int64, disabled bool) error {
	if granularity == 0 {
		granularity = defaultGranularity
	}
	b := qcow2.Bitmap{Type: qcow2.BitmapDirty, Name: name, GranularityBits: uint8(bits.TrailingZeros64(uint64(granularity)))}
	if granularity < 1<<qcow2.MinGranularityBits || granularity > 1<<qcow2.MaxGranularityBits || granularity&(granularity-1) != 0 {
		return fmt.Errorf("add a bitmap: granularity is %d (a power of two from 512 to 2 GiB is allowed): %w", granularity, syscall.EINVAL)
	}
	if !disabled {
		b.Flags = qcow2.BitmapAuto
	}
	return m.changeBitmaps("add", func() error {
		if m.bitmapNamed(name) >= 0 {
			return fmt.Errorf("there is one already: %w", syscall.EEXIST)
		}
		if m.g.Version < 3 {
			return fmt.Errorf("image is of version 2: %w", syscall.EOPNOTSUPP)
		}
		if err := m.placeTable(&b, m.emptyTable(&b)); err != nil {
			return err
		}
		return m.setBitmaps(append(slices.Clone(m.bitmaps), b), nil, &b)
	})
}

// RemoveBitmap removes one, an inconsistent one too.
func (m *Image) RemoveBitmap(name string) error {
	return m.changeBitmaps("remove", func() error {
		i := m.bitmapNamed(name)
		if i < 0 {
			return fmt.Errorf("find it: %w", syscall.ENOENT)
		}
		return m.setBitmaps(slices.Delete(slices.Clone(m.bitmaps), i, i+1), &m.bitmaps[i], nil)
	})
}

// ClearBitmap makes all its bits zero.
func (m *Image) ClearBitmap(name string) error {
	return m.replaceBitmap("clear", name, func(b *qcow2.Bitmap) error {
		return m.placeTable(b, m.emptyTable(b))
	})
}

// EnableBitmap says whether writes are tracked from now on.
func (m *Image) EnableBitmap(name string, on bool) error {
	return m.changeBitmaps("enable or disable", func() error {
		i, err := m.usableBitmap(name)
		if err != nil {
			return err
		}
		all := slices.Clone(m.bitmaps)
		all[i].Flags &^= qcow2.BitmapAuto
		if on {
			all[i].Flags |= qcow2.BitmapAuto
		}
		return m.setBitmaps(all, nil, nil)
	})
}

// MergeBitmap sets in dst each bit that is set in src, which may have another granularity and may be of another image.
func (m *Image) MergeBitmap(dst string, from *Image, src string) error {
	k, err := from.usableBitmap(src)
	if err != nil {
		return fmt.Errorf("merge bitmap %q: %w", src, err)
	}
	source := from.bitmaps[k]
	return m.replaceBitmap("merge into", dst, func(b *qcow2.Bitmap) error {
		if from.h.Size != m.h.Size {
			return fmt.Errorf("bitmap %q is of a disk of another size: %w", src, syscall.EINVAL)
		}
		merged := bitSet{perCluster: m.g.ClusterSize * 8, clusters: make(map[int64][]byte)}
		if err := m.addBits(&merged, m, b, b.GranularityBits); err != nil {
			return err
		}
		if err := m.addBits(&merged, from, &source, b.GranularityBits); err != nil {
			return err
		}
		return m.placeBits(b, &merged)
	})
}

// changeBitmaps runs what changes bitmaps, alone.
func (m *Image) changeBitmaps(verb string, fn func() error) error {
	if err := m.enterAlone(false); err != nil {
		return err
	}
	defer m.leaveAlone()
	err := fn()
	if err == nil {
		err = m.settle()
	}
	if err != nil {
		return fmt.Errorf("%s a bitmap: %w", verb, err)
	}
	return nil
}

// replaceBitmap changes the content of a bitmap: place gives it a new table.
func (m *Image) replaceBitmap(verb, name string, place func(b *qcow2.Bitmap) error) error {
	return m.changeBitmaps(verb, func() error {
		i, err := m.usableBitmap(name)
		if err != nil {
			return err
		}
		all := slices.Clone(m.bitmaps)
		if err := place(&all[i]); err != nil {
			return err
		}
		return m.setBitmaps(all, &m.bitmaps[i], &all[i])
	})
}

func (m *Image) bitmapNamed(name string) int {
	return slices.IndexFunc(m.bitmaps, func(b qcow2.Bitmap) bool { return b.Name == name })
}

func (m *Image) usableBitmap(name string) (int, error) {
	i := m.bitmapNamed(name)
	switch {
	case i < 0:
		return 0, fmt.Errorf("find bitmap %q: %w", name, syscall.ENOENT)
	case !m.bitmaps[i].Usable():
		return 0, fmt.Errorf("bitmap %q is inconsistent and can only be removed: %w", name, syscall.EINVAL)
	}
	return i, nil
}

// setBitmaps writes a new directory and makes it the valid one. gone is a bitmap whose clusters are not needed any more then,
// made one whose clusters are not needed if that fails.
func (m *Image) setBitmaps(all []qcow2.Bitmap, gone, made *qcow2.Bitmap) error {
	var unused []run
	if gone != nil {
		var err error
		if unused, err = m.bitmapClusters(gone); err != nil {
			return err
		}
	}
	dir, err := qcow2.EncodeBitmapDirectory(all)
	var off int64
	if err == nil {
		off, err = m.place("the bitmap directory", dir)
	}
	if err == nil {
		err = m.settle()
	}
	old, had, _ := m.h.Bitmaps()
	if err == nil {
		var e *qcow2.BitmapsExtension
		if len(all) > 0 {
			e = &qcow2.BitmapsExtension{Bitmaps: uint32(len(all)), DirectorySize: int64(len(dir)), DirectoryOffset: off}
		}
		err = m.setExtension(e)
	}
	if err != nil {
		m.displace(off, int64(len(dir)))
		m.dropBitmap(made)
		return err
	}
	if had && len(m.bitmaps) > 0 {
		m.displace(old.DirectoryOffset, old.DirectorySize)
	}
	if gone != nil {
		m.releaseBytes(gone.TableOffset, int64(gone.TableEntries)*8)
	}
	for _, r := range unused {
		m.letGo(r.first, r.n)
	}
	m.bitmaps, m.badBitmaps = all, false
	m.ready = !m.needsPreparing()
	return nil
}

// setExtension changes the bitmaps extension. Where that is more than the disk writes at once, the image says meanwhile
// that its bitmaps are not consistent.
func (m *Image) setExtension(e *qcow2.BitmapsExtension) error {
	h := m.on.h
	h.SetBitmaps(e)
	_, sectors, err := m.encodeHeader(&h)
	if err != nil {
		return err
	}
	if sectors <= 1 {
		return m.rewrite(func(h *qcow2.Header) { h.SetBitmaps(e) })
	}
	off := func(h *qcow2.Header) { h.Autoclear &^= qcow2.BitmapsBit }
	if err := m.setDurable(off); err != nil {
		return err
	}
	err = m.rewrite(func(h *qcow2.Header) { h.SetBitmaps(e); off(h) })
	if err == nil && e != nil {
		err = m.setDurable(func(h *qcow2.Header) { h.Autoclear |= qcow2.BitmapsBit })
	}
	return err
}

// dropBitmap lets go of the clusters of a bitmap that nothing names.
func (m *Image) dropBitmap(b *qcow2.Bitmap) {
	if b == nil {
		return
	}
	list, err := m.bitmapClusters(b)
	if err != nil {
		return // leaked
	}
	m.releaseBytes(b.TableOffset, int64(b.TableEntries)*8)
	for _, r := range list {
		m.letGo(r.first, r.n)
	}
}

// bitmapClusters are the clusters of a bitmap: its table, and its bits.
func (m *Image) bitmapClusters(b *qcow2.Bitmap) ([]run, error) {
	table, err := m.readBitmapTable(b)
	if err != nil {
		return nil, err
	}
	list := []run{{b.TableOffset >> m.g.ClusterBits, m.g.Clusters(int64(b.TableEntries) * 8)}}
	for _, e := range table {
		if e.Offset() != 0 {
			list = appendRun(list, run{e.Offset() >> m.g.ClusterBits, 1})
		}
	}
	return list, nil
}

func (m *Image) readBitmapTable(b *qcow2.Bitmap) ([]qcow2.BitmapEntry, error) {
	if b.TableOffset >= m.fileEnd {
		return nil, m.damage(b.TableOffset, "bitmap table lies beyond the end of the file")
	}
	raw := make([]byte, int64(b.TableEntries)*8)
	if err := m.read("a bitmap table", raw, b.TableOffset); err != nil {
		return nil, err
	}
	table := make([]qcow2.BitmapEntry, b.TableEntries)
	for i := range table {
		e := qcow2.BitmapEntry(binary.BigEndian.Uint64(raw[i*8:]))
		if !m.g.Aligned(e.Offset()) || m.claims.claimed(e.Offset()>>m.g.ClusterBits) && e.Offset() != 0 {
			return nil, m.damage(b.TableOffset+int64(i)*8, "entry of a bitmap table is not sound (%#x)", uint64(e))
		}
		table[i] = e
	}
	return table, nil
}

// emptyTable is the table of a bitmap without a bit set, as long as the disk wants it.
func (m *Image) emptyTable(b *qcow2.Bitmap) []qcow2.BitmapEntry {
	return make([]qcow2.BitmapEntry, max(1, m.g.BitmapTableEntries(m.h.Size, b.GranularityBits)))
}

// placeTable writes a table for a bitmap.
func (m *Image) placeTable(b *qcow2.Bitmap, table []qcow2.BitmapEntry) error {
	if len(table) > qcow2.MaxBitmapTableEntries {
		return fmt.Errorf("bitmap would be too large: %w", syscall.EFBIG)
	}
	raw := make([]byte, len(table)*8)
	for i, e := range table {
		binary.BigEndian.PutUint64(raw[i*8:], uint64(e))
	}
	off, err := m.place("a bitmap table", raw)
	if err == nil {
		b.TableOffset, b.TableEntries = off, uint32(len(table))
	}
	return err
}

// bitSet are the bits of a bitmap, in clusters that exist where a bit is set.
type bitSet struct {
	perCluster int64
	clusters   map[int64][]byte
}

// set sets n bits from i on.
func (s *bitSet) set(i, n int64) {
	for ; n > 0; i, n = i+1, n-1 {
		c := s.clusters[i/s.perCluster]
		if c == nil {
			c = make([]byte, s.perCluster/8)
			s.clusters[i/s.perCluster] = c
		}
		at := i % s.perCluster
		if at&7 == 0 && n >= 8 {
			c[at>>3] = 0xff
			i, n = i+7, n-7
			continue
		}
		c[at>>3] |= 1 << (at & 7)
	}
}

// addBits sets the bits that stand for what the bitmap b of an image says, at another granularity.
func (m *Image) addBits(s *bitSet, from *Image, b *qcow2.Bitmap, granularity uint8) error {
	table, err := from.readBitmapTable(b)
	if err != nil {
		return err
	}
	buf := make([]byte, from.g.ClusterSize)
	for i, e := range table {
		switch {
		case e.Offset() != 0:
			if err := from.read("a bitmap", buf, e.Offset()); err != nil {
				return err
			}
		case e.Ones():
			for k := range buf {
				buf[k] = 0xff
			}
		default:
			continue
		}
		first := int64(i) * from.g.ClusterSize * 8
		for k := int64(0); k < int64(len(buf))*8; k++ {
			if buf[k>>3] == 0 {
				k |= 7
				continue
			}
			if buf[k>>3]>>(k&7)&1 != 0 {
				s.mark((first+k)<<b.GranularityBits, int64(1)<<b.GranularityBits, granularity, m.h.Size)
			}
		}
	}
	return nil
}

// mark sets the bits that stand for n bytes of a disk of size bytes at off.
func (s *bitSet) mark(off, n int64, granularity uint8, size int64) {
	if off >= size {
		return
	}
	first, last := off>>granularity, (min(off+n, size)-1)>>granularity
	s.set(first, last-first+1)
}

// placeBits writes the bits to new clusters, and a table that names them.
func (m *Image) placeBits(b *qcow2.Bitmap, s *bitSet) error {
	table := m.emptyTable(b)
	for i, bits := range s.clusters {
		off, err := m.placeBitmapData(bits)
		if err != nil {
			m.dropEntries(table)
			return err
		}
		table[i] = qcow2.NewBitmapEntry(off)
	}
	err := m.placeTable(b, table)
	if err != nil {
		m.dropEntries(table)
	}
	return err
}

func (m *Image) dropEntries(table []qcow2.BitmapEntry) {
	for _, e := range table {
		if e.Offset() != 0 {
			m.letGo(e.Offset()>>m.g.ClusterBits, 1)
		}
	}
}

func (m *Image) placeBitmapData(b []byte) (int64, error) {
	c, err := m.allocateTable(1)
	if err != nil {
		return 0, err
	}
	if err := m.write("a bitmap", b, c<<m.g.ClusterBits); err != nil {
		m.giveBack(c, 1)
		return 0, err
	}
	return c << m.g.ClusterBits, nil
}

// outdate marks a bitmap as in use, in the directory where it is.
func (m *Image) outdate(i int) error {
	e, _, err := m.h.Bitmaps()
	if err != nil {
		return err
	}
	at := e.DirectoryOffset
	for k := range i {
		at += int64(24+len(m.bitmaps[k].Extra)+len(m.bitmaps[k].Name)+7) &^ 7
	}
	flags := m.bitmaps[i].Flags | qcow2.BitmapInUse
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], flags)
	if err := m.write("the bitmap directory", b[:], at+12); err != nil {
		return err
	}
	m.bitmaps[i].Flags = flags
	return nil
}

// suspendBitmaps prepares for another size of the disk: what does not fit it is not consistent until resumeBitmaps.
func (m *Image) suspendBitmaps(size int64) error {
	if len(m.bitmaps) == 0 || size == m.h.Size {
		return nil
	}
	return m.setDurable(func(h *qcow2.Header) { h.Autoclear &^= qcow2.BitmapsBit })
}

// resumeBitmaps makes the bitmaps as long as the disk is now: what is new was not written to, what is gone is forgotten.
func (m *Image) resumeBitmaps() error {
	if len(m.bitmaps) == 0 || m.h.Autoclear&qcow2.BitmapsBit != 0 {
		return nil
	}
	all := slices.Clone(m.bitmaps)
	for i := range all {
		if err := m.fitBitmap(&all[i]); err != nil {
			return err
		}
	}
	old := m.bitmaps
	if err := m.setBitmaps(all, nil, nil); err != nil {
		return err
	}
	for i := range old {
		if old[i].TableOffset != all[i].TableOffset {
			m.displace(old[i].TableOffset, int64(old[i].TableEntries)*8)
		}
	}
	return m.settle()
}

// fitBitmap gives a bitmap a table for the size of the disk. The clusters with bits stay, as far as the table reaches.
func (m *Image) fitBitmap(b *qcow2.Bitmap) error {
	old, err := m.readBitmapTable(b)
	if err != nil {
		return err
	}
	table := m.emptyTable(b)
	copy(table, old)
	if err := m.clearTail(b, table); err != nil {
		return err
	}
	if err := m.placeTable(b, table); err != nil {
		return err
	}
	if len(old) > len(table) {
		m.dropEntries(old[len(table):])
	}
	return nil
}

// clearTail clears the bits behind the end of the disk in the last cluster of a table.
func (m *Image) clearTail(b *qcow2.Bitmap, table []qcow2.BitmapEntry) error {
	last := len(table) - 1
	e := table[last]
	bits := (m.h.Size + b.Granularity() - 1) >> b.GranularityBits
	bits -= int64(last) * m.g.ClusterSize * 8
	if e.Offset() == 0 {
		if e.Ones() && bits < m.g.ClusterSize*8 {
			s := bitSet{perCluster: m.g.ClusterSize * 8, clusters: make(map[int64][]byte)}
			s.set(0, bits)
			off, err := m.placeBitmapData(s.clusters[0])
			if err == nil {
				table[last] = qcow2.NewBitmapEntry(off)
			}
			return err
		}
		return nil
	}
	buf := make([]byte, m.g.ClusterSize)
	if err := m.read("a bitmap", buf, e.Offset()); err != nil {
		return err
	}
	for k := bits; k < int64(len(buf))*8; k++ {
		buf[k>>3] &^= 1 << (k & 7)
	}
	return m.write("a bitmap", buf, e.Offset())
}
