// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"encoding/binary"
	"math"
	"slices"
)

const (
	bitmapExtensionSize = 24
	bitmapFixed         = 24 // bytes of a directory entry before extra data and name
)

// Flags of a bitmap (section Bitmap directory).
const (
	BitmapInUse           uint32 = 1 << 0 // was not saved: its content must not be trusted
	BitmapAuto            uint32 = 1 << 1 // enabled: tracks every write
	BitmapExtraCompatible uint32 = 1 << 2 // may be used although its extra data are unknown
	bitmapFlagsReserved   uint32 = ^(BitmapInUse | BitmapAuto | BitmapExtraCompatible)

	// BitmapDirty is the only type of bitmap there is: dirty tracking.
	BitmapDirty uint8 = 1
)

// BitmapsExtension says where the bitmap directory lies (section Bitmaps extension).
type BitmapsExtension struct {
	Bitmaps         uint32 // at least 1
	DirectorySize   int64  // bytes
	DirectoryOffset int64
}

// Bitmaps is the bitmaps extension, checked against the limits; false when the image has none. Whether its data are
// consistent is told by the autoclear bit BitmapsBit: where that is clear, the bitmaps are of no use but still there. An
// extension that breaks the rules counts only where the bit is set.
func (h *Header) Bitmaps() (BitmapsExtension, bool, error) {
	data, ok := h.Extension(ExtensionBitmaps)
	if !ok {
		if h.Autoclear&BitmapsBit != 0 {
			return BitmapsExtension{}, false, invalidf("image says that its bitmaps are consistent, but it has none")
		}
		return BitmapsExtension{}, false, nil
	}
	e, err := h.parseBitmaps(data)
	if err != nil && h.Autoclear&BitmapsBit == 0 {
		return BitmapsExtension{}, false, nil
	}
	return e, err == nil, err
}

func (h *Header) parseBitmaps(data []byte) (BitmapsExtension, error) {
	var e BitmapsExtension
	if len(data) != bitmapExtensionSize {
		return e, invalidf("bitmaps extension has %d bytes (%d are right)", len(data), bitmapExtensionSize)
	}
	be := binary.BigEndian
	e.Bitmaps = be.Uint32(data)
	size, off := be.Uint64(data[8:]), be.Uint64(data[16:])
	switch {
	case e.Bitmaps == 0 || e.Bitmaps > MaxBitmaps:
		return e, invalidf("bitmaps extension counts %d bitmaps (from 1 to %d are allowed)", e.Bitmaps, MaxBitmaps)
	case be.Uint32(data[4:]) != 0:
		return e, invalidf("bitmaps extension has a reserved field set")
	case size > MaxBitmapDirectoryBytes || size < uint64(e.Bitmaps)*bitmapFixed:
		return e, invalidf("bitmap directory has an impossible length of %d bytes", size)
	case off == 0 || off > math.MaxInt64-size || off&(uint64(1)<<h.ClusterBits-1) != 0:
		return e, invalidf("bitmap directory lies at no possible place (%#x)", off)
	}
	e.DirectorySize, e.DirectoryOffset = int64(size), int64(off)
	return e, nil
}

// SetBitmaps changes the extension and sets the autoclear bit; nil removes both.
func (h *Header) SetBitmaps(e *BitmapsExtension) {
	if e == nil {
		h.SetExtension(ExtensionBitmaps, nil)
		h.Autoclear &^= BitmapsBit
		return
	}
	data := make([]byte, bitmapExtensionSize)
	binary.BigEndian.PutUint32(data, e.Bitmaps)
	binary.BigEndian.PutUint64(data[8:], uint64(e.DirectorySize))
	binary.BigEndian.PutUint64(data[16:], uint64(e.DirectoryOffset))
	h.SetExtension(ExtensionBitmaps, data)
	h.Autoclear |= BitmapsBit
}

// Bitmap is an entry of the bitmap directory.
type Bitmap struct {
	TableOffset     int64
	TableEntries    uint32
	Flags           uint32
	Type            uint8
	GranularityBits uint8 // log2 of the bytes that one bit stands for
	Name            string
	Extra           []byte // of no known meaning; kept
}

// Usable tells whether the content may be used: it was saved whole, and nothing unknown belongs to it.
func (b *Bitmap) Usable() bool {
	return b.Flags&BitmapInUse == 0 && b.Type == BitmapDirty && (len(b.Extra) == 0 || b.Flags&BitmapExtraCompatible != 0)
}

// Granularity is how many bytes one bit stands for.
func (b *Bitmap) Granularity() int64 { return int64(1) << b.GranularityBits }

// bitmapSize is the length of a directory entry, from its first 24 bytes.
func bitmapSize(b []byte, off int64) (int, error) {
	extra := binary.BigEndian.Uint32(b[20:])
	if extra > MaxBitmapExtra {
		return 0, corruptf(off, "bitmap has %d bytes of extra data (at most %d are allowed)", extra, MaxBitmapExtra)
	}
	return (bitmapFixed + int(extra) + int(binary.BigEndian.Uint16(b[18:])) + 7) &^ 7, nil
}

// ParseBitmap reads the directory entry at the start of b, which lies at off of the image, and tells its length. An entry
// cut off is an error.
func ParseBitmap(b []byte, off int64, g *Geometry) (m Bitmap, size int, err error) {
	if len(b) < bitmapFixed {
		return m, 0, corruptf(off, "bitmap directory is cut off")
	}
	if size, err = bitmapSize(b, off); err != nil {
		return m, 0, err
	}
	if size > len(b) {
		return m, 0, corruptf(off, "bitmap directory is cut off")
	}
	be := binary.BigEndian
	name, extra := int(be.Uint16(b[18:])), int(be.Uint32(b[20:]))
	m = Bitmap{TableEntries: be.Uint32(b[8:]), Flags: be.Uint32(b[12:]), Type: b[16], GranularityBits: b[17]}
	if extra > 0 {
		m.Extra = append([]byte(nil), b[bitmapFixed:][:extra]...)
	}
	m.Name = string(b[bitmapFixed+extra:][:name])
	table := be.Uint64(b)
	m.TableOffset = int64(table)
	return m, size, m.validate(table, off, g)
}

func (m *Bitmap) validate(table uint64, off int64, g *Geometry) error {
	bytes := uint64(m.TableEntries) * 8
	switch {
	case len(m.Name) == 0 || len(m.Name) > MaxBitmapName:
		return corruptf(off, "bitmap has a name of %d bytes (from 1 to %d are allowed)", len(m.Name), MaxBitmapName)
	case m.Flags&bitmapFlagsReserved != 0:
		return corruptf(off, "bitmap %q has reserved flags set (%#x)", m.Name, m.Flags)
	case m.Type != BitmapDirty:
		return corruptf(off, "bitmap %q has unknown type %d", m.Name, m.Type)
	case m.GranularityBits < MinGranularityBits || m.GranularityBits > MaxGranularityBits:
		return corruptf(off, "bitmap %q has a granularity of 2^%d bytes (from 2^%d to 2^%d are allowed)",
			m.Name, m.GranularityBits, MinGranularityBits, MaxGranularityBits)
	case m.TableEntries == 0 || m.TableEntries > MaxBitmapTableEntries:
		return corruptf(off, "bitmap %q has a table of %d entries (from 1 to %d are allowed)", m.Name, m.TableEntries, MaxBitmapTableEntries)
	case table == 0 || table > math.MaxInt64-bytes || table&uint64(g.ClusterSize-1) != 0:
		return corruptf(off, "bitmap %q has its table at no possible place (%#x)", m.Name, table)
	}
	return nil
}

// EncodeBitmapDirectory is the whole directory.
func EncodeBitmapDirectory(all []Bitmap) ([]byte, error) {
	if len(all) > MaxBitmaps {
		return nil, &limitError{"image would have too many bitmaps"}
	}
	var dir []byte
	be := binary.BigEndian
	for i := range all {
		m := &all[i]
		if len(m.Name) == 0 || len(m.Name) > MaxBitmapName {
			return nil, invalidf("name of the bitmap has %d bytes (from 1 to %d are allowed)", len(m.Name), MaxBitmapName)
		}
		b := make([]byte, (bitmapFixed+len(m.Extra)+len(m.Name)+7)&^7)
		be.PutUint64(b, uint64(m.TableOffset))
		be.PutUint32(b[8:], m.TableEntries)
		be.PutUint32(b[12:], m.Flags)
		b[16], b[17] = m.Type, m.GranularityBits
		be.PutUint16(b[18:], uint16(len(m.Name)))
		be.PutUint32(b[20:], uint32(len(m.Extra)))
		copy(b[bitmapFixed:], m.Extra)
		copy(b[bitmapFixed+len(m.Extra):], m.Name)
		dir = append(dir, b...)
	}
	if len(dir) > MaxBitmapDirectoryBytes {
		return nil, &limitError{"bitmap directory would be too large"}
	}
	return dir, nil
}

// ReadBitmaps reads the bitmap directory, nil when the image has none. It reads entry by entry; the directory must be
// exactly as long as they are, and no two may have the same name.
func ReadBitmaps(read ReadFunc, h *Header) ([]Bitmap, error) {
	e, ok, err := h.Bitmaps()
	if err != nil || !ok {
		return nil, err
	}
	g := h.Geometry()
	var all []Bitmap
	seen := make(map[string]bool)
	at, end := e.DirectoryOffset, e.DirectoryOffset+e.DirectorySize
	buf := make([]byte, bitmapFixed, 4096)
	for range e.Bitmaps {
		if end-at < bitmapFixed {
			return nil, corruptf(at, "bitmap directory is too short for %d bitmaps", e.Bitmaps)
		}
		buf = buf[:bitmapFixed]
		if err := read(buf, at); err != nil {
			return nil, err
		}
		n, err := bitmapSize(buf, at)
		if err != nil {
			return nil, err
		}
		if int64(n) > end-at {
			return nil, corruptf(at, "bitmap directory is cut off")
		}
		buf = slices.Grow(buf[:0], n)[:n]
		if err := read(buf, at); err != nil {
			return nil, err
		}
		m, _, err := ParseBitmap(buf, at, &g)
		if err != nil {
			return nil, err
		}
		if seen[m.Name] {
			return nil, corruptf(at, "two bitmaps have the name %q", m.Name)
		}
		seen[m.Name] = true
		all = append(all, m)
		at += int64(n)
	}
	if at != end {
		return nil, corruptf(at, "bitmap directory is longer than its entries")
	}
	return all, nil
}

// BitmapBytes is the length of the data of a bitmap for a disk of size bytes.
func BitmapBytes(size int64, granularityBits uint8) int64 {
	bits := size>>granularityBits + b2i(size&(1<<granularityBits-1) != 0)
	return bits>>3 + b2i(bits&7 != 0)
}

// BitmapTableEntries is the number of entries that the table of a bitmap needs for a disk of size bytes.
func (g *Geometry) BitmapTableEntries(size int64, granularityBits uint8) int64 {
	return g.Clusters(BitmapBytes(size, granularityBits))
}

// BitmapEntry is an entry of a bitmap table (section Bitmap table).
type BitmapEntry uint64

// AllOnes is an entry without a cluster whose bits are all set; 0 is one whose bits are all clear.
const AllOnes BitmapEntry = 1

// NewBitmapEntry names the cluster at off.
func NewBitmapEntry(off int64) BitmapEntry { return BitmapEntry(uint64(off) & offsetMask) }

// Offset of the cluster with the bits, 0 when they are all alike. Check it with Geometry.Aligned.
func (e BitmapEntry) Offset() int64 { return int64(uint64(e) & offsetMask) }

// Ones tells whether an entry without a cluster stands for bits that are all set.
func (e BitmapEntry) Ones() bool { return e.Offset() == 0 && e&1 != 0 }

// Reserved are the bits that are set and should not be.
func (e BitmapEntry) Reserved() uint64 {
	r := uint64(e) &^ offsetMask
	if e.Offset() == 0 {
		r &^= 1
	}
	return r
}
