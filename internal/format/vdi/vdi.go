// SPDX-License-Identifier: Apache-2.0

// Package vdi reads VirtualBox disk images, dynamic and static ones. It writes nothing.
//
// An image is a header, a table of 4 bytes for each block, and the blocks, in the order in which they were written.
// Everything is little-endian. Differencing images and snapshots of a chain are refused.
//
// Facts: VDICore.h of VirtualBox, as told in many places; the layout at the fields.
package vdi

import (
	"encoding/binary"
	"io"

	"github.com/sluice-blk/sluice/internal/format/sparse"
)

// HeaderSize is how much of the file is read as the header.
const HeaderSize = 512

// Magic stands at byte 64.
const (
	Magic       = "\x7f\x10\xda\xbe"
	MagicOffset = 64
)

// Types of images.
const (
	Dynamic = 1
	Static  = 2
)

// Entries of the table that are no block.
const (
	never     = 0xffffffff // never written
	discarded = 0xfffffffe // given back
)

// Image is an image whose header has been read. It is not changed after Open.
type Image struct {
	Size      int64 // of the disk, whole sectors
	BlockSize int64
	Type      uint32 // Dynamic or Static

	fileSize             int64
	tableOffset, entries int64
	dataOffset           int64
}

// Open reads the header of an image in a file of size bytes.
func Open(r io.ReaderAt, size int64) (*Image, error) {
	h := make([]byte, HeaderSize)
	if err := sparse.ReadFull(r, size, h, 0, "VDI header"); err != nil {
		return nil, err
	}
	return parse(h, size)
}

func parse(h []byte, fileSize int64) (*Image, error) {
	u32 := func(at int) int64 { return int64(binary.LittleEndian.Uint32(h[at:])) }
	if string(h[MagicOffset:MagicOffset+4]) != Magic {
		return nil, sparse.Corruptf("not a VDI image: no magic at %d", MagicOffset)
	}
	if v := u32(0x44); v != 0x00010001 {
		return nil, sparse.Unsupportedf("VDI version %d.%d (only 1.1 is read)", v>>16, v&0xffff)
	}
	i := &Image{
		Type:        uint32(u32(0x4c)),
		BlockSize:   u32(0x178),
		fileSize:    fileSize,
		tableOffset: u32(0x154),
		dataOffset:  u32(0x158),
		entries:     u32(0x180),
	}
	size := binary.LittleEndian.Uint64(h[0x170:])
	switch {
	case i.Type != Dynamic && i.Type != Static:
		return nil, sparse.Unsupportedf("VDI image type %d (only dynamic and static images are read; merge a differencing image with its parent first)", i.Type)
	case !zero(h[0x1a8:0x1c8]):
		return nil, sparse.Unsupportedf("VDI image that is linked to a parent (merge it with its parent first)")
	case u32(0x168) != sparse.Sector:
		return nil, sparse.Unsupportedf("VDI sectors of %d bytes (only %d is read)", u32(0x168), sparse.Sector)
	case u32(0x17c) != 0:
		return nil, sparse.Unsupportedf("VDI blocks with %d extra bytes", u32(0x17c))
	case i.tableOffset%sparse.Sector != 0 || i.dataOffset%sparse.Sector != 0:
		return nil, sparse.Corruptf("VDI table at %d and data at %d do not begin at a sector", i.tableOffset, i.dataOffset)
	case i.BlockSize < sparse.Sector || i.BlockSize&(i.BlockSize-1) != 0:
		return nil, sparse.Corruptf("VDI block size of %d is no power of two from %d up", i.BlockSize, sparse.Sector)
	case size > uint64(i.entries*i.BlockSize):
		// The product of two numbers of 32 bits is below 2^63: BlockSize is 2^31 at most.
		return nil, sparse.Corruptf("VDI disk of %d bytes does not fit into %d blocks of %d", size, i.entries, i.BlockSize)
	case size > sparse.MaxBlocks*uint64(i.BlockSize):
		return nil, sparse.Unsupportedf("VDI disk of %d bytes in blocks of %d is larger than what is read here", size, i.BlockSize)
	}
	i.Size = int64(size+sparse.Sector-1) &^ (sparse.Sector - 1)
	return i, nil
}

func zero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// Map reads the table. r is the file that Open read.
func (i *Image) Map(r io.ReaderAt) (sparse.Map, error) {
	t, err := sparse.NewTable(i.Size, i.BlockSize, i.fileSize)
	if err != nil {
		return nil, err
	}
	err = sparse.Each32(r, i.fileSize, i.tableOffset, t.Blocks(), "VDI block table", func(n int64, b [4]byte) error {
		switch block := binary.LittleEndian.Uint32(b[:]); block {
		case never:
		case discarded:
			t.SetZero(n)
		default:
			return t.SetData(n, i.dataOffset+int64(block)*i.BlockSize)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}
