// SPDX-License-Identifier: Apache-2.0

package virtioblk

import (
	"encoding/binary"
	"math"
)

const (
	HeaderSize       = 16 // of a request's header, in bytes
	StatusSize       = 1  // of the status
	DiscardRangeSize = 16 // of one range of a discard or write zeroes request
	IDBytes          = 20 // of the answer to GET_ID
)

// Header begins every request (section 5.2.6: struct virtio_blk_req).
type Header struct {
	Type   RequestType
	Prio   uint32 // reserved; what legacy drivers put here means nothing to us
	Sector uint64 // of reads and writes, in units of SectorSize
}

// DecodeHeader reads a header from the beginning of b; false when b is too short.
func DecodeHeader(b []byte) (Header, bool) {
	if len(b) < HeaderSize {
		return Header{}, false
	}
	return Header{
		Type:   RequestType(binary.LittleEndian.Uint32(b)),
		Prio:   binary.LittleEndian.Uint32(b[4:]),
		Sector: binary.LittleEndian.Uint64(b[8:]),
	}, true
}

// Encode writes the header to the first HeaderSize bytes of b.
func (h Header) Encode(b []byte) {
	_ = b[HeaderSize-1]
	binary.LittleEndian.PutUint32(b, uint32(h.Type))
	binary.LittleEndian.PutUint32(b[4:], h.Prio)
	binary.LittleEndian.PutUint64(b[8:], h.Sector)
}

// Range is where in a disk of so many sectors a read or write of length bytes belongs, in bytes. It is StatusIOErr when
// the length is not whole sectors or the end lies behind the capacity (section 5.2.6.2); no byte of the disk is to be
// touched then.
func (h Header) Range(length int64, capacity uint64) (offset int64, s Status) {
	if length < 0 || length%SectorSize != 0 || !inside(h.Sector, uint64(length)/SectorSize, capacity) {
		return 0, StatusIOErr
	}
	return int64(h.Sector * SectorSize), StatusOK
}

// DiscardRange is one range of a discard, write zeroes or secure erase request (struct
// virtio_blk_discard_write_zeroes).
type DiscardRange struct {
	Sector  uint64 // the first
	Sectors uint32 // how many; 0 is a range that asks for nothing
	Flags   uint32 // RangeUnmap, the rest is reserved
}

// RangeUnmap lets write zeroes deallocate what it zeroes. It is the only flag.
const RangeUnmap = 1 << 0

// DecodeDiscardRange reads a range from the beginning of b; false when b is too short.
func DecodeDiscardRange(b []byte) (DiscardRange, bool) {
	if len(b) < DiscardRangeSize {
		return DiscardRange{}, false
	}
	return DiscardRange{
		Sector:  binary.LittleEndian.Uint64(b),
		Sectors: binary.LittleEndian.Uint32(b[8:]),
		Flags:   binary.LittleEndian.Uint32(b[12:]),
	}, true
}

// Encode writes the range to the first DiscardRangeSize bytes of b.
func (r DiscardRange) Encode(b []byte) {
	_ = b[DiscardRangeSize-1]
	binary.LittleEndian.PutUint64(b, r.Sector)
	binary.LittleEndian.PutUint32(b[8:], r.Sectors)
	binary.LittleEndian.PutUint32(b[12:], r.Flags)
}

// RangeCount is how many ranges a payload of length bytes has; false when it has none, is not whole ranges, or has more
// than maxRanges (max_discard_seg or max_write_zeroes_seg).
func RangeCount(length int64, maxRanges uint32) (int, bool) {
	n := length / DiscardRangeSize
	if length <= 0 || length%DiscardRangeSize != 0 || n > int64(maxRanges) {
		return 0, false
	}
	return int(n), true
}

// Check tells with which status a range of a request of type t is to be refused, StatusOK when it is valid, for a disk
// of capacity sectors that allows maxSectors in a range. A flag that is unknown, and any flag on a type other than write
// zeroes, is StatusUnsupp; a range that is too long or leaves the disk is StatusIOErr (section 5.2.6.2). A device
// checks all the ranges of a request before it acts on the first.
func (r DiscardRange) Check(t RequestType, capacity uint64, maxSectors uint32) Status {
	allowed := uint32(0)
	if t == TypeWriteZeroes {
		allowed = RangeUnmap
	}
	if r.Flags&^allowed != 0 {
		return StatusUnsupp
	}
	if r.Sectors > maxSectors || !inside(r.Sector, uint64(r.Sectors), capacity) {
		return StatusIOErr
	}
	return StatusOK
}

// Bytes is the range in bytes. It has passed Check.
func (r DiscardRange) Bytes() (offset, length int64) {
	return int64(r.Sector * SectorSize), int64(r.Sectors) * SectorSize
}

// EncodeID writes the answer to GET_ID: the serial, padded with zeros, and with no zero at its end when it fills all
// the bytes (section 5.2.6.1). A longer serial is cut.
func EncodeID(serial string) (id [IDBytes]byte) {
	copy(id[:], serial)
	return id
}

// inside tells whether n sectors from first on lie on a disk of capacity sectors, and can be told in bytes.
func inside(first, n, capacity uint64) bool {
	return first <= capacity && n <= capacity-first && capacity <= math.MaxInt64/SectorSize
}
