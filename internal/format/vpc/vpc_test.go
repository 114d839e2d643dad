// SPDX-License-Identifier: Apache-2.0

package vpc

import (
	"encoding/binary"
	"io"
	"strings"
	"testing"

	"github.com/sluice-blk/sluice/internal/blocktest/imagetest"
	"github.com/sluice-blk/sluice/internal/format/sparse"
)

func footer(kind uint32, creator string, size uint64, cylinders uint16, heads, sectors byte) []byte {
	f := make([]byte, FooterSize)
	copy(f, Magic)
	binary.BigEndian.PutUint32(f[12:], 0x00010000)
	binary.BigEndian.PutUint64(f[16:], 512)
	copy(f[28:], creator)
	binary.BigEndian.PutUint64(f[48:], size)
	binary.BigEndian.PutUint16(f[56:], cylinders)
	f[58], f[59] = heads, sectors
	binary.BigEndian.PutUint32(f[60:], kind)
	return sum(f, 64)
}

func sum(b []byte, at int) []byte {
	binary.BigEndian.PutUint32(b[at:], checksum(b, at))
	return b
}

// dynamic is an image of three blocks of 4 KiB: the second of the file, a hole, the first.
func dynamic() []byte {
	f := footer(Dynamic, "win ", 3*4096, 1, 1, 1)
	h := make([]byte, headerSize)
	copy(h, headerMagic)
	binary.BigEndian.PutUint64(h[16:], 512+headerSize)
	binary.BigEndian.PutUint32(h[24:], 0x00010000)
	binary.BigEndian.PutUint32(h[28:], 3)
	binary.BigEndian.PutUint32(h[32:], 4096)
	b := append(append([]byte{}, f...), sum(h, 36)...)
	table := make([]byte, 512)
	for k, v := range []uint32{4 + 9, never, 4} {
		binary.BigEndian.PutUint32(table[4*k:], v)
	}
	b = append(b, table...)
	b = append(b, make([]byte, 2*(512+4096))...)
	return append(b, f...)
}

func fixed(creator string, size uint64, cylinders uint16) []byte {
	return append(make([]byte, 8192), footer(Fixed, creator, size, cylinders, 1, 4)...)
}

func open(r io.ReaderAt, size int64) (int64, sparse.Map, error) {
	i, err := Open(r, size)
	if err != nil {
		return 0, nil, err
	}
	m, err := i.Map(r)
	return i.Size, m, err
}

func TestDynamic(t *testing.T) {
	b := dynamic()
	for _, image := range [][]byte{b, append(b[:len(b)-512:len(b)-512], make([]byte, 512)...)} { // with the footer at the end, and without
		disk, m, err := open(strings.NewReader(string(image)), int64(len(image)))
		if err != nil || disk != 3*4096 {
			t.Fatalf("a disk of %d bytes, %v", disk, err)
		}
		for _, want := range []sparse.Extent{
			{Kind: sparse.Data, Offset: 0, Length: 4096, Host: (4 + 9 + 1) * 512},
			{Kind: sparse.Hole, Offset: 4096, Length: 4096},
			{Kind: sparse.Data, Offset: 8192, Length: 4096, Host: (4 + 1) * 512},
		} {
			if got := m.Lookup(want.Offset, disk-want.Offset); got != want {
				t.Errorf("%+v, want %+v", got, want)
			}
		}
	}
}

// Who wrote the image tells whether the geometry or the number is the size.
func TestSize(t *testing.T) {
	for _, c := range []struct {
		creator   string
		cylinders uint16
		want      int64
	}{
		{"vpc ", 3, 3 * 4 * 512},
		{"qemu", 3, 3 * 4 * 512},
		{"vbox", 3, 3 * 4 * 512},
		{"win ", 3, 7168},
		{"qem2", 3, 7168},
		{"d2v ", 3, 7168},
		{"tap\x00", 3, 7168},
		{"CTXS", 3, 7168},
	} {
		b := fixed(c.creator, 7168, c.cylinders)
		i, err := Open(strings.NewReader(string(b)), int64(len(b)))
		if err != nil || i.Size != c.want {
			t.Errorf("%q: a disk of %d bytes, want %d, %v", c.creator, i.Size, c.want, err)
		}
	}
	f := footer(Fixed, "vpc ", 4096, 65535, 16, 255)
	if n, err := diskSize(f); n != 4096 || err != nil {
		t.Errorf("a geometry at its end: %d, %v", n, err)
	}
}

// A guest that writes a footer to the beginning of its fixed disk changes nothing.
func TestGuestWritesAFooter(t *testing.T) {
	b := fixed("win ", 8192, 1)
	copy(b, dynamic()[:4096])
	i, err := Open(strings.NewReader(string(b)), int64(len(b)))
	if err != nil || i.Type != Fixed || i.Size != 8192 {
		t.Errorf("%+v, %v", i, err)
	}
}

var changes = []struct {
	imagetest.Change
	sumAt, sumLength int // where a checksum is made right afterwards
}{
	{imagetest.Change{Name: "magic", At: 512, To: []byte("x"), Want: "no magic"}, 0, 0},
	{imagetest.Change{Name: "header checksum", At: 512 + 40, To: []byte("x"), Want: "checksum"}, 0, 0},
	{imagetest.Change{Name: "header version", At: 512 + 25, To: []byte{2}, Want: "version"}, 512 + 36, headerSize},
	{imagetest.Change{Name: "table beyond the end", At: 512 + 16, To: []byte{0x7f}, Want: "beyond the end"}, 512 + 36, headerSize},
	{imagetest.Change{Name: "table reaches beyond the end", At: 512 + 22, To: []byte{0x2d, 0xff}, Want: "not inside"}, 512 + 36, headerSize},
	{imagetest.Change{Name: "too few entries", At: 512 + 31, To: []byte{2}, Want: "does not fit"}, 512 + 36, headerSize},
	{imagetest.Change{Name: "many entries", At: 512 + 28, To: []byte{255, 255, 255, 255}}, 512 + 36, headerSize},
	{imagetest.Change{Name: "block size 0", At: 512 + 32, To: []byte{0, 0, 0, 0}, Want: "power of two"}, 512 + 36, headerSize},
	{imagetest.Change{Name: "block size odd", At: 512 + 32, To: []byte{0, 0, 24, 0}, Want: "power of two"}, 512 + 36, headerSize},
	{imagetest.Change{Name: "block size huge", At: 512 + 32, To: []byte{0x80, 0, 0, 0}, Want: "beyond the end"}, 512 + 36, headerSize},
	{imagetest.Change{Name: "block beyond the end", At: 512 + headerSize, To: []byte{0x7f}, Want: "beyond the end"}, 0, 0},
	{imagetest.Change{Name: "footer version", At: -512 + 13, To: []byte{2}, Want: "version"}, -512 + 64, FooterSize},
	{imagetest.Change{Name: "type", At: -512 + 63, To: []byte{9}, Want: "type 9"}, -512 + 64, FooterSize},
	{imagetest.Change{Name: "differencing", At: -512 + 63, To: []byte{4}, Want: "differencing"}, -512 + 64, FooterSize},
	{imagetest.Change{Name: "fixed and too short", At: -512 + 63, To: []byte{2}, Want: "cut short"}, -512 + 64, FooterSize},
	{imagetest.Change{Name: "size", At: -512 + 48, To: []byte{255}, Want: "2 TiB"}, -512 + 64, FooterSize},
	{imagetest.Change{Name: "header beyond the end", At: -512 + 16, To: []byte{255}, Want: "beyond the end"}, -512 + 64, FooterSize},
}

func TestWhatIsRefused(t *testing.T) {
	for _, c := range changes {
		b := c.Apply(dynamic())
		if at := c.sumAt; at != 0 {
			if at < 0 {
				at += len(b)
			}
			begin := at / 512 * 512
			sum(b[begin:begin+c.sumLength], at-begin)
		}
		err := imagetest.Survives(t, open, b)
		if (err == nil) != (c.Want == "") || err != nil && !strings.Contains(err.Error(), c.Want) {
			t.Errorf("%s: %v, want %q", c.Name, err, c.Want)
		}
	}
	short := fixed("win ", 8192+512, 1)
	if err := imagetest.Survives(t, open, short); err == nil || !strings.Contains(err.Error(), "cut short") {
		t.Errorf("a fixed image that is cut short: %v", err)
	}
	for n := 0; n < len(dynamic()); n += 101 {
		_ = imagetest.Survives(t, open, dynamic()[:n])
	}
}

// The checksums are made right, so that what is behind them is reached.
func FuzzOpen(f *testing.F) {
	f.Add(dynamic(), true)
	f.Add(fixed("win ", 8192, 1), true)
	f.Add(fixed("vpc ", 8192, 65535), true)
	for _, c := range changes {
		f.Add(c.Apply(dynamic()), true)
		f.Add(c.Apply(dynamic()), false)
	}
	f.Fuzz(func(t *testing.T, b []byte, right bool) {
		if right && len(b) >= FooterSize {
			sum(b[:FooterSize], 64)
			sum(b[len(b)-FooterSize:], 64)
		}
		if right && len(b) >= 512+headerSize {
			sum(b[512:512+headerSize], 36)
		}
		_ = imagetest.Survives(t, open, b)
	})
}
