// SPDX-License-Identifier: Apache-2.0

package sparse

import (
	"io"
	"math/bits"
)

// MaxBlocks bounds the blocks of a disk: 64 TiB of blocks of 1 MiB, 4 TiB of grains of 64 KiB, which is more than the
// formats allow in their usual shapes. It bounds the time that reading a table takes.
const MaxBlocks = 1 << 26

// Sector is the unit that every host offset in a Table is a multiple of.
const Sector = 512

const pageEntries = 512

// An entry is the host offset of a block, whose low bits are free for its kind.
type entry uint64

type page [pageEntries]entry

func (e entry) kind() Kind  { return Kind(e % Sector) }
func (e entry) host() int64 { return int64(e &^ (Sector - 1)) }

// Table is the Map of a disk made of blocks of one size, each anywhere in the file or not there at all.
type Table struct {
	size     int64 // of the disk
	fileSize int64
	shift    uint
	pages    []*page
}

// NewTable makes a table of a disk of size bytes in blocks of block bytes, all of them holes, in a file of fileSize bytes.
func NewTable(size, block, fileSize int64) (*Table, error) {
	if block < Sector || block&(block-1) != 0 {
		return nil, Corruptf("the block size of %d is no power of two from %d up", block, Sector)
	}
	blocks := size / block
	if size%block != 0 {
		blocks++
	}
	if size < 0 || blocks > MaxBlocks {
		return nil, Unsupportedf("a disk of %d bytes has more than %d blocks of %d", size, MaxBlocks, block)
	}
	t := &Table{size: size, fileSize: fileSize, shift: uint(bits.TrailingZeros64(uint64(block)))}
	t.pages = make([]*page, (blocks+pageEntries-1)/pageEntries)
	return t, nil
}

// Blocks is how many blocks the disk has; the last one may be there in part.
func (t *Table) Blocks() int64 { return (t.size + t.BlockSize() - 1) >> t.shift }

// BlockSize is the size of a block in bytes.
func (t *Table) BlockSize() int64 { return 1 << t.shift }

// SetZero marks block i as zero.
func (t *Table) SetZero(i int64) { t.set(i, entry(Zero)) }

// SetData says that block i begins at host. As much of it as the disk has must lie in the file.
func (t *Table) SetData(i, host int64) error {
	if err := t.check(i, host, min(t.BlockSize(), t.size-i<<t.shift)); err != nil {
		return err
	}
	t.set(i, entry(host)|entry(Data))
	return nil
}

// SetDeflate says that the compressed grain of block i begins at host.
func (t *Table) SetDeflate(i, host int64) error {
	if err := t.check(i, host, Sector); err != nil {
		return err
	}
	t.set(i, entry(host)|entry(Deflate))
	return nil
}

// check refuses a place that is no place in the file. The last sector of a file may be cut short.
func (t *Table) check(i, host, length int64) error {
	end := (t.fileSize + Sector - 1) &^ (Sector - 1)
	switch {
	case host < Sector || host%Sector != 0:
		return Corruptf("block %d is said to lie at %d, where no block can lie", i, host)
	case host > end || length > end-host:
		return Corruptf("block %d lies at %d, beyond the end of the file at %d (the file is cut short)", i, host, t.fileSize)
	}
	return nil
}

func (t *Table) set(i int64, e entry) {
	p := t.pages[i/pageEntries]
	if p == nil {
		p = new(page)
		t.pages[i/pageEntries] = p
	}
	p[i%pageEntries] = e
}

// at gives the entry of block i, which is within the disk.
func (t *Table) at(i int64) entry {
	if p := t.pages[i/pageEntries]; p != nil {
		return p[i%pageEntries]
	}
	return 0
}

// Lookup implements Map.
func (t *Table) Lookup(off, n int64) Extent {
	i := off >> t.shift
	within := off & (t.BlockSize() - 1)
	first := t.at(i)
	e := Extent{Kind: first.kind(), Offset: off}
	switch e.Kind {
	case Data:
		e.Host = first.host() + within
	case Deflate:
		e.Host, e.Length, e.Room = first.host(), min(n, t.BlockSize()-within), t.room(i, first)
		return e
	}
	length := t.BlockSize() - within
	for length < n {
		i++
		if t.pages[i/pageEntries] == nil && e.Kind == Hole {
			skip := pageEntries - i%pageEntries
			length += skip << t.shift
			i += skip - 1
			continue
		}
		next := t.at(i)
		if next.kind() != e.Kind || e.Kind == Data && next.host() != e.Host+length {
			break
		}
		length += t.BlockSize()
	}
	e.Length = min(n, length)
	return e
}

// room bounds the compressed grain of block i. Grains are mostly written one behind the other, so where the next one
// begins close behind, this one has ended. Compression may make a grain larger, but nobody writes it then twice as large.
func (t *Table) room(i int64, e entry) int64 {
	room := min(2*t.BlockSize(), t.fileSize-e.host())
	if i+1 < t.Blocks() {
		if next := t.at(i + 1); next.kind() == Deflate && next.host() > e.host() {
			room = min(room, next.host()-e.host())
		}
	}
	return room
}

// Each32 reads n entries of 4 bytes at offset of the file and hands them on, in order, with their index.
func Each32(r io.ReaderAt, size, offset, n int64, what string, each func(i int64, b [4]byte) error) error {
	return eachEntry(r, size, offset, n, 4, what, func(i int64, b []byte) error { return each(i, [4]byte(b)) })
}

// Each64 does the same with entries of 8 bytes.
func Each64(r io.ReaderAt, size, offset, n int64, what string, each func(i int64, b [8]byte) error) error {
	return eachEntry(r, size, offset, n, 8, what, func(i int64, b []byte) error { return each(i, [8]byte(b)) })
}

func eachEntry(r io.ReaderAt, size, offset, n, width int64, what string, each func(i int64, b []byte) error) error {
	if n < 0 || n > size/width {
		return Corruptf("%s: %d entries do not fit into the file of %d bytes", what, n, size)
	}
	buf := make([]byte, min(n*width, 64<<10))
	for i := int64(0); i < n; {
		piece := buf[:min(int64(len(buf)), (n-i)*width)]
		if err := ReadFull(r, size, piece, offset+i*width, what); err != nil {
			return err
		}
		for ; len(piece) > 0; piece = piece[width:] {
			if err := each(i, piece[:width]); err != nil {
				return err
			}
			i++
		}
	}
	return nil
}
