// SPDX-License-Identifier: Apache-2.0

package virtioblk

import (
	"bytes"
	"encoding/hex"
	"math"
	"testing"
)

// Goal: the wire form is that of the specification, and no value that a guest can send leads outside of the disk.
// Method: bytes written by hand from the specification's structures, tables of limits, and fuzzing against sums in
// wider arithmetic.

func TestConfigurationSpaceLiesAsSpecified(t *testing.T) {
	c := Config{
		Capacity: 0x0102030405060708, SizeMax: 0x11121314, SegMax: 0x21222324,
		Cylinders: 0x3132, Heads: 0x33, Sectors: 0x34, BlkSize: 0x41424344,
		PhysicalBlockExp: 0x51, AlignmentOffset: 0x52, MinIOSize: 0x5354, OptIOSize: 0x61626364,
		Writeback: 1, NumQueues: 0x7172,
		MaxDiscardSectors: 0x81828384, MaxDiscardSeg: 0x91929394, DiscardSectorAlignment: 0xa1a2a3a4,
		MaxWriteZeroesSectors: 0xb1b2b3b4, MaxWriteZeroesSeg: 0xc1c2c3c4, WriteZeroesMayUnmap: 1,
	}
	want := "0807060504030201" + "14131211" + "24232221" + "32313334" + "44434241" + "51525453" + "64636261" +
		"01007271" + "84838281" + "94939291" + "a4a3a2a1" + "b4b3b2b1" + "c4c3c2c1" + "01000000"
	b := c.Encode()
	if got := hex.EncodeToString(b[:]); got != want {
		t.Errorf("encoded\n%s, want\n%s", got, want)
	}
	if b[OffsetWriteback] != 1 {
		t.Errorf("byte %d is not writeback", OffsetWriteback)
	}
	if got := DecodeConfig(b[:]); got != c {
		t.Errorf("decoded %+v, want %+v", got, c)
	}
	if got := DecodeConfig(b[:10]); got != (Config{Capacity: c.Capacity, SizeMax: 0x1314}) {
		t.Errorf("decoded from 10 bytes: %+v", got)
	}
}

func TestConfigurationSpaceIsReadInAnyPiece(t *testing.T) {
	c := Config{Capacity: math.MaxUint64, WriteZeroesMayUnmap: 0xff, NumQueues: 0xffff}
	all := c.Encode()
	whole := append(all[:], make([]byte, ConfigSpace-ConfigSize)...)
	for _, r := range []struct {
		offset uint32
		n      int
		ok     bool
	}{
		{0, 0, true}, {0, ConfigSize, true}, {0, 96, true}, {0, ConfigSpace, true}, {0, ConfigSpace + 1, false},
		{32, 1, true}, {34, 2, true}, {56, 8, true}, {60, 36, true}, {200, 56, true}, {200, 57, false},
		{ConfigSpace, 0, true}, {ConfigSpace, 1, false}, {ConfigSpace + 1, 0, false}, {0xfffffff0, 60, false},
		{math.MaxUint32, 1, false},
	} {
		p := bytes.Repeat([]byte{0xee}, r.n)
		err := c.ReadAt(p, r.offset)
		if (err == nil) != r.ok {
			t.Errorf("%d bytes at %d: %v, want ok %v", r.n, r.offset, err, r.ok)
		}
		want := bytes.Repeat([]byte{0xee}, r.n)
		if r.ok {
			want = whole[r.offset:][:r.n]
		}
		if !bytes.Equal(p, want) {
			t.Errorf("%d bytes at %d are %x, want %x", r.n, r.offset, p, want)
		}
	}
}

func TestHeader(t *testing.T) {
	b, _ := hex.DecodeString("0d000000" + "efbeadde" + "0807060504030201")
	h, ok := DecodeHeader(b)
	if want := (Header{TypeWriteZeroes, 0xdeadbeef, 0x0102030405060708}); !ok || h != want {
		t.Errorf("decoded %+v, %v", h, ok)
	}
	out := make([]byte, HeaderSize)
	h.Encode(out)
	if !bytes.Equal(out, b) {
		t.Errorf("encoded %x", out)
	}
	for n := range HeaderSize {
		if _, ok := DecodeHeader(b[:n]); ok {
			t.Errorf("a header of %d bytes was taken", n)
		}
	}
}

func TestReadsAndWritesStayOnTheDisk(t *testing.T) {
	const capacity = 2048
	for _, c := range []struct {
		sector   uint64
		length   int64
		capacity uint64
		want     Status
	}{
		{0, 0, capacity, StatusOK}, {0, 512, capacity, StatusOK}, {0, 512, 0, StatusIOErr},
		{capacity - 1, 512, capacity, StatusOK}, {capacity - 1, 1024, capacity, StatusIOErr},
		{capacity, 512, capacity, StatusIOErr}, {capacity, 0, capacity, StatusOK}, {capacity + 1, 0, capacity, StatusIOErr},
		{0, capacity * 512, capacity, StatusOK}, {0, capacity*512 + 512, capacity, StatusIOErr},
		{0, 1, capacity, StatusIOErr}, {0, 511, capacity, StatusIOErr}, {0, 513, capacity, StatusIOErr},
		{0, 1000, capacity, StatusIOErr}, {0, 448 + 64, capacity, StatusOK}, {0, -512, capacity, StatusIOErr},
		{1 << 55, 512, capacity, StatusIOErr}, {math.MaxUint64, 512, capacity, StatusIOErr},
		{math.MaxUint64, 4096, capacity, StatusIOErr}, {math.MaxUint64 - 6, 4096, capacity, StatusIOErr},
		{1 << 55, 512, math.MaxUint64, StatusIOErr}, {0, 512, math.MaxUint64, StatusIOErr}, // no place for such a disk
		{0, 512, 1 << 54, StatusIOErr}, {0, 512, 1<<54 - 1, StatusOK}, {1<<54 - 2, 512, 1<<54 - 1, StatusOK},
	} {
		h := Header{Sector: c.sector}
		offset, s := h.Range(c.length, c.capacity)
		if s != c.want || (s == StatusOK && offset != int64(c.sector)*512) {
			t.Errorf("sector %#x, %d bytes of %d sectors: %d at %d, want %d", c.sector, c.length, c.capacity, s, offset, c.want)
		}
	}
}

func TestRangesOfDiscardAndWriteZeroes(t *testing.T) {
	const capacity, most = 2048, 1024
	for _, c := range []struct {
		name string
		t    RequestType
		r    DiscardRange
		want Status
	}{
		{"discard", TypeDiscard, DiscardRange{0, 8, 0}, StatusOK},
		{"discard with unmap", TypeDiscard, DiscardRange{0, 8, RangeUnmap}, StatusUnsupp},
		{"discard with a reserved flag", TypeDiscard, DiscardRange{0, 8, 1 << 31}, StatusUnsupp},
		{"zeroes", TypeWriteZeroes, DiscardRange{0, 8, 0}, StatusOK},
		{"zeroes with unmap", TypeWriteZeroes, DiscardRange{0, 8, RangeUnmap}, StatusOK},
		{"zeroes with a reserved flag", TypeWriteZeroes, DiscardRange{0, 8, 0x80}, StatusUnsupp},
		{"zeroes with unmap and a reserved flag", TypeWriteZeroes, DiscardRange{0, 8, 3}, StatusUnsupp},
		{"secure erase with a flag", TypeSecureErase, DiscardRange{0, 8, 1}, StatusUnsupp},
		{"a bad flag counts more than a bad range", TypeDiscard, DiscardRange{capacity, 8, 2}, StatusUnsupp},
		{"to the end", TypeDiscard, DiscardRange{capacity - 8, 8, 0}, StatusOK},
		{"across the end", TypeDiscard, DiscardRange{capacity - 1, 2, 0}, StatusIOErr},
		{"behind the end", TypeDiscard, DiscardRange{capacity, 8, 0}, StatusIOErr},
		{"wraps", TypeDiscard, DiscardRange{math.MaxUint64 - 3, 8, 0}, StatusIOErr},
		{"last sector of 64 bits", TypeDiscard, DiscardRange{math.MaxUint64, 1, 0}, StatusIOErr},
		{"most", TypeWriteZeroes, DiscardRange{0, most, 0}, StatusOK},
		{"more than most", TypeWriteZeroes, DiscardRange{0, most + 1, 0}, StatusIOErr},
		{"2^32-1 sectors", TypeWriteZeroes, DiscardRange{0, math.MaxUint32, 0}, StatusIOErr},
		{"nothing", TypeDiscard, DiscardRange{5, 0, 0}, StatusOK},
		{"nothing behind the end", TypeDiscard, DiscardRange{capacity + 1, 0, 0}, StatusIOErr},
	} {
		t.Run(c.name, func(t *testing.T) {
			var b [DiscardRangeSize]byte
			c.r.Encode(b[:])
			r, ok := DecodeDiscardRange(b[:])
			if !ok || r != c.r {
				t.Fatalf("decoded %+v, %v", r, ok)
			}
			if s := r.Check(c.t, capacity, most); s != c.want {
				t.Errorf("status %d, want %d", s, c.want)
			}
		})
	}
	b, _ := hex.DecodeString("0807060504030201" + "14131211" + "01000000")
	if r, ok := DecodeDiscardRange(b); !ok || r != (DiscardRange{0x0102030405060708, 0x11121314, 1}) {
		t.Errorf("decoded %+v, %v", r, ok)
	}
	if _, ok := DecodeDiscardRange(b[:15]); ok {
		t.Error("a range of 15 bytes was taken")
	}
	for length, want := range map[int64]int{0: 0, 15: 0, 16: 1, 17: 0, 32: 2, 64: 4, 80: 0, -16: 0, math.MaxInt64: 0, math.MaxInt64 &^ 15: 0} {
		if n, ok := RangeCount(length, 4); n != want || ok != (want != 0) {
			t.Errorf("%d bytes are %d ranges, %v; want %d", length, n, ok, want)
		}
	}
}

func TestIDIsPaddedOrCutTo20Bytes(t *testing.T) {
	for serial, want := range map[string]string{
		"":                          "",
		"disk-1":                    "disk-1",
		"exactly-twenty-bytes":      "exactly-twenty-bytes",
		"more-than-twenty-bytes-it": "more-than-twenty-byt",
	} {
		id := EncodeID(serial)
		if got := string(bytes.TrimRight(id[:], "\x00")); got != want {
			t.Errorf("%q gives %q, want %q", serial, got, want)
		}
	}
}

// FuzzRequest decodes a header and ranges from any bytes and holds what passes against the disk's end.
func FuzzRequest(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), int64(512), uint64(8))
	f.Add(bytes.Repeat([]byte{0xff}, 16), int64(4096), uint64(1<<55))
	f.Add([]byte("\x0d\x00\x00\x00\x00\x00\x00\x00\xff\x07\x00\x00\x00\x00\x00\x00"), int64(1024), uint64(2048))
	f.Fuzz(func(t *testing.T, b []byte, length int64, capacity uint64) {
		if h, ok := DecodeHeader(b); ok {
			var out [HeaderSize]byte
			h.Encode(out[:])
			if !bytes.Equal(out[:], b[:HeaderSize]) {
				t.Errorf("encoded %x from %x", out, b)
			}
			if offset, s := h.Range(length, capacity); s == StatusOK {
				if offset < 0 || length < 0 || offset > math.MaxInt64-length || uint64(offset+length) > capacity*SectorSize {
					t.Errorf("%d bytes at %d pass on %d sectors", length, offset, capacity)
				}
			}
		}
		if r, ok := DecodeDiscardRange(b); ok {
			for _, ty := range []RequestType{TypeDiscard, TypeWriteZeroes} {
				if r.Check(ty, capacity, math.MaxUint32) != StatusOK {
					continue
				}
				if offset, n := r.Bytes(); offset < 0 || n < 0 || offset > math.MaxInt64-n || uint64(offset+n) > capacity*SectorSize {
					t.Errorf("%+v passes on %d sectors", r, capacity)
				}
			}
		}
	})
}

// FuzzConfig reads any piece of the space of any configuration.
func FuzzConfig(f *testing.F) {
	f.Add([]byte{1, 2, 3}, uint32(0), uint16(60))
	f.Add(bytes.Repeat([]byte{0xff}, 60), uint32(0xfffffff0), uint16(60))
	f.Fuzz(func(t *testing.T, b []byte, offset uint32, n uint16) {
		c := DecodeConfig(b)
		if again := c.Encode(); DecodeConfig(again[:]) != c {
			t.Errorf("%+v does not survive", c)
		}
		p := make([]byte, n)
		if err := c.ReadAt(p, offset); (err == nil) != (uint64(offset)+uint64(n) <= ConfigSpace) {
			t.Errorf("%d bytes at %d: %v", n, offset, err)
		}
	})
}
