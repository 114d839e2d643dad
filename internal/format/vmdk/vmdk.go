// SPDX-License-Identifier: Apache-2.0

// Package vmdk reads VMware disk images that are one file: monolithicSparse, and streamOptimized with its compressed
// grains. It writes nothing.
//
// Such a file is a header, a descriptor (text), a directory of tables of 4 bytes for each grain, and the grains. A stream
// has its directory at the end, which a second header there tells; it is told by a footer that the first header leaves it
// open. Everything but the text is little-endian, and counted in sectors of 512 bytes.
//
// # What it does not do
//
// An image of several files (monolithicFlat, twoGbMaxExtent...) is told about and not read: its descriptor is a text that
// names files, and who can write it could have any file of the host read as a disk. The ESX formats (COWD, SESPARSE), and
// images with a parent, are refused.
//
// Facts: VMware's "Virtual Disk Format 5.0".
package vmdk

import (
	"encoding/binary"
	"io"
	"strings"

	"github.com/sluice-blk/sluice/internal/format/sparse"
)

// Magic begins the file.
const (
	Magic    = "KDMV"
	MagicESX = "COWD"
)

const (
	sector     = sparse.Sector
	headerSize = 512
	maxSectors = 1 << 41 // a PiB: well beyond the format, and far from any overflow
	tableEach  = 512     // entries of a grain table; everybody writes that many
	atTheEnd   = 1<<64 - 1

	flagNewlines   = 1 << 0
	flagZeroGrains = 1 << 2
	flagCompressed = 1 << 16
	flagMarkers    = 1 << 17

	deflate = 1

	zeroGrain = 1 // an entry of a grain table, with flagZeroGrains

	footerMarker = 3
	footerSize   = 3 * sector // marker, header, end of the stream
)

// maxCompressed is the largest grain that is inflated; streams have grains of 64 KiB.
const maxCompressed = 1 << 20

// Image is an image whose header and descriptor have been read. It is not changed after Open.
type Image struct {
	Size       int64 // of the disk
	GrainSize  int64 // 0: the image is a descriptor alone
	Compressed bool
	Descriptor *Descriptor

	fileSize  int64
	directory int64 // offset
	zeros     bool  // an entry of 1 is a grain of zeros
}

// Open reads the header and the descriptor of an image in a file of size bytes.
func Open(r io.ReaderAt, size int64) (*Image, error) {
	head := make([]byte, min(size, headerSize))
	if err := sparse.ReadFull(r, size, head, 0, "VMDK header"); err != nil {
		return nil, err
	}
	switch {
	case strings.HasPrefix(string(head), Magic) && len(head) == headerSize:
		return openSparse(r, size, head)
	case strings.HasPrefix(string(head), MagicESX):
		return nil, sparse.Unsupportedf("VMDK image in an ESX format (COWD); export it as streamOptimized or monolithicSparse")
	case strings.HasPrefix(string(head), "#"):
		return openDescriptor(r, size)
	}
	return nil, sparse.Corruptf("not a VMDK image: no magic at the beginning")
}

// openDescriptor reads an image that is a text.
func openDescriptor(r io.ReaderAt, size int64) (*Image, error) {
	text := make([]byte, min(size, maxDescriptor))
	if err := sparse.ReadFull(r, size, text, 0, "VMDK descriptor"); err != nil {
		return nil, err
	}
	if !strings.HasPrefix(string(text), DescriptorMagic) {
		return nil, sparse.Corruptf("not a VMDK image: the text does not begin with %q", DescriptorMagic)
	}
	d, err := parseDescriptor(text)
	if err != nil {
		return nil, err
	}
	i := &Image{Descriptor: d, fileSize: size}
	for _, e := range d.Extents {
		i.Size += e.Sectors * sector
	}
	if i.Size > maxSectors*sector {
		return nil, sparse.Corruptf("VMDK descriptor: a disk of %d bytes", i.Size)
	}
	return i, nil
}

func openSparse(r io.ReaderAt, size int64, head []byte) (*Image, error) {
	h, err := parseHeader(head)
	if err != nil {
		return nil, err
	}
	i := &Image{fileSize: size, Descriptor: &Descriptor{ParentCID: noParent}}
	if err := i.readDescriptor(r, h); err != nil {
		return nil, err
	}
	if h.directory == atTheEnd {
		if h, err = readFooter(r, size); err != nil {
			return nil, err
		}
	}
	return i, i.adopt(h)
}

// header is what a header tells, in sectors.
type header struct {
	version, flags             uint32
	capacity, grain            uint64
	descriptor, descriptorSize uint64
	tableEntries               uint32
	directory                  uint64
	compression                uint16
}

func parseHeader(b []byte) (h header, err error) {
	u32 := func(at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
	u64 := func(at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }
	h = header{
		version: u32(4), flags: u32(8), capacity: u64(12), grain: u64(20), descriptor: u64(28), descriptorSize: u64(36),
		tableEntries: u32(44), directory: u64(56), compression: binary.LittleEndian.Uint16(b[77:]),
	}
	switch {
	case string(b[:4]) != Magic:
		return h, sparse.Corruptf("VMDK header: no magic")
	case h.version < 1 || h.version > 3:
		return h, sparse.Unsupportedf("VMDK version %d (only 1 to 3 are read)", h.version)
	case h.flags&flagNewlines != 0 && string(b[73:77]) != "\n \r\n":
		return h, sparse.Corruptf("VMDK header: its line ends were changed: the file was transferred as text")
	}
	return h, nil
}

// readFooter reads the header at the end of a stream.
func readFooter(r io.ReaderAt, size int64) (header, error) {
	b := make([]byte, footerSize)
	if err := sparse.ReadFull(r, size, b, size-footerSize, "VMDK footer"); err != nil {
		return header{}, err
	}
	if kind := binary.LittleEndian.Uint32(b[12:]); kind != footerMarker || binary.LittleEndian.Uint32(b[8:]) != 0 {
		return header{}, sparse.Corruptf("VMDK footer: it is not where it must be at the end of the file (the file is cut short, or has something behind it)")
	}
	h, err := parseHeader(b[sector:])
	if err == nil && h.directory == atTheEnd {
		err = sparse.Corruptf("VMDK footer: it does not tell either where the directory is")
	}
	return h, err
}

// readDescriptor reads the text in the file, which an extent of an image of several files has not.
func (i *Image) readDescriptor(r io.ReaderAt, h header) error {
	if h.descriptor == 0 || h.descriptorSize == 0 {
		return nil
	}
	if h.descriptorSize > maxDescriptor/sector || h.descriptor > maxSectors {
		return sparse.Corruptf("VMDK descriptor: %d sectors at sector %d", h.descriptorSize, h.descriptor)
	}
	text := make([]byte, min(int64(h.descriptorSize)*sector, i.fileSize))
	if err := sparse.ReadFull(r, i.fileSize, text, int64(h.descriptor)*sector, "VMDK descriptor"); err != nil {
		return err
	}
	d, err := parseDescriptor(text)
	if err != nil {
		return err
	}
	if d.ParentCID != noParent {
		return sparse.Unsupportedf("VMDK image with a parent (merge it with its parent first)")
	}
	i.Descriptor = d
	return nil
}

// adopt checks the header that tells where the directory is, and takes over what it tells.
func (i *Image) adopt(h header) error {
	switch {
	case h.grain < 1 || h.grain > 1<<18 || h.grain&(h.grain-1) != 0:
		return sparse.Corruptf("VMDK grain of %d sectors is no power of two up to 128 MiB", h.grain)
	case h.capacity > maxSectors:
		return sparse.Corruptf("VMDK disk of %d sectors", h.capacity)
	case h.tableEntries != tableEach:
		return sparse.Unsupportedf("VMDK grain tables of %d entries (only %d are read)", h.tableEntries, tableEach)
	case h.directory == 0 || h.directory > maxSectors:
		return sparse.Corruptf("VMDK grain directory at sector %d", h.directory)
	}
	i.Size, i.GrainSize = int64(h.capacity)*sector, int64(h.grain)*sector
	i.directory = int64(h.directory) * sector
	i.zeros = h.flags&flagZeroGrains != 0
	if i.Compressed = h.flags&flagCompressed != 0; !i.Compressed {
		return nil
	}
	switch {
	case h.compression != deflate:
		return sparse.Unsupportedf("VMDK compression %d (only deflate is read)", h.compression)
	case h.flags&flagMarkers == 0:
		return sparse.Unsupportedf("VMDK image with compressed grains and no markers")
	case i.GrainSize > maxCompressed:
		return sparse.Unsupportedf("VMDK compressed grains of %d bytes (up to %d are read)", i.GrainSize, maxCompressed)
	}
	return nil
}

// Map reads the directory and the tables. r is the file that Open read.
func (i *Image) Map(r io.ReaderAt) (sparse.Map, error) {
	if i.GrainSize == 0 {
		return nil, i.severalFiles()
	}
	t, err := sparse.NewTable(i.Size, i.GrainSize, i.fileSize)
	if err != nil {
		return nil, err
	}
	tables := (t.Blocks() + tableEach - 1) / tableEach
	var room int64
	err = sparse.Each32(r, i.fileSize, i.directory, tables, "VMDK grain directory", func(n int64, b [4]byte) error {
		at := int64(binary.LittleEndian.Uint32(b[:])) * sector
		if at == 0 {
			return nil
		}
		// No two tables share their place, so together they are no larger than the file.
		if room += tableEach * 4; room > i.fileSize {
			return sparse.Corruptf("VMDK grain tables take more than the whole file")
		}
		return i.readTable(r, t, n*tableEach, at)
	})
	if err != nil {
		return nil, err
	}
	return t, nil
}

// readTable reads the grain table whose first entry is that of grain first.
func (i *Image) readTable(r io.ReaderAt, t *sparse.Table, first, at int64) error {
	n := min(tableEach, t.Blocks()-first)
	return sparse.Each32(r, i.fileSize, at, n, "VMDK grain table", func(k int64, b [4]byte) error {
		switch e := binary.LittleEndian.Uint32(b[:]); {
		case e == 0:
			return nil
		case e == zeroGrain && i.zeros:
			t.SetZero(first + k)
			return nil
		case i.Compressed:
			return t.SetDeflate(first+k, int64(e)*sector)
		default:
			return t.SetData(first+k, int64(e)*sector)
		}
	})
}

// severalFiles tells what to do with an image whose data are elsewhere.
func (i *Image) severalFiles() error {
	if d := i.Descriptor; len(d.Extents) == 1 && d.Extents[0].Type == "FLAT" && d.Extents[0].Offset == 0 {
		return sparse.Unsupportedf("VMDK descriptor of type %s, which names another file (its disk is the file %q as it is: use that, with format=raw)", d.CreateType, d.Extents[0].File)
	}
	return sparse.Unsupportedf("VMDK descriptor of type %s, which names other files (make it one file first: qemu-img convert -O vmdk)", i.Descriptor.CreateType)
}

// MarkerSize is how much of a compressed grain stands before its compressed bytes.
const MarkerSize = 12

// ParseMarker reads what stands before the compressed bytes of a grain: the byte of the disk that it begins at, and how
// many compressed bytes follow.
func ParseMarker(b []byte) (offset, length int64, err error) {
	lba := binary.LittleEndian.Uint64(b)
	length = int64(binary.LittleEndian.Uint32(b[8:]))
	if lba > maxSectors || length == 0 || length > 2*maxCompressed {
		return 0, 0, sparse.Corruptf("VMDK grain marker: sector %d, %d compressed bytes", lba, length)
	}
	return int64(lba) * sector, length, nil
}
