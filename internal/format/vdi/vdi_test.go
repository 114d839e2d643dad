// SPDX-License-Identifier: Apache-2.0

package vdi

import (
	"encoding/binary"
	"io"
	"strings"
	"testing"

	"github.com/sluice-blk/sluice/internal/blocktest/imagetest"
	"github.com/sluice-blk/sluice/internal/format/sparse"
)

// image is a dynamic image of three blocks and a half of 4 KiB: the second block of the file, a hole, zeros, the first.
func image() []byte {
	b := make([]byte, 1024+2*4096)
	copy(b[MagicOffset:], Magic)
	for at, v := range map[int]uint32{
		0x44: 0x00010001, 0x48: 400, 0x4c: Dynamic, 0x154: 512, 0x158: 1024, 0x168: 512, 0x170: 3*4096 + 1600, 0x178: 4096, 0x180: 4, 0x184: 2,
		512: 1, 516: never, 520: discarded, 524: 0,
	} {
		binary.LittleEndian.PutUint32(b[at:], v)
	}
	return b
}

func open(r io.ReaderAt, size int64) (int64, sparse.Map, error) {
	i, err := Open(r, size)
	if err != nil {
		return 0, nil, err
	}
	m, err := i.Map(r)
	return i.Size, m, err
}

func TestImage(t *testing.T) {
	disk, m, err := open(strings.NewReader(string(image())), int64(len(image())))
	if err != nil || disk != 3*4096+2048 {
		t.Fatalf("a disk of %d bytes, %v", disk, err)
	}
	for _, want := range []sparse.Extent{
		{Kind: sparse.Data, Offset: 0, Length: 4096, Host: 1024 + 4096},
		{Kind: sparse.Hole, Offset: 4096, Length: 4096},
		{Kind: sparse.Zero, Offset: 8192, Length: 4096},
		{Kind: sparse.Data, Offset: 12288, Length: 2048, Host: 1024},
	} {
		if got := m.Lookup(want.Offset, disk-want.Offset); got != want {
			t.Errorf("%+v, want %+v", got, want)
		}
	}
}

var changes = []imagetest.Change{
	{Name: "magic", At: MagicOffset, To: []byte("QFI"), Want: "no magic"},
	{Name: "version", At: 0x44, To: []byte{2}, Want: "version"},
	{Name: "type", At: 0x4c, To: []byte{4}, Want: "type 4"},
	{Name: "parent", At: 0x1a8, To: []byte{1}, Want: "parent"},
	{Name: "table beyond the end", At: 0x154, To: []byte{0, 0, 0, 0x7f}, Want: "not inside the file"},
	{Name: "table on no sector", At: 0x154, To: []byte{1}, Want: "sector"},
	{Name: "data on no sector", At: 0x158, To: []byte{1}, Want: "sector"},
	{Name: "data at the header", At: 0x158, To: []byte{0, 0}, Want: "no block can lie"},
	{Name: "sector size", At: 0x168, To: []byte{0, 16}, Want: "sectors of 4096"},
	{Name: "block size 0", At: 0x178, To: []byte{0, 0}, Want: "power of two"},
	{Name: "block size odd", At: 0x178, To: []byte{0, 24}, Want: "power of two"},
	{Name: "block size huge", At: 0x178, To: []byte{0, 0, 0, 0x80}, Want: "beyond the end"},
	{Name: "extra", At: 0x17c, To: []byte{1}, Want: "extra"},
	{Name: "size beyond the blocks", At: 0x170, To: []byte{1, 0x40}, Want: "does not fit"},
	{Name: "size beyond all", At: 0x170, To: []byte{255, 255, 255, 255, 255, 255, 255, 255}, Want: "does not fit"},
	{Name: "blocks beyond all", At: 0x180, To: []byte{255, 255, 255, 255}},
	{Name: "block beyond the end", At: 512, To: []byte{2}, Want: "cut short"},
	{Name: "last block reaches far", At: 524, To: []byte{255, 255, 255, 0x7f}, Want: "cut short"},
}

func TestWhatIsRefused(t *testing.T) {
	for _, c := range changes {
		err := imagetest.Survives(t, open, c.Apply(image()))
		if (err == nil) != (c.Want == "") || err != nil && !strings.Contains(err.Error(), c.Want) {
			t.Errorf("%s: %v, want %q", c.Name, err, c.Want)
		}
	}
	for n := 0; n <= len(image())-512; n += 97 {
		if imagetest.Survives(t, open, image()[:n]) == nil {
			t.Errorf("an image cut at %d is taken", n)
		}
	}
}

// A table of the largest disk, of which the file has all.
func TestLargeTable(t *testing.T) {
	b := image()
	binary.LittleEndian.PutUint64(b[0x170:], sparse.MaxBlocks*4096)
	binary.LittleEndian.PutUint32(b[0x180:], sparse.MaxBlocks)
	if err := imagetest.Survives(t, open, b); err == nil {
		t.Error("a table that is not there is taken")
	}
	binary.LittleEndian.PutUint64(b[0x170:], sparse.MaxBlocks*4096+512)
	binary.LittleEndian.PutUint32(b[0x180:], sparse.MaxBlocks+1)
	if err := imagetest.Survives(t, open, b); err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Error(err)
	}
}

func FuzzOpen(f *testing.F) {
	f.Add(image())
	for _, c := range changes {
		f.Add(c.Apply(image()))
	}
	f.Fuzz(func(t *testing.T, b []byte) { _ = imagetest.Survives(t, open, b) })
}
