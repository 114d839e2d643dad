// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"encoding/binary"
	"errors"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// sound is a header of version 3 with everything in it.
func sound() *Header {
	h := &Header{
		Version: 3, ClusterBits: 16, Size: 1 << 30,
		L1Offset: 0x30000, L1Entries: 2,
		RefcountTableOffset: 0x10000, RefcountTableClusters: 1, RefcountOrder: 4,
		SnapshotsOffset: 0x50000, Snapshots: 1,
		Compatible: LazyRefcounts | 1<<5, Autoclear: 1 << 40,
		BackingFile: "base.raw", Additional: make([]byte, 16),
	}
	h.Additional[9] = 7
	h.SetBackingFormat("raw")
	h.SetExtension(0x12345678, []byte{1, 2, 3})
	h.SetFeatureNames(KnownFeatures())
	h.SetExtension(0x9abcdef0, []byte{9, 9, 9, 9, 9, 9, 9, 9, 9})
	return h
}

func encoded(t testing.TB, h *Header) []byte {
	t.Helper()
	b, err := h.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// reader gives the bytes of b and zeros behind them.
func reader(b []byte) ReadFunc {
	return func(p []byte, off int64) error {
		n := 0
		if off < int64(len(b)) {
			n = copy(p, b[off:])
		}
		clear(p[n:])
		return nil
	}
}

func TestHeaderRoundTrip(t *testing.T) {
	v2 := sound()
	v2.Version, v2.Compatible, v2.Autoclear, v2.Additional = 2, 0, 0, nil
	zstd := sound()
	zstd.Incompatible, zstd.CompressionType, zstd.Additional = CompressionBit, CompressionZstd, []byte{1, 0, 0, 0, 0, 0, 0, 0}
	bitmaps := sound()
	bitmaps.SetBitmaps(&BitmapsExtension{Bitmaps: 2, DirectorySize: 64, DirectoryOffset: 0x70000})
	for name, h := range map[string]*Header{"version 3": sound(), "version 2": v2, "zstd": zstd, "bitmaps": bitmaps} {
		t.Run(name, func(t *testing.T) {
			got, err := ReadHeader(reader(encoded(t, h)))
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(h, got); d != "" {
				t.Errorf("header changed (-want +got):\n%s", d)
			}
		})
	}
}

func TestUnknownPartsOfTheHeaderAreKept(t *testing.T) {
	h, err := ReadHeader(reader(encoded(t, sound())))
	if err != nil {
		t.Fatal(err)
	}
	if !h.ClearUnknownAutoclear() || h.ClearUnknownAutoclear() || h.Autoclear != 0 {
		t.Errorf("autoclear bits are %#x after clearing", h.Autoclear)
	}
	h.SetBackingFormat("qcow2")
	h.SetDataFile("x")
	h.SetDataFile("")
	b := encoded(t, h)
	again, err := ParseHeader(b)
	if err != nil {
		t.Fatal(err)
	}
	if again.Compatible != LazyRefcounts|1<<5 || again.Additional[9] != 7 || again.BackingFormat() != "qcow2" {
		t.Errorf("compatible bits %#x, additional fields %v, format %q", again.Compatible, again.Additional, again.BackingFormat())
	}
	var kinds []uint32
	for _, e := range again.Extensions {
		kinds = append(kinds, e.Type)
	}
	if d := cmp.Diff([]uint32{ExtensionBackingFormat, ExtensionFeatureNames, 0x12345678, 0x9abcdef0}, kinds); d != "" {
		t.Errorf("order of the extensions (-want +got):\n%s", d)
	}
}

func u32(at int, v uint32) func([]byte) {
	return func(b []byte) { binary.BigEndian.PutUint32(b[at:], v) }
}
func u64(at int, v uint64) func([]byte) {
	return func(b []byte) { binary.BigEndian.PutUint64(b[at:], v) }
}

// impossible are changes of a sound header, each of which makes one field what it must not be.
var impossible = map[string]struct {
	patch func([]byte)
	errno syscall.Errno
	text  string
}{
	"magic":                         {u32(0, 0x514649fa), syscall.EINVAL, "not a qcow2 image"},
	"version 1":                     {u32(4, 1), syscall.EOPNOTSUPP, "version 1"},
	"version 4":                     {u32(4, 4), syscall.EOPNOTSUPP, "version 4"},
	"cluster bits 0":                {u32(20, 0), syscall.EINVAL, "clusters of 2^0"},
	"cluster bits 8":                {u32(20, 8), syscall.EINVAL, "clusters of 2^8"},
	"cluster bits 22":               {u32(20, 22), syscall.EINVAL, "clusters of 2^22"},
	"cluster bits 63":               {u32(20, 63), syscall.EINVAL, "clusters of 2^63"},
	"header length":                 {u32(100, 0xffffffff), syscall.EINVAL, "bytes long"},
	"header length 96":              {u32(100, 96), syscall.EINVAL, "bytes long"},
	"header length 105":             {u32(100, 105), syscall.EINVAL, "bytes long"},
	"header beyond cluster":         {u32(100, 65536+8), syscall.EINVAL, "bytes long"},
	"refcount order 7":              {u32(96, 7), syscall.EINVAL, "refcount order"},
	"size":                          {u64(24, 1<<63), syscall.EINVAL, "size of the disk"},
	"size beyond L1":                {u64(24, 1<<40), syscall.EINVAL, "L1 table is too small"},
	"size beyond any L1":            {u64(24, 1<<62), syscall.EFBIG, "disk is too large"},
	"L1 size":                       {u32(36, 0x7fffffff), syscall.EFBIG, "L1 table is too large"},
	"L1 size 0":                     {u32(36, 0), syscall.EINVAL, "L1 table is too small"},
	"L1 offset -1":                  {u64(40, 1<<64-1), syscall.EINVAL, "offset of the L1 table"},
	"L1 offset 0":                   {u64(40, 0), syscall.EINVAL, "upon the header"},
	"L1 not aligned":                {u64(40, 0x30200), syscall.EINVAL, "not aligned"},
	"L1 beyond any file":            {u64(40, 1<<63-0x10000+0), syscall.EINVAL, ""},
	"refcount table clusters":       {u32(56, 0x7fffffff), syscall.EFBIG, "refcount table is too large"},
	"refcount table above 8 MiB":    {u32(56, 129), syscall.EFBIG, "refcount table is too large"},
	"refcount table of no clusters": {u32(56, 0), syscall.EINVAL, "no refcount table"},
	"refcount table offset":         {u64(48, 1<<64-0x10000), syscall.EINVAL, "offset of the refcount table"},
	"refcount table not aligned":    {u64(48, 0x10200), syscall.EINVAL, "not aligned"},
	"snapshots":                     {u32(60, 0xffffffff), syscall.EINVAL, "snapshots"},
	"snapshot table not aligned":    {u64(64, 0x50008), syscall.EINVAL, "not aligned"},
	"backing length":                {u32(16, 0xffffffff), syscall.EINVAL, "at most 1023"},
	"backing length 1024":           {u32(16, 1024), syscall.EINVAL, "at most 1023"},
	"backing name outside":          {u64(8, 70000), syscall.EINVAL, "not in the first cluster"},
	"backing name in the header":    {u64(8, 64), syscall.EINVAL, "not in the first cluster"},
	"backing name across the end":   {u64(8, 65536-4), syscall.EINVAL, "reaches beyond the first cluster"},
	"extension length":              {u32(124, 0xffffffff), syscall.EINVAL, "reaches beyond its area"},
	"extension over the name":       {u32(124, 1000), syscall.EINVAL, "reaches beyond its area"},
	"AES":                           {u32(32, 1), syscall.EOPNOTSUPP, "AES"},
	"LUKS":                          {u32(32, 2), syscall.EOPNOTSUPP, "LUKS"},
	"encryption 3":                  {u32(32, 3), syscall.EOPNOTSUPP, "method 3"},
	"compression type without bit":  {func(b []byte) { b[104] = 1 }, syscall.EINVAL, "compression type is 1"},
	"compression bit without type":  {u64(72, CompressionBit), syscall.EINVAL, "compression type is 0"},
	"compression type 2":            {func(b []byte) { u64(72, CompressionBit)(b); b[104] = 2 }, syscall.EOPNOTSUPP, "compression type 2"},
	"bitmaps bit without bitmaps":   {u64(88, BitmapsBit), syscall.EINVAL, "bitmaps"},
	"raw data file without one":     {u64(88, RawExternal), syscall.EINVAL, "raw"},
}

// The header is refused, at once and without memory.
func TestHeaderWithAnImpossibleFieldIsRefused(t *testing.T) {
	for name, c := range impossible {
		t.Run(name, func(t *testing.T) {
			b := encoded(t, sound())
			c.patch(b)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			_, err := ReadHeader(reader(b))
			runtime.ReadMemStats(&after)
			if name == "L1 beyond any file" {
				if err != nil {
					t.Fatalf("two entries at the last cluster of a file of 2^63 bytes fit: %v", err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("read header: %v, want an error with %q", err, c.text)
			}
			var errno syscall.Errno
			if !errors.As(err, &errno) || errno != c.errno {
				t.Errorf("errno is %v, want %v", errno, c.errno)
			}
			if n := after.TotalAlloc - before.TotalAlloc; n > 1<<20 {
				t.Errorf("%d bytes were allocated", n)
			}
		})
	}
}

func TestHeaderThatIsCutOff(t *testing.T) {
	b := encoded(t, sound())
	for _, n := range []int{0, 3, 4, 23, 24, 71, 104, 65535} {
		if _, err := ParseHeader(b[:n]); err == nil {
			t.Errorf("%d bytes of a header were accepted", n)
		}
	}
}

func TestUnknownIncompatibleFeaturesAreNamed(t *testing.T) {
	for _, bit := range []uint8{5, 31, 63} {
		h := sound()
		h.Incompatible = 1 << bit
		_, err := ReadHeader(reader(encoded(t, h)))
		var u *UnsupportedError
		if !errors.As(err, &u) || u.Unknown != 1<<bit || len(u.Names) != 0 || !strings.Contains(err.Error(), "bit ") {
			t.Errorf("bit %d without a name: %v", bit, err)
		}
		h.SetFeatureNames(append(KnownFeatures(), FeatureName{FeatureIncompatible, bit, "time travel"}))
		_, err = ReadHeader(reader(encoded(t, h)))
		if !errors.As(err, &u) || len(u.Names) != 1 || !strings.Contains(err.Error(), `"time travel"`) {
			t.Errorf("bit %d with a name: %v", bit, err)
		}
	}
}

func TestDirtyAndCorruptAreNoErrors(t *testing.T) {
	h := sound()
	h.Incompatible = Dirty | Corrupt
	h, err := ReadHeader(reader(encoded(t, h)))
	if err != nil || !h.IsDirty() || !h.IsCorrupt() {
		t.Errorf("header %+v, error %v", h, err)
	}
}

// Other programs write headers of 104, 112 and more bytes.
func TestHeaderLengths(t *testing.T) {
	for _, n := range []int{0, 8, 16, 256} {
		h := sound()
		h.Additional = make([]byte, n)
		if n > 8 {
			h.Additional[n-1] = 0x5a
		}
		b := encoded(t, h)
		if got := int(binary.BigEndian.Uint32(b[100:])); got != 104+n {
			t.Errorf("header of %d bytes says %d", 104+n, got)
		}
		got, err := ReadHeader(reader(b))
		if err != nil {
			t.Fatal(err)
		}
		if n > 0 && !cmp.Equal(got.Additional, h.Additional) {
			t.Errorf("additional fields are %v, want %v", got.Additional, h.Additional)
		}
	}
}

func TestHeaderThatDoesNotFit(t *testing.T) {
	h := sound()
	h.ClusterBits = 9
	h.SetFeatureNames(nil)
	h.SetExtension(ExtensionFeatureNames, nil)
	h.BackingFile = strings.Repeat("x", 400)
	if _, err := h.Encode(); err == nil || !strings.Contains(err.Error(), "does not fit") {
		t.Errorf("encode: %v", err)
	}
	h.BackingFile = strings.Repeat("x", 300)
	got, err := ParseHeader(encoded(t, h))
	if err != nil || got.BackingFile != h.BackingFile {
		t.Errorf("name of 300 bytes: %v", err)
	}
}

// A refcount table larger than needed is no fault.
func TestLargeRefcountTableIsAccepted(t *testing.T) {
	h := sound()
	h.RefcountTableClusters = 128 // 8 MiB
	if _, err := ReadHeader(reader(encoded(t, h))); err != nil {
		t.Error(err)
	}
}

func TestEncryptionPointer(t *testing.T) {
	h := sound()
	if _, _, ok, err := h.Encryption(); ok || err != nil {
		t.Errorf("no pointer: %v, %v", ok, err)
	}
	data := make([]byte, 16)
	binary.BigEndian.PutUint64(data, 0x40000)
	binary.BigEndian.PutUint64(data[8:], 0x1f8000)
	h.SetExtension(ExtensionEncryption, data)
	if off, n, ok, err := h.Encryption(); off != 0x40000 || n != 0x1f8000 || !ok || err != nil {
		t.Errorf("pointer is %#x, %#x, %v, %v", off, n, ok, err)
	}
	binary.BigEndian.PutUint64(data[8:], 1<<63)
	if _, _, _, err := h.Encryption(); err == nil {
		t.Error("a header of 2^63 bytes was accepted")
	}
}
