// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"bytes"
	"encoding/binary"
	"testing"
)

// What is read and accepted can be written, and reads back the same.
func FuzzHeader(f *testing.F) {
	for _, change := range []func(h *Header){
		func(h *Header) {},
		func(h *Header) { h.ClusterBits, h.L1Entries, h.Extensions = 9, 1<<15, nil },
		func(h *Header) {
			h.Version, h.Compatible, h.Autoclear, h.Additional, h.BackingFile = 2, 0, 0, nil, ""
		},
		func(h *Header) { h.Incompatible = ExtendedL2 | ExternalData; h.SetDataFile("data.raw") },
		func(h *Header) { h.Incompatible = 1 << 31 },
		func(h *Header) { h.SetBitmaps(&BitmapsExtension{1, 32, 0x70000}) },
		func(h *Header) { h.SetExtension(ExtensionEncryption, make([]byte, 16)) },
	} {
		h := sound()
		change(h)
		b := encoded(f, h)
		f.Add(b[:min(len(b), 1024)])
	}
	for _, c := range impossible {
		b := encoded(f, sound())
		c.patch(b)
		f.Add(b[:1024])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := ReadHeaderUnchecked(reader(b))
		if err != nil {
			return
		}
		_, _, _, _ = h.Encryption()
		h.FeatureNames()
		sup, val := h.Supported(), h.Validate()
		if _, err := ReadHeader(reader(b)); (err == nil) != (sup == nil && val == nil) {
			t.Fatalf("read header: %v; supported: %v; valid: %v", err, sup, val)
		}
		first, err := h.Encode()
		if err != nil {
			return // what came in without padding may not fit with it
		}
		again, err := ParseHeader(first)
		if err != nil {
			t.Fatalf("parse what was encoded: %v", err)
		}
		second, err := again.Encode()
		if err != nil || !bytes.Equal(first, second) {
			t.Fatalf("encoded twice, it is not the same (%v)", err)
		}
		if val != nil {
			return
		}
		g := h.Geometry()
		if h.Size > g.MaxSize() || int64(h.L1Entries)*8 > MaxL1Bytes || int64(h.RefcountTableClusters)*g.ClusterSize > MaxRefcountTableBytes {
			t.Fatalf("header out of bounds was accepted: %+v", h)
		}
	})
}

func FuzzSnapshots(f *testing.F) {
	table, _ := EncodeSnapshots(snapshots())
	f.Add(table, uint32(3))
	f.Add(table[:70], uint32(2))
	f.Add([]byte{}, uint32(9))
	f.Fuzz(func(t *testing.T, b []byte, n uint32) {
		h := sound()
		h.SnapshotsOffset, h.Snapshots = 0, n%100
		saved, _, lost, err := SalvageSnapshots(reader(b), h)
		if err != nil || len(saved)+lost != int(h.Snapshots) {
			t.Fatalf("salvaged %d snapshots, lost %d: %v", len(saved), lost, err)
		}
		if _, err := EncodeSnapshots(saved); err != nil {
			t.Fatalf("what was salvaged cannot be encoded: %v", err)
		}
		all, size, err := ReadSnapshots(reader(b), h)
		if err != nil {
			return
		}
		if len(all) != int(h.Snapshots) || size > MaxSnapshotTableBytes {
			t.Fatalf("%d snapshots in %d bytes", len(all), size)
		}
		g := h.Geometry()
		for i := range all {
			if all[i].Validate(&g) == nil && (all[i].L1Offset%g.ClusterSize != 0 || all[i].L1Entries > MaxL1Bytes/8) {
				t.Fatalf("unsound snapshot was accepted: %+v", all[i])
			}
			b, err := all[i].Encode()
			if err != nil {
				t.Fatal(err)
			}
			if s, n, err := ParseSnapshot(b, 0, h.Size); err != nil || n != len(b) || s.ID != all[i].ID || s.Name != all[i].Name || s.VMState != all[i].VMState || s.DiskSize != all[i].DiskSize {
				t.Fatalf("%+v reads back as %+v, %v", all[i], s, err)
			}
		}
	})
}

func FuzzBitmaps(f *testing.F) {
	dir, _ := EncodeBitmapDirectory(bitmaps())
	f.Add(dir, uint32(3))
	f.Add(dir[:32], uint32(1))
	f.Add(dir[:40], uint32(2))
	f.Fuzz(func(t *testing.T, b []byte, n uint32) {
		h := sound()
		h.SetBitmaps(&BitmapsExtension{n, int64(len(b)), 0x10000})
		all, err := ReadBitmaps(func(p []byte, off int64) error { return reader(b)(p, off-0x10000) }, h)
		if err != nil || len(all) == 0 {
			return
		}
		if len(all) != int(n) {
			t.Fatalf("%d bitmaps, want %d", len(all), n)
		}
		again, err := EncodeBitmapDirectory(all)
		if err != nil || len(again) != len(b) {
			t.Fatalf("%d bytes encoded, want %d: %v", len(again), len(b), err)
		}
	})
}

// No L2 entry makes a host range that lies outside of what the format can address.
func FuzzEntry(f *testing.F) {
	for _, w := range []uint64{0, 1, 1<<63 | 0x50000, 1<<62 | 0x12345, 1<<62 | 1<<61 | 0x200, ^uint64(0)} {
		f.Add(w, uint64(0xf), uint8(16), false, false)
		f.Add(w, uint64(0xff00000000), uint8(21), true, false)
		f.Add(w, uint64(0), uint8(9), false, true)
	}
	f.Fuzz(func(t *testing.T, word, bitmap uint64, bits uint8, extended, dataFile bool) {
		low := uint8(MinClusterBits)
		if extended {
			low = MinClusterBitsExtended
		}
		g := NewGeometry(3, uint32(low+bits%(MaxClusterBits-low+1)), 4, extended, dataFile)
		table := make([]byte, g.ClusterSize)
		binary.BigEndian.PutUint64(table[16:], word)
		binary.BigEndian.PutUint64(table[24:], bitmap)
		e := g.Entry(table, 16/g.L2EntrySize)
		g.PutEntry(table, 0, e)
		if g.Entry(table, 0) != e {
			t.Fatal("entry does not read back")
		}
		switch g.Kind(e) {
		case Compressed:
			off, n, ok := g.Compressed(e)
			if !ok || off <= 0 || off >= MaxHostOffset || n <= 0 || int64(n) > 2*g.ClusterSize {
				t.Fatalf("compressed: %d bytes at %#x", n, off)
			}
		case Data, ZeroAllocated:
			if off := e.Offset(); !g.Aligned(off) || off >= MaxHostOffset || off == 0 && !dataFile {
				t.Fatalf("host offset %#x", off)
			}
		}
		for i := 0; i < g.Subclusters; {
			_, n := g.SubclusterRun(e, i)
			if n < 1 {
				t.Fatal("empty run")
			}
			i += n
		}
	})
}
