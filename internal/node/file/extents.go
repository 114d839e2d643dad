// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/sys"
)

// Extent is a stretch of the file of one kind.
type Extent struct {
	Offset, Length int64 // bytes
	Hole           bool  // reads as zeros and takes no space
}

// maxExtents bounds one answer of Extents, since a file may be made of holes of one block each.
const maxExtents = 1 << 20

// Extents tells which parts of [offset, offset+length) hold data, in order and without gaps; the range is cut to the
// size of the node. A file system that cannot tell says that all is data, and so does a block device. Data that was
// written and is still in the page cache counts as data. The answer may end early, after a million extents.
//
// Control plane: it waits for the file system. Safe for concurrent use, also with requests in flight.
func (n *Node) Extents(ctx context.Context, offset, length int64) ([]Extent, error) {
	if offset < 0 || length < 0 || offset > n.info.Size {
		return nil, fmt.Errorf("ask for extents at %d of %q: %w", offset, n.o.Path, syscall.EINVAL)
	}
	end := offset + min(length, n.info.Size-offset)
	var list []Extent
	for offset < end && len(list) < maxExtents {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		e, err := n.extentAt(offset, end)
		if err != nil {
			return nil, fmt.Errorf("ask for extents at %d of %q: %w", offset, n.o.Path, err)
		}
		list = append(list, e)
		offset = e.Offset + e.Length
	}
	return list, nil
}

// Map implements block.Mapper: holes read as zeros and store nothing. A file that grows is one hole behind its end.
func (n *Node) Map(ctx context.Context, off, length int64, each func(block.Extent) error) error {
	for at, end := off, off+length; at < end; {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		e, err := n.extentAt(at, end)
		if err != nil {
			return fmt.Errorf("map %q at %d: %w", n.o.Path, at, err)
		}
		at = e.Offset + e.Length
		err = each(block.Extent{Offset: e.Offset, Length: e.Length, Data: !e.Hole, Zero: e.Hole, Present: true, Host: e.Offset, File: n.o.Path})
		if err != nil {
			return err
		}
	}
	return nil
}

// extentAt gives the extent that begins at offset.
func (n *Node) extentAt(offset, end int64) (Extent, error) {
	data, err := sys.Lseek(n.fd, offset, sys.SEEK_DATA)
	switch {
	case errnoIs(err, syscall.ENXIO):
		// No data from here to the end of the file: a hole, and not the end of the disk.
		return Extent{Offset: offset, Length: end - offset, Hole: true}, nil
	case errnoIs(err, syscall.EINVAL, syscall.ENOTSUP, syscall.ESPIPE):
		return Extent{Offset: offset, Length: end - offset}, nil
	case err != nil:
		return Extent{}, err
	case data > offset:
		return Extent{Offset: offset, Length: min(data, end) - offset, Hole: true}, nil
	}
	hole, err := sys.Lseek(n.fd, offset, sys.SEEK_HOLE)
	if err != nil {
		return Extent{}, err
	}
	if hole <= offset {
		hole = end // cannot be, unless the file shrinks meanwhile: then data is the safe answer
	}
	return Extent{Offset: offset, Length: min(hole, end) - offset}, nil
}
