// SPDX-License-Identifier: Apache-2.0

package vhdx

import (
	"encoding/binary"
	"io"

	"github.com/sluice-blk/sluice/internal/format/sparse"
)

// readMetadata reads the list of items and those that are known.
func (i *Image) readMetadata(r io.ReaderAt, at region) error {
	if at.length < metadataSize || at.length > maxMetadata {
		return sparse.Corruptf("VHDX metadata: a region of %d bytes", at.length)
	}
	list := make([]byte, metadataSize)
	if err := sparse.ReadFull(r, i.fileSize, list, at.offset, "VHDX metadata"); err != nil {
		return err
	}
	items, err := parseItems(list, at.length)
	if err != nil {
		return err
	}
	values := map[guid][]byte{}
	for id, item := range items {
		b := make([]byte, min(item.length, maxItemRead))
		if err := sparse.ReadFull(r, i.fileSize, b, at.offset+item.offset, "VHDX metadata item"); err != nil {
			return err
		}
		values[id] = b
	}
	return i.adopt(values)
}

// parseItems gives the place of each known item in the region.
func parseItems(list []byte, length int64) (map[guid]region, error) {
	if string(list[:8]) != "metadata" {
		return nil, sparse.Corruptf("VHDX metadata: no signature")
	}
	n := binary.LittleEndian.Uint16(list[10:])
	if n > maxItems {
		return nil, sparse.Corruptf("VHDX metadata: %d items, and at most %d are possible", n, maxItems)
	}
	items := map[guid]region{}
	for k := range int(n) {
		e := list[32+32*k:]
		id := guid(e[:16])
		switch id {
		case itemParameters, itemSize, itemIdentifier, itemLogicalSector, itemPhysicalSector:
		case itemParent:
			return nil, sparse.Unsupportedf("VHDX image with a parent (merge it with its parent first)")
		default:
			if binary.LittleEndian.Uint32(e[24:])&4 != 0 {
				return nil, sparse.Unsupportedf("VHDX metadata item %s, which the image says must be understood", id)
			}
			continue
		}
		item := region{int64(binary.LittleEndian.Uint32(e[16:])), int64(binary.LittleEndian.Uint32(e[20:]))}
		if item.offset < metadataSize || item.offset > length || item.length > length-item.offset {
			return nil, sparse.Corruptf("VHDX metadata item %s: %d bytes at %d are not behind the list and within the region of %d", id, item.length, item.offset, length)
		}
		if _, twice := items[id]; twice {
			return nil, sparse.Corruptf("VHDX metadata item %s is there twice", id)
		}
		items[id] = item
	}
	return items, nil
}

// adopt takes over what the items tell.
func (i *Image) adopt(values map[guid][]byte) error {
	for id, width := range map[guid]int{itemParameters: 8, itemSize: 8, itemLogicalSector: 4} {
		if len(values[id]) < width {
			return sparse.Corruptf("VHDX metadata item %s is missing or too short", id)
		}
	}
	parameters := values[itemParameters]
	i.BlockSize = int64(binary.LittleEndian.Uint32(parameters))
	flags := binary.LittleEndian.Uint32(parameters[4:])
	i.Fixed = flags&1 != 0
	size := binary.LittleEndian.Uint64(values[itemSize])
	i.LogicalSector = int(binary.LittleEndian.Uint32(values[itemLogicalSector]))
	i.PhysicalSector = i.LogicalSector
	if p := values[itemPhysicalSector]; len(p) >= 4 {
		i.PhysicalSector = int(binary.LittleEndian.Uint32(p))
	}
	switch {
	case flags&2 != 0:
		return sparse.Unsupportedf("VHDX image with a parent (merge it with its parent first)")
	case i.BlockSize < mib || i.BlockSize > 256*mib || i.BlockSize&(i.BlockSize-1) != 0:
		return sparse.Corruptf("VHDX block size of %d is no power of two from 1 MiB to 256 MiB", i.BlockSize)
	case i.LogicalSector != 512 && i.LogicalSector != 4096:
		return sparse.Corruptf("VHDX logical sectors of %d bytes", i.LogicalSector)
	case i.PhysicalSector != 512 && i.PhysicalSector != 4096:
		return sparse.Corruptf("VHDX physical sectors of %d bytes", i.PhysicalSector)
	case size > maxSize || size%uint64(i.LogicalSector) != 0:
		return sparse.Corruptf("VHDX disk of %d bytes: it is no multiple of its sectors of %d, or above 64 TiB", size, i.LogicalSector)
	}
	i.Size = int64(size)
	return nil
}
