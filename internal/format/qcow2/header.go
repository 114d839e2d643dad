// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"encoding/binary"
	"math"
)

// Magic are the first four bytes of an image.
const Magic uint32 = 'Q'<<24 | 'F'<<16 | 'I'<<8 | 0xfb

const (
	headerLength2    = 72  // version 2, exactly
	headerLength3    = 104 // version 3, at least
	headerLengthFull = 112 // with every additional field known here, padded
)

// Where the fields lie that change while an image is open. Each group is written by one write of a few bytes, which
// lies in one sector.
const (
	OffsetL1            = 36 // of the bytes of L1Field
	OffsetRefcountTable = 48 // of the bytes of RefcountTableField
	OffsetSnapshots     = 60 // of the bytes of SnapshotsField
	OffsetIncompatible  = 72 // 8 bytes; version 3 alone, as the next two
	OffsetCompatible    = 80 // 8 bytes
	OffsetAutoclear     = 88 // 8 bytes
)

// Incompatible features: who does not know a bit must not open the image.
const (
	Dirty           uint64 = 1 << 0 // refcounts may be wrong
	Corrupt         uint64 = 1 << 1 // must not be written to
	ExternalData    uint64 = 1 << 2 // guest clusters lie in a file of their own
	CompressionBit  uint64 = 1 << 3 // CompressionType is not zlib
	ExtendedL2      uint64 = 1 << 4 // L2 entries have subcluster bitmaps
	KnownIncompat          = Dirty | Corrupt | ExternalData | CompressionBit | ExtendedL2
	LazyRefcounts   uint64 = 1 << 0 // compatible: refcounts may be late while Dirty is set
	BitmapsBit      uint64 = 1 << 0 // autoclear: the bitmaps extension is consistent
	RawExternal     uint64 = 1 << 1 // autoclear: the data file is a raw image on its own
	KnownAutoclear         = BitmapsBit | RawExternal
	CryptNone       uint32 = 0
	CryptAES        uint32 = 1
	CryptLUKS       uint32 = 2
	CompressionZlib uint8  = 0 // deflate, without a header
	CompressionZstd uint8  = 1
)

// Header is the first cluster of an image (section Header).
type Header struct {
	Version     uint32 // 2 or 3
	ClusterBits uint32
	Size        int64 // of the virtual disk, in bytes
	CryptMethod uint32

	L1Offset  int64
	L1Entries uint32

	RefcountTableOffset   int64
	RefcountTableClusters uint32
	RefcountOrder         uint32 // 4 in version 2

	SnapshotsOffset int64
	Snapshots       uint32

	Incompatible, Compatible, Autoclear uint64 // 0 in version 2

	CompressionType uint8

	// BackingFile is the name as it is written in the image, "" when there is none.
	BackingFile string

	// Additional are the bytes of the header behind the fields of version 3 (from byte 104), as long as the header says.
	// The first is CompressionType's and is overwritten by it; the others are kept as they came.
	Additional []byte

	// Extensions are all header extensions, known and unknown, in their order. See Extension.
	Extensions []Extension
}

// ClusterSize reads from the first bytes of an image (at least 24; 512 will do) how large its clusters are, in bytes,
// which is also how much ParseHeader wants to see. The version is checked too.
func ClusterSize(b []byte) (int, error) {
	be := binary.BigEndian
	if len(b) < 4 || be.Uint32(b) != Magic {
		return 0, ErrNotQcow2
	}
	if len(b) < 24 {
		return 0, invalidf("header of the image is cut off")
	}
	if v := be.Uint32(b[4:]); v != 2 && v != 3 {
		return 0, unsupportedf("image has version %d of the format (2 and 3 are supported)", v)
	}
	bits := be.Uint32(b[20:])
	if bits < MinClusterBits || bits > MaxClusterBits {
		return 0, invalidf("header says clusters of 2^%d bytes (from 2^%d to 2^%d are allowed)", bits, MinClusterBits, MaxClusterBits)
	}
	return 1 << bits, nil
}

// ReadHeader reads and checks the header of an image whole: ParseHeader, Supported and Validate. It allocates one
// cluster, at most 2 MiB.
func ReadHeader(read ReadFunc) (*Header, error) {
	h, err := ReadHeaderUnchecked(read)
	if err != nil {
		return nil, err
	}
	if err := h.Supported(); err != nil {
		return nil, err
	}
	return h, h.Validate()
}

// ReadHeaderUnchecked reads and parses alone: for tools that show or repair an image which must not be opened.
func ReadHeaderUnchecked(read ReadFunc) (*Header, error) {
	first := make([]byte, 1<<MinClusterBits)
	if err := read(first, 0); err != nil {
		return nil, err
	}
	n, err := ClusterSize(first)
	if err != nil {
		return nil, err
	}
	cluster := first
	if n > len(first) {
		cluster = make([]byte, n)
		if err := read(cluster, 0); err != nil {
			return nil, err
		}
	}
	return ParseHeader(cluster)
}

// ParseHeader takes the first cluster apart. It refuses what cannot be understood: magic, version, sizes, a backing
// name or an extension that does not lie in the cluster. Whether the image may be used is told by Supported and
// Validate. It keeps nothing of b.
func ParseHeader(b []byte) (*Header, error) {
	cluster, err := ClusterSize(b)
	if err != nil {
		return nil, err
	}
	if len(b) < cluster {
		return nil, invalidf("header of the image is cut off")
	}
	b = b[:cluster]
	be := binary.BigEndian
	h := &Header{
		Version:               be.Uint32(b[4:]),
		ClusterBits:           be.Uint32(b[20:]),
		CryptMethod:           be.Uint32(b[32:]),
		L1Entries:             be.Uint32(b[36:]),
		RefcountTableClusters: be.Uint32(b[56:]),
		Snapshots:             be.Uint32(b[60:]),
		RefcountOrder:         4,
	}
	for _, f := range []struct {
		at   int
		to   *int64
		what string
	}{
		{24, &h.Size, "size of the disk"},
		{40, &h.L1Offset, "offset of the L1 table"},
		{48, &h.RefcountTableOffset, "offset of the refcount table"},
		{64, &h.SnapshotsOffset, "offset of the snapshot table"},
	} {
		v := be.Uint64(b[f.at:])
		if v > math.MaxInt64 {
			return nil, invalidf("%s is too large (%#x)", f.what, v)
		}
		*f.to = int64(v)
	}
	length, err := h.parseVersion3(b)
	if err != nil {
		return nil, err
	}
	end, err := h.parseBackingName(b, length)
	if err != nil {
		return nil, err
	}
	h.Extensions, err = parseExtensions(b[:end], length)
	return h, err
}

// parseVersion3 reads what version 2 has not, and tells how long the header is.
func (h *Header) parseVersion3(b []byte) (length int, err error) {
	if h.Version == 2 {
		return headerLength2, nil
	}
	be := binary.BigEndian
	h.Incompatible, h.Compatible, h.Autoclear = be.Uint64(b[72:]), be.Uint64(b[80:]), be.Uint64(b[88:])
	h.RefcountOrder = be.Uint32(b[96:])
	if h.RefcountOrder > MaxRefcountOrder {
		return 0, invalidf("refcount order is %d (at most %d is allowed)", h.RefcountOrder, MaxRefcountOrder)
	}
	n := be.Uint32(b[100:])
	if n < headerLength3 || n%8 != 0 || uint64(n) > uint64(len(b)) {
		return 0, invalidf("header says that it is %d bytes long (a multiple of 8 from %d to the size of a cluster is allowed)", n, headerLength3)
	}
	if n > headerLength3 {
		h.Additional = append([]byte(nil), b[headerLength3:n]...)
		h.CompressionType = h.Additional[0]
	}
	return int(n), nil
}

// parseBackingName tells where the extensions end at the latest: at the name, or at the end of the cluster.
func (h *Header) parseBackingName(b []byte, length int) (end int, err error) {
	be := binary.BigEndian
	off, n := be.Uint64(b[8:]), be.Uint32(b[16:])
	if off == 0 {
		return len(b), nil
	}
	switch {
	case off < uint64(length) || off > uint64(len(b)):
		return 0, invalidf("name of the backing file lies at %#x, which is not in the first cluster behind the header", off)
	case n > MaxBackingName:
		return 0, invalidf("name of the backing file has %d bytes (at most %d are allowed)", n, MaxBackingName)
	case uint64(n) > uint64(len(b))-off:
		return 0, invalidf("name of the backing file reaches beyond the first cluster (%d bytes at %#x)", n, off)
	}
	h.BackingFile = string(b[off : off+uint64(n)])
	return int(off), nil
}

// Supported refuses what this package does not know: an unknown incompatible feature by its name, encryption, and
// a compression type. The error is an *UnsupportedError, or an *InvalidError where two fields contradict each other.
func (h *Header) Supported() error {
	if unknown := h.Incompatible &^ KnownIncompat; unknown != 0 {
		return unknownFeatures(unknown, h.FeatureNames())
	}
	switch h.CryptMethod {
	case CryptNone:
	case CryptAES:
		return unsupportedf("image is encrypted (AES), which is not supported")
	case CryptLUKS:
		return unsupportedf("image is encrypted (LUKS), which is not supported")
	default:
		return unsupportedf("image is encrypted with unknown method %d", h.CryptMethod)
	}
	switch set := h.Incompatible&CompressionBit != 0; {
	case set && h.CompressionType == CompressionZlib:
		return invalidf("compression type is 0 (zlib) although its feature bit is set")
	case !set && h.CompressionType != CompressionZlib:
		return invalidf("compression type is %d although its feature bit is not set", h.CompressionType)
	case h.CompressionType > CompressionZstd:
		return unsupportedf("compression type %d is not known (0 zlib and 1 zstd are)", h.CompressionType)
	}
	return nil
}

// Validate checks the fields against each other and against the limits. After it, sizes and places of the tables may be
// used: they are aligned, bounded and cannot overflow. That they lie in the file is for who knows its length.
func (h *Header) Validate() error {
	if h.Incompatible&ExtendedL2 != 0 && h.ClusterBits < MinClusterBitsExtended {
		return invalidf("extended L2 entries need clusters of at least %d bytes", 1<<MinClusterBitsExtended)
	}
	if h.Autoclear&RawExternal != 0 && h.Incompatible&ExternalData == 0 {
		return invalidf("external data file is said to be raw, but there is none")
	}
	for _, check := range []func() error{h.ValidateL1, h.ValidateRefcountTable, h.ValidateSnapshots} {
		if err := check(); err != nil {
			return err
		}
	}
	_, _, err := h.Bitmaps()
	return err
}

// ValidateL1 checks size and place of the active L1 table, and that it covers the disk.
func (h *Header) ValidateL1() error {
	if err := h.validateTable("L1 table", h.L1Offset, int64(h.L1Entries)*8, MaxL1Bytes); err != nil {
		return err
	}
	g := h.Geometry()
	if need := g.L1EntriesFor(h.Size); need > int64(h.L1Entries) {
		if need > MaxL1Bytes/8 {
			return &limitError{"disk is too large for clusters of this size"}
		}
		return invalidf("L1 table is too small for the disk (%d entries, %d are needed)", h.L1Entries, need)
	}
	return nil
}

// ValidateRefcountTable checks size and place of the refcount table.
func (h *Header) ValidateRefcountTable() error {
	if h.RefcountTableClusters == 0 {
		return invalidf("image has no refcount table (check -r all makes one)")
	}
	return h.validateTable("refcount table", h.RefcountTableOffset, int64(h.RefcountTableClusters)<<h.ClusterBits, MaxRefcountTableBytes)
}

// ValidateSnapshots checks number and place of the snapshots.
func (h *Header) ValidateSnapshots() error {
	if h.Snapshots > MaxSnapshots {
		return invalidf("image says that it has %d snapshots (at most %d are allowed)", h.Snapshots, MaxSnapshots)
	}
	return h.validateTable("snapshot table", h.SnapshotsOffset, int64(h.Snapshots)*snapshotFixed, MaxSnapshotTableBytes)
}

// validateTable checks one contiguous table of n bytes. An empty one may lie anywhere, so long as it is aligned.
func (h *Header) validateTable(what string, off, n, limit int64) error {
	switch {
	case n > limit:
		return &limitError{what + " is too large"}
	case off&(int64(1)<<h.ClusterBits-1) != 0:
		return invalidf("%s is not aligned to a cluster (at %#x)", what, off)
	case off > math.MaxInt64-n:
		return invalidf("%s reaches beyond any file (at %#x)", what, off)
	case off == 0 && n > 0:
		return invalidf("%s lies upon the header", what)
	}
	return nil
}

// ClearUnknownAutoclear clears the autoclear bits that are not known, as who writes to an image must before. It tells
// whether there were any.
func (h *Header) ClearUnknownAutoclear() bool {
	known := h.Autoclear & KnownAutoclear
	changed := known != h.Autoclear
	h.Autoclear = known
	return changed
}

// IsDirty tells the dirty bit: refcounts may be wrong.
func (h *Header) IsDirty() bool { return h.Incompatible&Dirty != 0 }

// IsCorrupt tells the corrupt bit: the image must not be written to.
func (h *Header) IsCorrupt() bool { return h.Incompatible&Corrupt != 0 }

// IsLazy tells whether refcounts may be written late while the dirty bit is set.
func (h *Header) IsLazy() bool { return h.Compatible&LazyRefcounts != 0 }

// HasDataFile tells whether guest clusters lie in an external file.
func (h *Header) HasDataFile() bool { return h.Incompatible&ExternalData != 0 }

// IsDataFileRaw tells whether the external file is a raw image on its own.
func (h *Header) IsDataFileRaw() bool { return h.Autoclear&RawExternal != 0 }

// IsExtendedL2 tells whether L2 entries have subclusters.
func (h *Header) IsExtendedL2() bool { return h.Incompatible&ExtendedL2 != 0 }

// Length is the header's length in bytes, without extensions and name.
func (h *Header) Length() int {
	if h.Version == 2 {
		return headerLength2
	}
	if len(h.Additional) == 0 && h.CompressionType != 0 {
		return headerLengthFull
	}
	return headerLength3 + (len(h.Additional)+7)&^7
}

// Encode is the first cluster as it is written, whole: header, extensions, backing name, and zeros. It fails when they
// do not fit in a cluster (EINVAL), and changes nothing of h.
func (h *Header) Encode() ([]byte, error) {
	b := make([]byte, int64(1)<<h.ClusterBits)
	length := h.Length()
	if length > len(b) {
		return nil, invalidf("header does not fit in a cluster of %d bytes", len(b))
	}
	h.encodeFields(b, length)
	at, err := encodeExtensions(b, length, h.Extensions)
	if err != nil {
		return nil, err
	}
	switch n := len(h.BackingFile); {
	case n == 0:
	case n > MaxBackingName:
		return nil, invalidf("name of the backing file has %d bytes (at most %d are allowed)", n, MaxBackingName)
	case n > len(b)-at:
		return nil, invalidf("name of the backing file does not fit in the first cluster beside the header (%d bytes, room for %d)", n, len(b)-at)
	default:
		binary.BigEndian.PutUint64(b[8:], uint64(at))
		binary.BigEndian.PutUint32(b[16:], uint32(n))
		copy(b[at:], h.BackingFile)
	}
	return b, nil
}

func (h *Header) encodeFields(b []byte, length int) {
	be := binary.BigEndian
	be.PutUint32(b[0:], Magic)
	be.PutUint32(b[4:], h.Version)
	be.PutUint32(b[20:], h.ClusterBits)
	be.PutUint64(b[24:], uint64(h.Size))
	be.PutUint32(b[32:], h.CryptMethod)
	l1, table, snapshots := h.L1Field(), h.RefcountTableField(), h.SnapshotsField()
	copy(b[OffsetL1:], l1[:])
	copy(b[OffsetRefcountTable:], table[:])
	copy(b[OffsetSnapshots:], snapshots[:])
	if h.Version == 2 {
		return
	}
	be.PutUint64(b[OffsetIncompatible:], h.Incompatible)
	be.PutUint64(b[OffsetCompatible:], h.Compatible)
	be.PutUint64(b[OffsetAutoclear:], h.Autoclear)
	be.PutUint32(b[96:], h.RefcountOrder)
	be.PutUint32(b[100:], uint32(length))
	copy(b[headerLength3:length], h.Additional)
	if length > headerLength3 {
		b[headerLength3] = h.CompressionType
	}
}

// L1Field are the bytes at OffsetL1: entries and offset of the active L1 table.
func (h *Header) L1Field() (b [12]byte) {
	binary.BigEndian.PutUint32(b[0:], h.L1Entries)
	binary.BigEndian.PutUint64(b[4:], uint64(h.L1Offset))
	return b
}

// RefcountTableField are the bytes at OffsetRefcountTable: offset and clusters of the refcount table.
func (h *Header) RefcountTableField() (b [12]byte) {
	binary.BigEndian.PutUint64(b[0:], uint64(h.RefcountTableOffset))
	binary.BigEndian.PutUint32(b[8:], h.RefcountTableClusters)
	return b
}

// SnapshotsField are the bytes at OffsetSnapshots: number of snapshots and offset of their table.
func (h *Header) SnapshotsField() (b [12]byte) {
	binary.BigEndian.PutUint32(b[0:], h.Snapshots)
	binary.BigEndian.PutUint64(b[4:], uint64(h.SnapshotsOffset))
	return b
}
