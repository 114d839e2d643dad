// SPDX-License-Identifier: Apache-2.0

// Package vhdx reads Hyper-V's disk images (VHDX), dynamic and fixed ones. It writes nothing.
//
// An image has two headers, of which the one with the higher number holds; two copies of a list of regions; the region
// of metadata, which tells the disk's size and blocks; the region of the block table; a log; and the blocks. Everything is
// little-endian and, but for metadata and blocks, has a checksum. Images with a parent are refused.
//
// # The log
//
// Changes of metadata go to the log first. One that was not closed well has entries there that were not carried out, and
// its tables mean nothing without them. They are carried out in memory: what is read of the file for the tables is seen as
// if the log had been replayed (see log.go). The file is not changed.
//
// Facts: Microsoft's [MS-VHDX].
package vhdx

import (
	"encoding/binary"
	"hash/crc32"
	"io"

	"github.com/sluice-blk/sluice/internal/format/sparse"
)

// Magic stands at the beginning of the file.
const Magic = "vhdxfile"

const (
	kib = 1 << 10
	mib = 1 << 20

	headerSize      = 4 * kib
	regionListSize  = 64 * kib
	maxRegions      = 2047
	metadataSize    = 64 * kib // of the list; the items lie behind it
	maxItems        = 2047
	maxMetadata     = 64 * mib
	maxSize         = 64 << 40 // of a disk
	chunkSectors    = 1 << 23  // whose bits fill one block of bitmap
	maxItemRead     = 16
	headerOffset1   = 64 * kib
	headerOffset2   = 128 * kib
	regionsOffset1  = 192 * kib
	regionsOffset2  = 256 * kib
	entryStateMask  = 7
	entryOffsetMask = ^uint64(mib - 1)
)

// States of a block in the table.
const (
	blockNotPresent = 0
	blockUndefined  = 1
	blockZero       = 2
	blockUnmapped   = 3
	blockPresent    = 6
	blockPartly     = 7
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Image is an image whose metadata have been read. It is not changed after Open.
type Image struct {
	Size           int64 // of the disk
	BlockSize      int64
	LogicalSector  int
	PhysicalSector int
	// Fixed tells that all blocks are meant to be there for ever.
	Fixed bool
	// Replayed is how many entries of the log were carried out in memory: the image was not closed well.
	Replayed int

	fileSize int64 // as the log tells, where it has the last word
	tableAt  region
	log      *overlay // nil: nothing was replayed
}

type region struct{ offset, length int64 }

// header is what one of the two headers tells.
type header struct {
	sequence   uint64
	logGUID    guid
	logVersion uint16
	log        region
}

// Open reads the headers, the log, and the metadata of an image in a file of size bytes.
func Open(r io.ReaderAt, size int64) (*Image, error) {
	magic := make([]byte, len(Magic))
	if err := sparse.ReadFull(r, size, magic, 0, "VHDX magic"); err != nil {
		return nil, err
	}
	if string(magic) != Magic {
		return nil, sparse.Corruptf("not a VHDX image: no magic at the beginning")
	}
	h, err := readHeaders(r, size)
	if err != nil {
		return nil, err
	}
	i := &Image{fileSize: size}
	if h.logGUID != (guid{}) {
		if err := i.replay(r, h); err != nil {
			return nil, err
		}
	}
	return i, i.open(i.behindLog(r))
}

// behindLog gives the file as it is with the log carried out.
func (i *Image) behindLog(r io.ReaderAt) io.ReaderAt {
	if i.log == nil {
		return r
	}
	return i.log.over(r)
}

func (i *Image) open(r io.ReaderAt) error {
	regions, err := i.readRegions(r)
	if err != nil {
		return err
	}
	metadata, table := regions[regionMetadata], regions[regionTable]
	if metadata.length == 0 || table.length == 0 {
		return sparse.Corruptf("VHDX regions: the block table or the metadata are missing")
	}
	i.tableAt = table
	if err := i.readMetadata(r, metadata); err != nil {
		return err
	}
	if need := i.tableEntries() * 8; need > table.length {
		return sparse.Corruptf("VHDX block table: %d bytes are needed for the disk, and its region has %d", need, table.length)
	}
	return nil
}

// readHeaders gives the header that holds: of those that are sound, the one with the higher number.
func readHeaders(r io.ReaderAt, size int64) (header, error) {
	first, err1 := readHeader(r, size, headerOffset1)
	second, err2 := readHeader(r, size, headerOffset2)
	switch {
	case err1 != nil && err2 != nil:
		return header{}, err1
	case err1 != nil, err2 == nil && second.sequence > first.sequence:
		return second, nil
	}
	return first, nil
}

func readHeader(r io.ReaderAt, size, offset int64) (header, error) {
	b := make([]byte, headerSize)
	if err := sparse.ReadFull(r, size, b, offset, "VHDX header"); err != nil {
		return header{}, err
	}
	return parseHeader(b, size)
}

func parseHeader(b []byte, fileSize int64) (h header, err error) {
	if err := checked(b, "head", "VHDX header"); err != nil {
		return h, err
	}
	if v := binary.LittleEndian.Uint16(b[66:]); v != 1 {
		return h, sparse.Unsupportedf("VHDX version %d (only 1 is read)", v)
	}
	h.sequence = binary.LittleEndian.Uint64(b[8:])
	h.logGUID = guid(b[48:64])
	h.logVersion = binary.LittleEndian.Uint16(b[64:])
	h.log, err = parseRegion(binary.LittleEndian.Uint64(b[72:]), binary.LittleEndian.Uint32(b[68:]), fileSize, "VHDX log")
	return h, err
}

// checked looks at the signature and the checksum of a piece of the file.
func checked(b []byte, signature, what string) error {
	if string(b[:4]) != signature {
		return sparse.Corruptf("%s: no signature", what)
	}
	want := binary.LittleEndian.Uint32(b[4:])
	sum := crc32.Update(0, castagnoli, b[:4])
	sum = crc32.Update(sum, castagnoli, make([]byte, 4))
	if sum = crc32.Update(sum, castagnoli, b[8:]); sum != want {
		return sparse.Corruptf("%s: checksum is %#x, want %#x", what, sum, want)
	}
	return nil
}

// parseRegion checks that a region lies where it may: whole MiB behind the headers, within the file.
func parseRegion(offset uint64, length uint32, fileSize int64, what string) (region, error) {
	if offset%mib != 0 || offset < mib || int64(length)%mib != 0 {
		return region{}, sparse.Corruptf("%s: %d bytes at %d are not whole MiB behind the headers", what, length, offset)
	}
	if offset > uint64(fileSize) || int64(length) > fileSize-int64(offset) {
		return region{}, sparse.Corruptf("%s: %d bytes at %d reach beyond the end of the file at %d", what, length, offset, fileSize)
	}
	return region{int64(offset), int64(length)}, nil
}

// readRegions reads the list of regions, of which there are two copies.
func (i *Image) readRegions(r io.ReaderAt) (map[guid]region, error) {
	b := make([]byte, regionListSize)
	var first error
	for _, offset := range []int64{regionsOffset1, regionsOffset2} {
		err := sparse.ReadFull(r, i.fileSize, b, offset, "VHDX regions")
		if err == nil {
			err = checked(b, "regi", "VHDX regions")
		}
		if err == nil {
			return parseRegions(b, i.fileSize)
		}
		if first == nil {
			first = err
		}
	}
	return nil, first
}

func parseRegions(b []byte, fileSize int64) (map[guid]region, error) {
	n := binary.LittleEndian.Uint32(b[8:])
	if n > maxRegions {
		return nil, sparse.Corruptf("VHDX regions: %d of them, and at most %d are possible", n, maxRegions)
	}
	regions := map[guid]region{}
	for k := range int(n) {
		e := b[16+32*k:]
		id := guid(e[:16])
		required := binary.LittleEndian.Uint32(e[28:])&1 != 0
		if id != regionTable && id != regionMetadata {
			if required {
				return nil, sparse.Unsupportedf("VHDX region %s, which the image says must be understood", id)
			}
			continue
		}
		if _, twice := regions[id]; twice {
			return nil, sparse.Corruptf("VHDX regions: %s is there twice", id)
		}
		g, err := parseRegion(binary.LittleEndian.Uint64(e[16:]), binary.LittleEndian.Uint32(e[24:]), fileSize, "VHDX region "+id.String())
		if err != nil {
			return nil, err
		}
		regions[id] = g
	}
	return regions, nil
}

// tableEntries is how many entries the table has at least: one for each block, and after each chunk one for its bitmap.
func (i *Image) tableEntries() int64 {
	blocks := (i.Size + i.BlockSize - 1) / i.BlockSize
	if blocks == 0 {
		return 0
	}
	return blocks + (blocks-1)/i.chunkRatio()
}

// chunkRatio is how many blocks share one block of bitmap.
func (i *Image) chunkRatio() int64 { return chunkSectors * int64(i.LogicalSector) / i.BlockSize }

// Map reads the table. r is the file that Open read.
func (i *Image) Map(r io.ReaderAt) (sparse.Map, error) {
	t, err := sparse.NewTable(i.Size, i.BlockSize, i.fileSize)
	if err != nil {
		return nil, err
	}
	ratio := i.chunkRatio()
	err = sparse.Each64(i.behindLog(r), i.fileSize, i.tableAt.offset, i.tableEntries(), "VHDX block table", func(n int64, b [8]byte) error {
		if n%(ratio+1) == ratio {
			return nil // the bitmap of a chunk, which only an image with a parent needs
		}
		return i.setBlock(t, n-n/(ratio+1), binary.LittleEndian.Uint64(b[:]))
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}

func (i *Image) setBlock(t *sparse.Table, n int64, e uint64) error {
	switch state := e & entryStateMask; state {
	case blockNotPresent, blockUndefined:
		return nil
	case blockZero, blockUnmapped:
		t.SetZero(n)
		return nil
	case blockPresent:
		host := e & entryOffsetMask
		if host > 1<<62 {
			return sparse.Corruptf("VHDX block %d is said to lie at %d", n, host)
		}
		if i.log.touches(int64(host), i.BlockSize) {
			return sparse.Unsupportedf("VHDX log that changes block %d of the disk itself (have the log replayed first: qemu-img check -r all, or open it in Hyper-V)", n)
		}
		return t.SetData(n, int64(host))
	case blockPartly:
		return sparse.Corruptf("VHDX block %d is said to be there in part, and the image has no parent", n)
	default:
		return sparse.Corruptf("VHDX block %d has the unknown state %d", n, state)
	}
}
