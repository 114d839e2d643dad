// SPDX-License-Identifier: Apache-2.0

package virtioblk

import (
	"encoding/binary"
	"fmt"
)

const (
	// ConfigSize is the configuration space up to the fields of write zeroes, in bytes; those of secure erase and of
	// zoned disks lie behind it and read as zero.
	ConfigSize = 60
	// ConfigSpace is how far the space can be read: the most that a vhost-user message carries.
	ConfigSpace = 256
	// OffsetWriteback is where the only byte stands that a driver may write.
	OffsetWriteback = 32
)

// Config is the configuration space (section 5.2.4: struct virtio_blk_config). A field counts only where its feature
// was offered, and is zero otherwise.
type Config struct {
	Capacity uint64 // sectors
	SizeMax  uint32 // of one segment, in bytes
	SegMax   uint32 // segments of one request, without header and status

	Cylinders uint16 // geometry
	Heads     uint8
	Sectors   uint8

	BlkSize uint32 // bytes of a logical block

	PhysicalBlockExp uint8  // physical block = logical block << exponent
	AlignmentOffset  uint8  // first aligned logical block
	MinIOSize        uint16 // in logical blocks
	OptIOSize        uint32 // in logical blocks

	Writeback uint8 // 1 write-back, 0 write-through; the driver may write it where CONFIG_WCE was negotiated
	NumQueues uint16

	MaxDiscardSectors      uint32
	MaxDiscardSeg          uint32
	DiscardSectorAlignment uint32

	MaxWriteZeroesSectors uint32
	MaxWriteZeroesSeg     uint32
	WriteZeroesMayUnmap   uint8
}

// Encode is the space as it lies in memory.
func (c *Config) Encode() (b [ConfigSize]byte) {
	le := binary.LittleEndian
	le.PutUint64(b[0:], c.Capacity)
	le.PutUint32(b[8:], c.SizeMax)
	le.PutUint32(b[12:], c.SegMax)
	le.PutUint16(b[16:], c.Cylinders)
	b[18], b[19] = c.Heads, c.Sectors
	le.PutUint32(b[20:], c.BlkSize)
	b[24], b[25] = c.PhysicalBlockExp, c.AlignmentOffset
	le.PutUint16(b[26:], c.MinIOSize)
	le.PutUint32(b[28:], c.OptIOSize)
	b[OffsetWriteback] = c.Writeback
	le.PutUint16(b[34:], c.NumQueues)
	le.PutUint32(b[36:], c.MaxDiscardSectors)
	le.PutUint32(b[40:], c.MaxDiscardSeg)
	le.PutUint32(b[44:], c.DiscardSectorAlignment)
	le.PutUint32(b[48:], c.MaxWriteZeroesSectors)
	le.PutUint32(b[52:], c.MaxWriteZeroesSeg)
	b[56] = c.WriteZeroesMayUnmap
	return b
}

// DecodeConfig reads a space from b, of which what is missing reads as zero.
func DecodeConfig(b []byte) Config {
	var full [ConfigSize]byte
	copy(full[:], b)
	le := binary.LittleEndian
	return Config{
		Capacity: le.Uint64(full[0:]), SizeMax: le.Uint32(full[8:]), SegMax: le.Uint32(full[12:]),
		Cylinders: le.Uint16(full[16:]), Heads: full[18], Sectors: full[19],
		BlkSize:          le.Uint32(full[20:]),
		PhysicalBlockExp: full[24], AlignmentOffset: full[25], MinIOSize: le.Uint16(full[26:]), OptIOSize: le.Uint32(full[28:]),
		Writeback: full[OffsetWriteback], NumQueues: le.Uint16(full[34:]),
		MaxDiscardSectors: le.Uint32(full[36:]), MaxDiscardSeg: le.Uint32(full[40:]), DiscardSectorAlignment: le.Uint32(full[44:]),
		MaxWriteZeroesSectors: le.Uint32(full[48:]), MaxWriteZeroesSeg: le.Uint32(full[52:]), WriteZeroesMayUnmap: full[56],
	}
}

// ReadAt fills p with the bytes of the space from offset on, zeros behind ConfigSize. It is an error to read behind
// ConfigSpace, and nothing is written to p then.
func (c *Config) ReadAt(p []byte, offset uint32) error {
	if offset > ConfigSpace || len(p) > ConfigSpace-int(offset) {
		return fmt.Errorf("read %d bytes at %d of the configuration space: it ends at %d", len(p), offset, ConfigSpace)
	}
	b := c.Encode()
	n := 0
	if offset < ConfigSize {
		n = copy(p, b[offset:])
	}
	clear(p[n:])
	return nil
}
