// SPDX-License-Identifier: Apache-2.0

// Package vpc reads images of Virtual PC and of Hyper-V's first format (VHD), fixed and dynamic ones. It writes nothing.
//
// A fixed image is the disk with a footer of 512 bytes behind it. A dynamic one begins with a copy of the footer and a
// second header, has a table of 4 bytes for each block, blocks of a bitmap and data, and ends with the footer. Everything
// is big-endian. Differencing images are refused.
//
// # Size
//
// A footer tells the size twice: by a geometry, which cannot express each size and ends at 127 GiB, and as a number.
// Virtual PC shows its guests the geometry; Hyper-V and its kin show the number. Which holds is told by who wrote the
// image. Cutting a disk short would lose its end, and making it longer would move the place where a backup partition table
// is looked for, so the writer's rule is followed: the number for those known to mean it, and where the geometry is at its end.
//
// # What it does not do
//
// The bitmap of a block, which says which of its sectors were ever written, is not looked at: writers fill new blocks with zeros.
//
// Facts: Microsoft's "Virtual Hard Disk Image Format Specification".
package vpc

import (
	"bytes"
	"encoding/binary"
	"io"
	"slices"

	"github.com/sluice-blk/sluice/internal/format/sparse"
)

const (
	// Magic stands at the beginning of a footer.
	Magic = "conectix"
	// FooterSize is the size of a footer. Writers of old made it one byte shorter.
	FooterSize = 512

	headerMagic = "cxsparse"
	headerSize  = 1024

	// A geometry of that many sectors is the largest there is, and tells nothing about the size of the disk.
	geometryEnd = 65535 * 16 * 255
)

// Types of images.
const (
	Fixed        = 2
	Dynamic      = 3
	Differencing = 4
)

const never = 0xffffffff // an entry of the table that is no block

// meanNumber are the writers whose images have the size that the footer tells as a number.
var meanNumber = []string{"win ", "qem2", "d2v ", "tap\x00", "CTXS"}

// Image is an image whose footer and header have been read. It is not changed after Open.
type Image struct {
	Size      int64 // of the disk
	BlockSize int64 // 0: fixed
	Type      uint32
	Creator   string // four letters

	fileSize             int64
	tableOffset, entries int64
}

// Open reads the footer and the header of an image in a file of size bytes.
func Open(r io.ReaderAt, size int64) (*Image, error) {
	f, err := findFooter(r, size)
	if err != nil {
		return nil, err
	}
	i := &Image{Type: binary.BigEndian.Uint32(f[60:]), Creator: string(f[28:32]), fileSize: size}
	if v := binary.BigEndian.Uint32(f[12:]); v>>16 != 1 {
		return nil, sparse.Unsupportedf("VHD version %d.%d (only 1.0 is read)", v>>16, v&0xffff)
	}
	if i.Size, err = diskSize(f); err != nil {
		return nil, err
	}
	switch i.Type {
	case Fixed:
		// The geometry may round up; the end of the disk is the beginning of the footer at the latest.
		if room := size - FooterSize; i.Size > room {
			return nil, sparse.Corruptf("VHD disk of %d bytes does not fit into the file of %d (the file is cut short)", i.Size, size)
		}
		return i, nil
	case Dynamic:
		return i, i.readHeader(r, binary.BigEndian.Uint64(f[16:]))
	case Differencing:
		return nil, sparse.Unsupportedf("differencing VHD image (merge it with its parent first)")
	}
	return nil, sparse.Unsupportedf("VHD image type %d (only fixed and dynamic images are read)", i.Type)
}

// findFooter reads the footer at the end, or else its copy at the beginning. The end goes first: the beginning of a fixed
// image is what the guest wrote there.
func findFooter(r io.ReaderAt, size int64) ([]byte, error) {
	f, err := readFooter(r, size, size-FooterSize)
	if err == nil {
		return f, nil
	}
	f, errFirst := readFooter(r, size, 0)
	if errFirst == nil && binary.BigEndian.Uint32(f[60:]) != Fixed {
		return f, nil
	}
	return nil, err
}

func readFooter(r io.ReaderAt, size, offset int64) ([]byte, error) {
	f := make([]byte, FooterSize)
	if err := sparse.ReadFull(r, size, f, offset, "VHD footer"); err != nil {
		return nil, err
	}
	if string(f[:8]) != Magic {
		return nil, sparse.Corruptf("not a VHD image: no footer at the end of the file")
	}
	if want := binary.BigEndian.Uint32(f[64:]); checksum(f, 64) != want {
		return nil, sparse.Corruptf("VHD footer: checksum is %#x, want %#x", checksum(f, 64), want)
	}
	return f, nil
}

// checksum is the complement of the sum of all bytes but the checksum itself.
func checksum(b []byte, at int) uint32 {
	var sum uint32
	for i, c := range b {
		if i < at || i >= at+4 {
			sum += uint32(c)
		}
	}
	return ^sum
}

func diskSize(f []byte) (int64, error) {
	geometry := int64(binary.BigEndian.Uint16(f[56:])) * int64(f[58]) * int64(f[59])
	number := binary.BigEndian.Uint64(f[48:])
	if geometry == geometryEnd || slices.Contains(meanNumber, string(f[28:32])) {
		if number > 1<<50 {
			return 0, sparse.Corruptf("VHD disk of %d bytes: the format ends at 2 TiB", number)
		}
		return int64(number) &^ (sparse.Sector - 1), nil
	}
	return geometry * sparse.Sector, nil
}

func (i *Image) readHeader(r io.ReaderAt, offset uint64) error {
	if offset > uint64(i.fileSize) {
		return sparse.Corruptf("VHD header at %d is beyond the end of the file at %d", offset, i.fileSize)
	}
	h := make([]byte, headerSize)
	if err := sparse.ReadFull(r, i.fileSize, h, int64(offset), "VHD header"); err != nil {
		return err
	}
	return i.parseHeader(h)
}

func (i *Image) parseHeader(h []byte) error {
	if !bytes.HasPrefix(h, []byte(headerMagic)) {
		return sparse.Corruptf("VHD header: no magic")
	}
	if want := binary.BigEndian.Uint32(h[36:]); checksum(h, 36) != want {
		return sparse.Corruptf("VHD header: checksum is %#x, want %#x", checksum(h, 36), want)
	}
	if v := binary.BigEndian.Uint32(h[24:]); v != 0x00010000 {
		return sparse.Unsupportedf("VHD header version %d.%d (only 1.0 is read)", v>>16, v&0xffff)
	}
	table := binary.BigEndian.Uint64(h[16:])
	i.entries = int64(binary.BigEndian.Uint32(h[28:]))
	i.BlockSize = int64(binary.BigEndian.Uint32(h[32:]))
	switch {
	case i.BlockSize < sparse.Sector || i.BlockSize&(i.BlockSize-1) != 0:
		return sparse.Corruptf("VHD block size of %d is no power of two from %d up", i.BlockSize, sparse.Sector)
	case table > uint64(i.fileSize):
		return sparse.Corruptf("VHD block table at %d is beyond the end of the file at %d", table, i.fileSize)
	case i.Size > i.entries*i.BlockSize: // below 2^63: BlockSize is 2^31 at most
		return sparse.Corruptf("VHD disk of %d bytes does not fit into %d blocks of %d", i.Size, i.entries, i.BlockSize)
	}
	i.tableOffset = int64(table)
	return nil
}

// bitmapSize is what stands before the data of each block: a bit for each sector, in whole sectors.
func (i *Image) bitmapSize() int64 {
	bytes := (i.BlockSize/sparse.Sector + 7) / 8
	return (bytes + sparse.Sector - 1) &^ (sparse.Sector - 1)
}

// Map reads the table. r is the file that Open read.
func (i *Image) Map(r io.ReaderAt) (sparse.Map, error) {
	if i.Type == Fixed {
		return sparse.Linear(0), nil
	}
	t, err := sparse.NewTable(i.Size, i.BlockSize, i.fileSize)
	if err != nil {
		return nil, err
	}
	bitmap := i.bitmapSize()
	err = sparse.Each32(r, i.fileSize, i.tableOffset, t.Blocks(), "VHD block table", func(n int64, b [4]byte) error {
		if sector := binary.BigEndian.Uint32(b[:]); sector != never {
			return t.SetData(n, int64(sector)*sparse.Sector+bitmap)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}
