// SPDX-License-Identifier: Apache-2.0

package vmdk

import (
	"encoding/binary"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-blk/sluice/internal/blocktest/imagetest"
	"github.com/sluice-blk/sluice/internal/format/sparse"
)

const text = `# Disk DescriptorFile
version=1
CID=1badcafe
parentCID=ffffffff
createType="monolithicSparse"

# Extent description
RW 1030 SPARSE "disk.vmdk"

ddb.adapterType = "ide"
`

// Where things are in the images below, in sectors.
const (
	atDescriptor = 1
	atDirectory  = 3
	atTable1     = 4 // of 512 grains of one sector
	atTable2     = 12
	atGrains     = 20
	grains       = 4
)

// head is the header of a disk of 1030 grains of one sector.
func head(flags uint32, directory uint64) []byte {
	h := make([]byte, headerSize)
	copy(h, Magic)
	binary.LittleEndian.PutUint32(h[4:], 2)
	binary.LittleEndian.PutUint32(h[8:], flags|flagNewlines)
	for at, v := range map[int]uint64{12: 1030, 20: 1, 28: atDescriptor, 36: 2, 56: directory} {
		binary.LittleEndian.PutUint64(h[at:], v)
	}
	binary.LittleEndian.PutUint32(h[44:], tableEach)
	copy(h[73:], "\n \r\n")
	if flags&flagCompressed != 0 {
		h[77] = deflate
	}
	return h
}

// image has a directory of three tables, of which the second is not there.
func image(flags uint32, directory uint64) []byte {
	b := make([]byte, (atGrains+grains)*sector)
	copy(b, head(flags, directory))
	copy(b[atDescriptor*sector:], text)
	put := func(at int, v ...uint32) {
		for k, e := range v {
			binary.LittleEndian.PutUint32(b[at*sector+4*k:], e)
		}
	}
	put(atDirectory, atTable1, 0, atTable2)
	put(atTable1, atGrains+1, atGrains+2, 0, 1)
	put(atTable2, 0, 0, 0, 0, 0, atGrains)
	return b
}

// stream is the same with its directory told at the end.
func stream() []byte {
	b := image(flagCompressed|flagMarkers|flagZeroGrains, atTheEnd)
	f := make([]byte, footerSize)
	binary.LittleEndian.PutUint64(f, 1)
	f[12] = footerMarker
	copy(f[sector:], head(flagCompressed|flagMarkers|flagZeroGrains, atDirectory))
	return append(b, f...)
}

func open(r io.ReaderAt, size int64) (int64, sparse.Map, error) {
	i, err := Open(r, size)
	if err != nil {
		return 0, nil, err
	}
	m, err := i.Map(r)
	return i.Size, m, err
}

func extents(t *testing.T, b []byte) (all []sparse.Extent) {
	t.Helper()
	disk, m, err := open(strings.NewReader(string(b)), int64(len(b)))
	if err != nil || disk != 1030*sector {
		t.Fatalf("a disk of %d bytes, %v", disk, err)
	}
	for at := int64(0); at < disk; {
		e := m.Lookup(at, disk-at)
		all = append(all, e)
		at += e.Length
	}
	return all
}

func TestSparse(t *testing.T) {
	want := []sparse.Extent{
		{Kind: sparse.Data, Offset: 0, Length: 1024, Host: 21 * sector},
		{Kind: sparse.Hole, Offset: 1024, Length: 512},
		{Kind: sparse.Zero, Offset: 1536, Length: 512},
		{Kind: sparse.Hole, Offset: 2048, Length: 1025 * sector},
		{Kind: sparse.Data, Offset: 1029 * sector, Length: 512, Host: 20 * sector},
	}
	if d := cmp.Diff(want, extents(t, image(flagZeroGrains, atDirectory))); d != "" {
		t.Error(d)
	}
	for k := range want {
		if k == 0 || k == 4 {
			want[k].Kind = sparse.Deflate
		}
	}
	room := int64(2 * sector)
	want[4].Room = room
	want = slices.Replace(want, 0, 1,
		sparse.Extent{Kind: sparse.Deflate, Offset: 0, Length: 512, Host: 21 * sector, Room: 512},
		sparse.Extent{Kind: sparse.Deflate, Offset: 512, Length: 512, Host: 22 * sector, Room: room})
	if d := cmp.Diff(want, extents(t, stream())); d != "" {
		t.Error(d)
	}
}

func TestDescriptor(t *testing.T) {
	b := image(flagZeroGrains, atDirectory)
	i, err := Open(strings.NewReader(string(b)), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	want := &Descriptor{CID: 0x1badcafe, ParentCID: 0xffffffff, CreateType: "monolithicSparse",
		Extents: []Extent{{Sectors: 1030, Type: "SPARSE", File: "disk.vmdk"}}}
	if d := cmp.Diff(want, i.Descriptor); d != "" {
		t.Error(d)
	}
	for line, want := range map[string]Extent{
		`RW 1 FLAT "a b-flat.vmdk" 63`:   {1, "FLAT", "a b-flat.vmdk", 63},
		`RDONLY  7   ZERO`:               {7, "ZERO", "", 0},
		`NOACCESS 9 VMFS "x`:             {9, "VMFS", "x", 0},
		`RW 1 FLAT "x" y`:                {1, "FLAT", "x", 0},
		`RW -1 FLAT "x"`:                 {},
		`RW 99999999999999999999 FLAT x`: {},
		`RW 1 FLAT x 0`:                  {},
		`WR 1 FLAT "x"`:                  {},
		`RW`:                             {},
	} {
		if e, ok := parseExtent(line); e != want && ok || ok != (want != Extent{}) {
			t.Errorf("%s: %+v, %v", line, e, ok)
		}
	}
}

// What is made of several files is told about, and says what to do.
func TestSeveralFiles(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"createType=\"monolithicFlat\"\nRW 100 FLAT \"d-flat.vmdk\" 0\n", `"d-flat.vmdk" as it is: use that, with format=raw`},
		{"createType=\"twoGbMaxExtentSparse\"\nRW 100 SPARSE \"a\"\nRW 28 SPARSE \"b\"\n", "make it one file first"},
	} {
		b := DescriptorMagic + "\nversion=1\n" + c.text
		i, err := Open(strings.NewReader(b), int64(len(b)))
		if err != nil || i.Size < 100*sector || len(i.Descriptor.Extents) == 0 {
			t.Fatalf("%+v, %v", i, err)
		}
		if _, err := i.Map(strings.NewReader(b)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q", err, c.want)
		}
	}
}

var changes = []imagetest.Change{
	{Name: "magic", At: 0, To: []byte("VMDK"), Want: "no magic"},
	{Name: "ESX", At: 0, To: []byte("COWD"), Want: "ESX"},
	{Name: "version", At: 4, To: []byte{9}, Want: "version 9"},
	{Name: "as text", At: 74, To: []byte("\n"), Want: "transferred as text"},
	{Name: "grain 0", At: 20, To: []byte{0}, Want: "power of two"},
	{Name: "grain odd", At: 20, To: []byte{3}, Want: "power of two"},
	{Name: "grain huge", At: 20, To: []byte{0, 0, 0, 0, 1}, Want: "power of two"},
	{Name: "capacity huge", At: 12, To: []byte{255, 255, 255, 255, 255, 255, 255, 255}, Want: "sectors"},
	{Name: "capacity large", At: 12, To: []byte{0, 0, 0, 255}, Want: "more than"},
	{Name: "capacity beyond the directory", At: 12, To: []byte{0, 0, 0, 1}, Want: "grain directory"},
	{Name: "descriptor beyond the end", At: 28, To: []byte{255}, Want: "descriptor"},
	{Name: "descriptor far beyond", At: 28, To: []byte{255, 255, 255, 255, 255, 255, 255, 255}, Want: "descriptor"},
	{Name: "descriptor huge", At: 36, To: []byte{0, 0, 0, 1}, Want: "descriptor"},
	{Name: "no descriptor", At: 36, To: []byte{0}},
	{Name: "parent", At: sector + strings.Index(text, "ffffffff"), To: []byte("12345678"), Want: "parent"},
	{Name: "CID", At: sector + strings.Index(text, "1badcafe"), To: []byte("none"), Want: "CID"},
	{Name: "table entries", At: 44, To: []byte{0, 1}, Want: "256 entries"},
	{Name: "no directory", At: 56, To: []byte{0}, Want: "directory at sector 0"},
	{Name: "directory beyond the end", At: 56, To: []byte{255}, Want: "not inside"},
	{Name: "directory far beyond", At: 56, To: []byte{0, 0, 0, 0, 0, 0, 0, 1}, Want: "directory"},
	{Name: "table beyond the end", At: atDirectory * sector, To: []byte{255}, Want: "not inside"},
	{Name: "grain beyond the end", At: atTable1 * sector, To: []byte{255}, Want: "beyond the end"},
	{Name: "directory at the end, no footer", At: 56, To: []byte{255, 255, 255, 255, 255, 255, 255, 255}, Want: "footer"},
}

var streamChanges = []imagetest.Change{
	{Name: "compression", At: -2*sector + 77, To: []byte{2}, Want: "compression 2"},
	{Name: "no markers", At: -2*sector + 10, To: []byte{1}, Want: "no markers"},
	{Name: "grain too large", At: -2*sector + 21, To: []byte{0x10}, Want: "power of two"},
	{Name: "grain large", At: -2*sector + 20, To: []byte{0, 0x10}, Want: "compressed grains of 2097152"},
	{Name: "not a footer", At: -3*sector + 12, To: []byte{1}, Want: "cut short"},
	{Name: "footer without directory", At: -2*sector + 56, To: []byte{255, 255, 255, 255, 255, 255, 255, 255}, Want: "does not tell either"},
	{Name: "footer without magic", At: -2 * sector, To: []byte{0}, Want: "no magic"},
}

func TestWhatIsRefused(t *testing.T) {
	test := func(b []byte, all []imagetest.Change) {
		for _, c := range all {
			err := imagetest.Survives(t, open, c.Apply(b))
			if (err == nil) != (c.Want == "") || err != nil && !strings.Contains(err.Error(), c.Want) {
				t.Errorf("%s: %v, want %q", c.Name, err, c.Want)
			}
		}
		for n := 0; n < len(b); n += 173 {
			_ = imagetest.Survives(t, open, b[:n])
		}
	}
	test(image(flagZeroGrains, atDirectory), changes)
	test(stream(), streamChanges)
}

// A directory whose entries all name one table cannot make the map larger than the file.
func TestSharedTables(t *testing.T) {
	b := make([]byte, 1<<20)
	h := head(0, 1)
	binary.LittleEndian.PutUint64(h[12:], 512*120000)
	binary.LittleEndian.PutUint64(h[36:], 0)
	copy(b, h)
	for at := sector; at < len(b); at += 4 {
		binary.LittleEndian.PutUint32(b[at:], 8)
	}
	if err := imagetest.Survives(t, open, b); err == nil || !strings.Contains(err.Error(), "whole file") {
		t.Error(err)
	}
}

func FuzzOpen(f *testing.F) {
	f.Add(image(flagZeroGrains, atDirectory))
	f.Add(image(0, atDirectory))
	f.Add(stream())
	f.Add([]byte(DescriptorMagic + "\n" + text))
	for _, c := range changes {
		f.Add(c.Apply(image(flagZeroGrains, atDirectory)))
	}
	for _, c := range streamChanges {
		f.Add(c.Apply(stream()))
	}
	f.Fuzz(func(t *testing.T, b []byte) { _ = imagetest.Survives(t, open, b) })
}

func FuzzParseMarker(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < MarkerSize {
			return
		}
		if at, n, err := ParseMarker(b); err == nil && (at < 0 || at%sector != 0 || n <= 0 || n > 2*maxCompressed) {
			t.Errorf("a grain of %d bytes for byte %d", n, at)
		}
	})
}
