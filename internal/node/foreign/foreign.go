// SPDX-License-Identifier: Apache-2.0

// Package foreign is the node of disk images in the formats of other houses, which are only read: vmdk, vhdx, vpc, vdi.
//
// It keeps in memory where each part of the disk lies (see internal/format/sparse for how much that can be), and owns the
// node of the file below it. A read that one stretch of the file answers is handed down as the same request; any other
// one is carried out piece by piece, with zeros filled in and compressed grains inflated, of which each queue keeps the
// last few.
//
// Open, Info, Map and Close are control plane, and a queue belongs to its loop, as with every node; any number of loops
// may share one. Inflating a grain takes the loop a good part of a millisecond.
//
// What it does not do: it never writes, opens no other file that an image names, and recognises no format that it was not
// told of, except for those who call Probe.
package foreign

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/format/sparse"
)

// File is what an image is read from: a node for the data, and plain reads for the tables.
type File interface {
	block.Node
	io.ReaderAt
	// FileSize is the exact length of the file in bytes.
	FileSize() int64
}

// Node is an open image. It implements block.Node and block.Mapper.
type Node struct {
	below  File
	name   string
	about  *Description
	where  sparse.Map
	align  int
	grain  int64 // of compressed images, else 0
	sector int
}

// Open opens an image in the format that is named and takes the file over: closing the node closes it. When Open fails,
// below stays the caller's.
func Open(below File, format string) (*Node, error) {
	i := below.Info()
	im, err := open(format, below, below.FileSize())
	if err != nil {
		return nil, wrap(i.Name, format, err)
	}
	n := &Node{below: below, name: i.Name, about: im.describe(), align: max(i.Align, i.MemAlign, 1)}
	n.sector = max(n.about.LogicalSector, sparse.Sector)
	if n.where, err = im.Map(below); err != nil {
		return nil, wrap(i.Name, format, err)
	}
	if n.about.compressed() {
		n.grain = n.about.ClusterSize
	}
	if err := n.check(i); err != nil {
		return nil, err
	}
	return n, nil
}

// check refuses a file that cannot be read where the image has put its data.
func (n *Node) check(i block.Info) error {
	switch {
	case n.align > sparse.Sector || n.about.Size%int64(n.align) != 0:
		return fmt.Errorf("open %q: the file is read in aligned blocks of %d bytes, and the image is made of sectors of %d: %w (use cache=writeback)",
			n.name, n.align, sparse.Sector, block.ErrNotSupported)
	case n.grain > 0 && i.MaxTransfer > 0 && i.MaxTransfer < int64(compressedRoom(n.grain)):
		return fmt.Errorf("open %q: the file is read in requests of %d bytes at most, and its compressed grains need more: %w",
			n.name, i.MaxTransfer, block.ErrNotSupported)
	}
	return nil
}

// wrap says whose mistake it is, in block's words.
func wrap(name, format string, err error) error {
	var corrupt *sparse.CorruptError
	if errors.As(err, &corrupt) {
		return fmt.Errorf("open %q as %s: %w: %w", name, format, block.ErrCorrupt, err)
	}
	return fmt.Errorf("open %q as %s: %w", name, format, err)
}

// Info implements block.Node.
func (n *Node) Info() block.Info {
	i := n.below.Info()
	return block.Info{
		Name:          n.name,
		Size:          n.about.Size,
		ReadOnly:      true,
		Align:         n.align,
		MemAlign:      n.align,
		OptimalIO:     max(i.OptimalIO, int(n.grain)),
		LogicalBlock:  n.sector,
		PhysicalBlock: max(n.sector, n.about.PhysicalSector),
		MaxTransfer:   i.MaxTransfer,
		MaxSegments:   i.MaxSegments,
		Flush:         block.Native,
		Durability:    "nothing is written, so flush has nothing to do",
		Engine:        i.Engine,
	}
}

// Describe tells what the image says about itself.
func (n *Node) Describe() *Description { return n.about }

// Close implements block.Node.
func (n *Node) Close() error { return n.below.Close() }

// Queue implements block.Node. Must be called on the loop.
func (n *Node) Queue(l *aio.Loop) (block.Queue, error) {
	below, err := n.below.Queue(l)
	if err != nil {
		return nil, err
	}
	q := &queue{n: n, loop: l, below: below, fileSize: n.below.FileSize()}
	if err := q.init(); err != nil {
		return nil, errors.Join(err, below.Close())
	}
	return q, nil
}

// Map implements block.Mapper.
func (n *Node) Map(ctx context.Context, off, length int64, each func(block.Extent) error) error {
	for at, end := off, off+length; at < end; {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		e := n.where.Lookup(at, end-at)
		b := block.Extent{Offset: at, Length: e.Length, Host: -1, File: n.name}
		switch e.Kind {
		case sparse.Zero:
			b.Zero, b.Present = true, true
		case sparse.Hole:
			b.Zero = true
		case sparse.Data:
			b.Data, b.Present, b.Host = true, true, e.Host
		case sparse.Deflate:
			b.Data, b.Present, b.Compressed = true, true, true
		}
		if err := each(b); err != nil {
			return err
		}
		at += e.Length
	}
	return nil
}

// Formats are the names of the formats that are read here.
func Formats() []string { return []string{"vdi", "vhdx", "vmdk", "vpc"} }

// Known tells whether a format is read here.
func Known(format string) bool {
	return strings.Contains(" vdi vhdx vmdk vpc ", " "+format+" ")
}
