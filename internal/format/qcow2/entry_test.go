// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

func TestSplitIsInvertible(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		extended := rapid.Bool().Draw(t, "extended")
		bits := uint32(rapid.IntRange(9, 21).Draw(t, "cluster bits"))
		if extended {
			bits = max(bits, 14)
		}
		g := NewGeometry(3, bits, 4, extended, false)
		off := rapid.Int64Range(0, g.MaxSize()-1).Draw(t, "offset")
		l1, l2, in := g.Split(off)
		if g.Guest(l1, l2)+in != off || in >= g.ClusterSize || l2 >= g.L2Entries() || l1 >= MaxL1Bytes/8 {
			t.Fatalf("offset %#x is entry %d of table %d, byte %#x", off, l2, l1, in)
		}
		if int64(l1) >= g.L1EntriesFor(off+1) {
			t.Fatalf("a disk of %d bytes needs %d L1 entries", off+1, g.L1EntriesFor(off+1))
		}
		if s := g.Subcluster(off); int64(s) != in>>g.SubclusterBits {
			t.Fatalf("subcluster %d", s)
		}
	})
}

// The size field of a compressed entry begins at bit 62-(cluster_bits-8): 61, 58, 54 and 49 for these sizes.
func TestCompressedEntry(t *testing.T) {
	for bits, shift := range map[uint32]uint32{9: 61, 12: 58, 16: 54, 21: 49} {
		g := NewGeometry(3, bits, 4, false, false)
		for _, c := range []struct {
			off     int64
			n       int
			sectors uint64 // beyond the first
		}{{0x50000, 1, 0}, {0x50000, 512, 0}, {0x501ff, 1, 0}, {0x501ff, 2, 1}, {0x50001, 512, 1}, {0x50010, int(g.ClusterSize) - 100, uint64(g.ClusterSize-100+16-1) >> 9}} {
			e, ok := g.CompressedEntry(c.off, c.n)
			if !ok {
				t.Fatalf("clusters of 2^%d: %d bytes at %#x cannot be said", bits, c.n, c.off)
			}
			if want := uint64(c.off) | c.sectors<<shift | 1<<62; e.Word != want {
				t.Errorf("clusters of 2^%d: %d bytes at %#x are %#x, want %#x", bits, c.n, c.off, e.Word, want)
			}
			off, n, ok := g.Compressed(e)
			if off != c.off || n < c.n || n >= c.n+512 || (off+int64(n))%512 != 0 || !ok {
				t.Errorf("clusters of 2^%d: read back as %d bytes at %#x (%v)", bits, n, off, ok)
			}
			if g.Kind(e) != Compressed {
				t.Errorf("kind is %v", g.Kind(e))
			}
		}
		if _, ok := g.CompressedEntry(g.MaxCompressedOffset(), 1); ok {
			t.Errorf("clusters of 2^%d: an offset that is too large was taken", bits)
		}
		if _, ok := g.CompressedEntry(511, int(g.ClusterSize)*2); ok {
			t.Errorf("clusters of 2^%d: too many sectors were taken", bits)
		}
	}
}

func TestKinds(t *testing.T) {
	v2 := NewGeometry(2, 16, 4, false, false)
	v3 := NewGeometry(3, 16, 4, false, false)
	ext := NewGeometry(3, 16, 4, true, false)
	data := NewGeometry(3, 16, 4, false, true)
	for _, c := range []struct {
		name string
		g    Geometry
		e    L2Entry
		want Kind
	}{
		{"nothing", v3, L2Entry{}, Unallocated},
		{"data", v3, v3.DataEntry(0x50000, true), Data},
		{"shared data", v3, v3.DataEntry(0x50000, false), Data},
		{"zero", v3, v3.ZeroEntry(0, false), Zero},
		{"zero with cluster", v3, v3.ZeroEntry(0x50000, true), ZeroAllocated},
		{"zero in version 2", v2, v3.ZeroEntry(0, false), Invalid},
		{"misaligned", v3, v3.DataEntry(0x50200, true), Invalid},
		{"compressed at the header", v3, L2Entry{Word: flagCompressed}, Invalid},
		{"first cluster of a data file", data, data.DataEntry(0, true), Data},
		{"nothing in a data file", data, L2Entry{}, Unallocated},
		{"compressed in a data file", data, L2Entry{Word: flagCompressed | 0x50000}, Invalid},
		{"extended nothing", ext, L2Entry{}, Unallocated},
		{"extended data", ext, ext.DataEntry(0x50000, true), Data},
		{"extended zero", ext, ext.ZeroEntry(0, false), Zero},
		{"extended zero with cluster", ext, ext.ZeroEntry(0x50000, true), ZeroAllocated},
		{"extended mixed", ext, L2Entry{0x50000, 0xf0_0000_000f}, Mixed},
		{"both allocated and zero", ext, L2Entry{0x50000, 0x1_0000_0001}, Invalid},
		{"allocated without a cluster", ext, L2Entry{0, 1}, Invalid},
	} {
		if got := c.g.Kind(c.e); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// Runs of subclusters equal what each subcluster's own two bits say.
func TestSubclusterRuns(t *testing.T) {
	g := NewGeometry(3, 16, 4, true, false)
	rapid.Check(t, func(t *rapid.T) {
		allocated := rapid.Uint32().Draw(t, "allocated")
		zero := rapid.Uint32().Draw(t, "zero") &^ allocated
		e := L2Entry{Word: 0x50000, Bitmap: uint64(zero)<<32 | uint64(allocated)}
		for i := 0; i < 32; {
			kind, n := g.SubclusterRun(e, i)
			if n < 1 || i+n > 32 {
				t.Fatalf("run of %d from %d", n, i)
			}
			for j := i; j < i+n; j++ {
				want := Unallocated
				if allocated>>j&1 != 0 {
					want = Data
				} else if zero>>j&1 != 0 {
					want = ZeroAllocated
				}
				if kind != want {
					t.Fatalf("subcluster %d is %v, want %v (%#x)", j, kind, want, e.Bitmap)
				}
			}
			if next := i + n; next < 32 {
				if k, _ := g.SubclusterRun(e, next); k == kind {
					t.Fatalf("run from %d ends at %d although the next is alike", i, next)
				}
			}
			i += n
		}
	})
}

func TestRefcountsOfEveryWidth(t *testing.T) {
	for order := uint32(0); order <= MaxRefcountOrder; order++ {
		t.Run(fmt.Sprint(1<<order, " bits"), func(t *testing.T) {
			g := NewGeometry(3, 9, order, false, false)
			block := make([]byte, 512)
			want := make([]uint64, g.RefcountBlockEntries())
			rapid.Check(t, func(t *rapid.T) {
				i := rapid.IntRange(0, len(want)-1).Draw(t, "entry")
				want[i] = rapid.Uint64Range(0, g.MaxRefcount()).Draw(t, "count")
				SetRefcount(block, order, i, want[i])
				for j, w := range want {
					if got := Refcount(block, order, j); got != w {
						t.Fatalf("entry %d is %d, want %d", j, got, w)
					}
				}
			})
		})
	}
	if b := []byte{0, 0}; true {
		SetRefcount(b, 0, 3, 1)
		SetRefcount(b, 2, 3, 0xa)
		if b[0] != 0x08 || b[1] != 0xa0 {
			t.Errorf("bits begin at the wrong end: %x", b)
		}
	}
}

func TestReservedBits(t *testing.T) {
	if r := L1Entry(1<<60 | 1<<3 | 0x50000).Reserved(); r != 1<<60|1<<3 {
		t.Errorf("L1: %#x", r)
	}
	g, ext := NewGeometry(3, 16, 4, false, false), NewGeometry(3, 16, 4, true, false)
	if r := g.Reserved(L2Entry{Word: 1<<60 | 1<<3 | 1 | 0x50000}); r != 1<<60|1<<3 {
		t.Errorf("L2: %#x", r)
	}
	if r := ext.Reserved(L2Entry{Word: 1 | 0x50000}); r != 1 {
		t.Errorf("extended L2: %#x", r)
	}
	if r := BitmapEntry(0x50001).Reserved(); r != 1 || !AllOnes.Ones() || AllOnes.Reserved() != 0 {
		t.Errorf("bitmap: %#x", r)
	}
}
