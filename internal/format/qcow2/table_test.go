// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"encoding/binary"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func snapshots() []Snapshot {
	return []Snapshot{
		{L1Offset: 0x60000, L1Entries: 2, ID: "1", Name: "first", Seconds: 1700000000, Nanoseconds: 5, VMClock: 9,
			VMState: 1 << 40, DiskSize: 1 << 30, ICount: NoICount, ExtraSize: 16},
		{L1Offset: 0x70000, L1Entries: 2, ID: "2", Name: strings.Repeat("long", 2000), DiskSize: 1 << 29, ICount: 77,
			ExtraSize: 30, Unknown: []byte("tailed")},
		{L1Offset: 0x80000, L1Entries: 2, ID: "3", Name: "", VMState: 12, DiskSize: 1 << 30, ICount: NoICount, ExtraSize: 16},
	}
}

func TestSnapshotTableRoundTrip(t *testing.T) {
	want := snapshots()
	table, err := EncodeSnapshots(want)
	if err != nil {
		t.Fatal(err)
	}
	h := sound()
	h.Snapshots = uint32(len(want))
	file := append(make([]byte, h.SnapshotsOffset), table...)
	got, n, err := ReadSnapshots(reader(file), h)
	if err != nil || n != int64(len(table)) {
		t.Fatalf("%d bytes, want %d: %v", n, len(table), err)
	}
	for i := range got {
		if got[i].Unknown != nil && len(got[i].Unknown) == 0 {
			got[i].Unknown = nil
		}
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("snapshots changed (-want +got):\n%s", d)
	}
}

// Entries of version 2 may have no extra data: the state's size is the 32-bit one, the disk's that of the header.
func TestSnapshotWithoutExtraData(t *testing.T) {
	b := make([]byte, 48)
	binary.BigEndian.PutUint32(b[32:], 4711)
	binary.BigEndian.PutUint16(b[12:], 1)
	b[40] = '7'
	s, n, err := ParseSnapshot(b, 0, 1<<20)
	if err != nil || n != 48 || s.VMState != 4711 || s.DiskSize != 1<<20 || s.ID != "7" || s.ICount != NoICount {
		t.Errorf("%+v, %d, %v", s, n, err)
	}
}

func TestSnapshotThatIsNotSound(t *testing.T) {
	g := NewGeometry(3, 16, 4, false, false)
	for name, s := range map[string]Snapshot{
		"large L1":      {L1Offset: 0x10000, L1Entries: MaxL1Bytes/8 + 1},
		"misaligned L1": {L1Offset: 0x10200, L1Entries: 1},
		"L1 at header":  {L1Offset: 0, L1Entries: 1},
		"L1 far away":   {L1Offset: -0x10000, L1Entries: 1},
		"huge disk":     {L1Offset: 0x10000, L1Entries: 1, DiskSize: -1 << 60},
		"small L1":      {L1Offset: 0x10000, L1Entries: 1, DiskSize: 1 << 30},
	} {
		if s.Validate(&g) == nil {
			t.Errorf("%s was accepted", name)
		}
	}
	b := make([]byte, 48)
	binary.BigEndian.PutUint32(b[36:], MaxSnapshotExtra+1)
	if _, _, err := ParseSnapshot(b, 0, 0); err == nil {
		t.Error("too much extra data was accepted")
	}
	binary.BigEndian.PutUint32(b[36:], 16)
	if _, _, err := ParseSnapshot(b, 0, 0); err == nil {
		t.Error("an entry that is cut off was accepted")
	}
}

// A table of zeros behind the end of a small file costs what its entries cost.
func TestSnapshotTableBeyondTheFile(t *testing.T) {
	h := sound()
	h.Snapshots = MaxSnapshots
	all, n, err := ReadSnapshots(reader(nil), h)
	if err != nil || len(all) != MaxSnapshots || n != 40*MaxSnapshots {
		t.Errorf("%d snapshots, %d bytes, %v", len(all), n, err)
	}
}

func bitmaps() []Bitmap {
	return []Bitmap{
		{TableOffset: 0x90000, TableEntries: 1, Flags: BitmapAuto, Type: BitmapDirty, GranularityBits: 16, Name: "b0"},
		{TableOffset: 0xa0000, TableEntries: 3, Flags: BitmapInUse, Type: BitmapDirty, GranularityBits: 9, Name: strings.Repeat("n", 1023)},
		{TableOffset: 0xb0000, TableEntries: 1, Flags: BitmapExtraCompatible, Type: BitmapDirty, GranularityBits: 31, Name: "b2", Extra: []byte("extra")},
	}
}

func TestBitmapDirectoryRoundTrip(t *testing.T) {
	want := bitmaps()
	dir, err := EncodeBitmapDirectory(want)
	if err != nil {
		t.Fatal(err)
	}
	h := sound()
	h.SetBitmaps(&BitmapsExtension{Bitmaps: 3, DirectorySize: int64(len(dir)), DirectoryOffset: 0x80000})
	file := append(make([]byte, 0x80000), dir...)
	got, err := ReadBitmaps(reader(file), h)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("bitmaps changed (-want +got):\n%s", d)
	}
	if !got[0].Usable() || got[1].Usable() || !got[2].Usable() {
		t.Error("wrong bitmaps are usable")
	}
	h.Autoclear = 0
	if _, ok, err := h.Bitmaps(); !ok || err != nil {
		t.Errorf("bitmaps that are not consistent are still there: %v, %v", ok, err)
	}
}

func TestBitmapDirectoryThatIsNotSound(t *testing.T) {
	h := sound()
	dir, _ := EncodeBitmapDirectory(bitmaps())
	read := func(n uint32, size int64, change func(b []byte)) error {
		h.SetBitmaps(&BitmapsExtension{Bitmaps: n, DirectorySize: size, DirectoryOffset: 0x80000})
		file := append(make([]byte, 0x80000), dir...)
		change(file[0x80000:])
		_, err := ReadBitmaps(reader(file), h)
		return err
	}
	whole := int64(len(dir))
	be := binary.BigEndian
	for name, err := range map[string]error{
		"longer":         read(3, whole+8, func([]byte) {}),
		"shorter":        read(3, whole-8, func([]byte) {}),
		"fewer":          read(2, whole, func([]byte) {}),
		"more":           read(4, whole, func([]byte) {}),
		"none":           read(0, whole, func([]byte) {}),
		"huge":           read(3, MaxBitmapDirectoryBytes+8, func([]byte) {}),
		"type":           read(3, whole, func(b []byte) { b[16] = 2 }),
		"granularity":    read(3, whole, func(b []byte) { b[17] = 8 }),
		"flags":          read(3, whole, func(b []byte) { b[12] = 1 }),
		"table entries":  read(3, whole, func(b []byte) { be.PutUint32(b[8:], MaxBitmapTableEntries+1) }),
		"table at 0":     read(3, whole, func(b []byte) { be.PutUint64(b, 0) }),
		"table unsound":  read(3, whole, func(b []byte) { be.PutUint64(b, 0x90001) }),
		"no name":        read(3, whole, func(b []byte) { be.PutUint16(b[18:], 0) }),
		"long name":      read(3, whole, func(b []byte) { be.PutUint16(b[18:], 1024) }),
		"extra":          read(3, whole, func(b []byte) { be.PutUint32(b[20:], 1<<31) }),
		"the same names": read(2, 64, func(b []byte) { copy(b[32:], b[:32]) }),
	} {
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func TestBitmapSizes(t *testing.T) {
	g := NewGeometry(3, 9, 4, false, false)
	for _, c := range []struct {
		size           int64
		bits           uint8
		bytes, entries int64
	}{{0, 16, 0, 0}, {1, 16, 1, 1}, {8 << 16, 16, 1, 1}, {8<<16 + 1, 16, 2, 1}, {1 << 30, 9, 1 << 18, 512}} {
		if b, e := BitmapBytes(c.size, c.bits), g.BitmapTableEntries(c.size, c.bits); b != c.bytes || e != c.entries {
			t.Errorf("disk of %d, granularity 2^%d: %d bytes in %d clusters, want %d in %d", c.size, c.bits, b, e, c.bytes, c.entries)
		}
	}
}
