// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"encoding/binary"
	"math/bits"
)

const (
	flagCopied     uint64 = 1 << 63 // the refcount is exactly one
	flagCompressed uint64 = 1 << 62
	flagZero       uint64 = 1 << 0
	offsetMask     uint64 = 1<<56 - 1<<9 // bits 9 to 55
	l1Reserved     uint64 = ^(offsetMask | flagCopied)
	l2Reserved     uint64 = ^(offsetMask | flagCopied | flagCompressed | flagZero)
)

// L1Entry is an entry of an L1 table (section Cluster mapping).
type L1Entry uint64

// NewL1Entry names the L2 table at off; copied says that its refcount is one. off 0 is no table.
func NewL1Entry(off int64, copied bool) L1Entry {
	e := L1Entry(uint64(off) & offsetMask)
	if copied && off != 0 {
		e |= L1Entry(flagCopied)
	}
	return e
}

// Offset of the L2 table, 0 when there is none. Check it with Geometry.Aligned.
func (e L1Entry) Offset() int64 { return int64(uint64(e) & offsetMask) }

// Copied tells whether the table may be written where it is.
func (e L1Entry) Copied() bool { return uint64(e)&flagCopied != 0 }

// Reserved are the bits that are set and should not be.
func (e L1Entry) Reserved() uint64 { return uint64(e) & l1Reserved }

// RefcountTableEntry names a refcount block (section Host cluster management).
type RefcountTableEntry uint64

// Offset of the refcount block, 0 when there is none. It is negative for an offset that no file has.
func (e RefcountTableEntry) Offset() int64 { return int64(uint64(e) &^ (1<<9 - 1)) }

// Reserved are the bits that are set and should not be.
func (e RefcountTableEntry) Reserved() uint64 { return uint64(e) & (1<<9 - 1) }

// Kind is what an L2 entry, or a subcluster of it, says about guest data.
type Kind uint8

const (
	Unallocated   Kind = iota // read from the backing file; an extended entry may have a host cluster nevertheless
	Zero                      // reads as zeros, no host cluster
	ZeroAllocated             // reads as zeros, a host cluster stands ready
	Data                      // in the host cluster
	Compressed                // see Geometry.Compressed
	Mixed                     // an extended entry whose subclusters are not alike: see Geometry.SubclusterRun
	Invalid                   // the entry breaks the rules of the format
)

var kindNames = [...]string{"unallocated", "zero", "zero, allocated", "data", "compressed", "mixed", "invalid"}

// String is the kind in words.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "unknown"
}

// L2Entry is an entry of an L2 table. Where the table is not extended, Bitmap is 0.
type L2Entry struct {
	Word   uint64
	Bitmap uint64 // low half: subcluster is allocated; high half: it reads as zeros
}

// Entry reads entry i of an L2 table.
func (g *Geometry) Entry(table []byte, i int) L2Entry {
	if g.Extended {
		return L2Entry{binary.BigEndian.Uint64(table[i*16:]), binary.BigEndian.Uint64(table[i*16+8:])}
	}
	return L2Entry{Word: binary.BigEndian.Uint64(table[i*8:])}
}

// PutEntry writes entry i of an L2 table.
func (g *Geometry) PutEntry(table []byte, i int, e L2Entry) {
	if g.Extended {
		binary.BigEndian.PutUint64(table[i*16:], e.Word)
		binary.BigEndian.PutUint64(table[i*16+8:], e.Bitmap)
		return
	}
	binary.BigEndian.PutUint64(table[i*8:], e.Word)
}

// AllAllocated and AllZero are bitmaps of extended entries whose subclusters are all alike.
const (
	AllAllocated uint64 = 1<<32 - 1
	AllZero      uint64 = AllAllocated << 32
)

// DataEntry is a cluster at host offset off, all of it data. copied says that the refcount is one; in an external data
// file it always is.
func (g *Geometry) DataEntry(off int64, copied bool) L2Entry {
	e := L2Entry{Word: uint64(off) & offsetMask}
	if copied {
		e.Word |= flagCopied
	}
	if g.Extended {
		e.Bitmap = AllAllocated
	}
	return e
}

// ZeroEntry is a cluster that reads as zeros. With off 0 it has no host cluster. Version 2 has no such entries.
func (g *Geometry) ZeroEntry(off int64, copied bool) L2Entry {
	e := L2Entry{Word: uint64(off) & offsetMask}
	if copied && (off != 0 || g.DataFile) {
		e.Word |= flagCopied
	}
	if g.Extended {
		e.Bitmap = AllZero
	} else {
		e.Word |= flagZero
	}
	return e
}

// CompressedEntry is a cluster compressed to n bytes at host offset off, which need not be aligned. It is false where
// the entry cannot say so: off is too large, or n bytes touch more sectors than the field can count.
func (g *Geometry) CompressedEntry(off int64, n int) (L2Entry, bool) {
	sectors := (off+int64(n)-1)>>9 - off>>9
	if n <= 0 || off < 0 || off >= g.MaxCompressedOffset() || sectors >= int64(1)<<(g.ClusterBits-8) {
		return L2Entry{}, false
	}
	return L2Entry{Word: uint64(off) | uint64(sectors)<<g.compressedShift | flagCompressed}, true
}

// MaxCompressedOffset is the first host offset that a compressed entry cannot name.
func (g *Geometry) MaxCompressedOffset() int64 {
	return min(int64(1)<<g.compressedShift, MaxHostOffset)
}

// Compressed takes a compressed entry apart: where the data begin in the file, and how many bytes up to the end of
// their last sector. The data end somewhere in this sector. It is false for an offset beyond 64 PiB.
func (g *Geometry) Compressed(e L2Entry) (off int64, n int, ok bool) {
	off = int64(e.Word & (1<<g.compressedShift - 1))
	sectors := int(e.Word>>g.compressedShift)&(1<<(g.ClusterBits-8)-1) + 1
	return off, sectors*512 - int(off&511), off < MaxHostOffset
}

// Offset of the host cluster of a standard entry, 0 when there is none (or, in an external data file, when it is the
// first). It says nothing about a compressed one.
func (e L2Entry) Offset() int64 { return int64(e.Word & offsetMask) }

// Copied tells whether the host cluster may be written where it is.
func (e L2Entry) Copied() bool { return e.Word&flagCopied != 0 }

// IsCompressed tells a compressed entry from a standard one.
func (e L2Entry) IsCompressed() bool { return e.Word&flagCompressed != 0 }

// WithCopied is the same entry with the flag as given.
func (e L2Entry) WithCopied(copied bool) L2Entry {
	e.Word &^= flagCopied
	if copied {
		e.Word |= flagCopied
	}
	return e
}

// Reserved are the bits of a standard entry that are set and should not be. The zero flag of an extended entry is one.
func (g *Geometry) Reserved(e L2Entry) uint64 {
	if e.IsCompressed() {
		return 0
	}
	r := e.Word & l2Reserved
	if g.Extended {
		r |= e.Word & flagZero
	}
	return r
}

// HasHost tells whether a standard entry has a host cluster.
func (g *Geometry) HasHost(e L2Entry) bool {
	return e.Offset() != 0 || g.DataFile && e.Copied()
}

// Kind is what the entry says about its cluster. For an extended entry it is the kind of all subclusters where these
// are alike, and Mixed where they are not: see SubclusterRun. A host offset that is not aligned makes it Invalid.
func (g *Geometry) Kind(e L2Entry) Kind {
	switch {
	case e.IsCompressed():
		if off, _, ok := g.Compressed(e); !ok || off == 0 || g.DataFile {
			return Invalid
		}
		return Compressed
	case e.Offset()&(g.ClusterSize-1) != 0:
		return Invalid
	case g.Extended:
		return g.kindExtended(e)
	case e.Word&flagZero != 0:
		if g.Version < 3 {
			return Invalid
		}
		if e.Offset() != 0 {
			return ZeroAllocated
		}
		return Zero
	case g.HasHost(e):
		return Data
	}
	return Unallocated
}

func (g *Geometry) kindExtended(e L2Entry) Kind {
	allocated, zero := uint32(e.Bitmap), uint32(e.Bitmap>>32)
	switch {
	case allocated&zero != 0 || allocated != 0 && !g.HasHost(e):
		return Invalid
	case allocated == 1<<32-1:
		return Data
	case allocated == 0 && zero == 0:
		return Unallocated
	case zero == 1<<32-1 && e.Offset() != 0:
		return ZeroAllocated
	case zero == 1<<32-1:
		return Zero
	}
	return Mixed
}

// SubclusterRun tells the kind of subcluster i and how many from i on are of it, within the cluster. Where there are no
// subclusters it is (Kind, 1).
func (g *Geometry) SubclusterRun(e L2Entry, i int) (Kind, int) {
	kind := g.Kind(e)
	if !g.Extended || kind == Compressed || kind == Invalid {
		return kind, g.Subclusters - i
	}
	allocated, zero := uint32(e.Bitmap)>>i, uint32(e.Bitmap>>32)>>i
	left := 32 - i
	switch {
	case allocated&1 != 0:
		return Data, min(left, bits.TrailingZeros32(^allocated))
	case zero&1 == 0:
		return Unallocated, min(left, bits.TrailingZeros32(allocated|zero))
	case e.Offset() != 0:
		return ZeroAllocated, min(left, bits.TrailingZeros32(^zero))
	}
	return Zero, min(left, bits.TrailingZeros32(^zero))
}

// SubclusterMask has the bits of the low half set for n subclusters from i on.
func SubclusterMask(i, n int) uint64 { return (1<<n - 1) << i }
