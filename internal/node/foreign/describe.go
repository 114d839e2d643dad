// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"fmt"
	"io"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/sparse"
	"github.com/sluice-blk/sluice/internal/format/vdi"
	"github.com/sluice-blk/sluice/internal/format/vhdx"
	"github.com/sluice-blk/sluice/internal/format/vmdk"
	"github.com/sluice-blk/sluice/internal/format/vpc"
)

// Description is what an image says about itself. Sizes are bytes.
type Description struct {
	Format      string
	Size        int64 // of the disk
	ClusterSize int64 // unit in which space is given out; 0: the format, or this image, has none
	// Fixed tells that the whole disk has its place in the file.
	Fixed bool
	// Unclean tells that the image was not closed well, and is read as it was meant to be.
	Unclean bool
	// VMDK is what this format alone knows; nil for the others.
	VMDK *VMDK

	LogicalSector, PhysicalSector int // 0: not told
}

// VMDK is what a VMDK image says besides.
type VMDK struct {
	CID, ParentCID uint32
	CreateType     string
	Extents        []VMDKExtent
}

// VMDKExtent is a part of the disk.
type VMDKExtent struct {
	File        string // "": the image's own file
	Size        int64
	ClusterSize int64 // 0: none, or in a file that was not looked at
	Compressed  bool
	Format      string // FLAT, SPARSE ...; "": the image's own file
}

func (d *Description) compressed() bool {
	return d.VMDK != nil && len(d.VMDK.Extents) > 0 && d.VMDK.Extents[0].Compressed
}

// Describe reads what an image of size bytes says about itself, and not its tables: also what cannot be opened because its
// data lie in other files.
func Describe(format string, r io.ReaderAt, size int64) (*Description, error) {
	im, err := open(format, r, size)
	if err != nil {
		return nil, err
	}
	return im.describe(), nil
}

// image is what a codec gives.
type image interface {
	Map(r io.ReaderAt) (sparse.Map, error)
	describe() *Description
}

func open(format string, r io.ReaderAt, size int64) (image, error) {
	switch format {
	case "vdi":
		i, err := vdi.Open(r, size)
		return vdiImage{i}, err
	case "vhdx":
		i, err := vhdx.Open(r, size)
		return vhdxImage{i}, err
	case "vmdk":
		i, err := vmdk.Open(r, size)
		return vmdkImage{i}, err
	case "vpc":
		i, err := vpc.Open(r, size)
		return vpcImage{i}, err
	}
	return nil, fmt.Errorf("format %q is none of those that are only read (want vdi, vhdx, vmdk or vpc): %w", format, syscall.EINVAL)
}

type vdiImage struct{ *vdi.Image }

func (i vdiImage) describe() *Description {
	return &Description{Format: "vdi", Size: i.Size, ClusterSize: i.BlockSize, Fixed: i.Type == vdi.Static}
}

type vhdxImage struct{ *vhdx.Image }

func (i vhdxImage) describe() *Description {
	return &Description{
		Format: "vhdx", Size: i.Size, ClusterSize: i.BlockSize, Fixed: i.Fixed, Unclean: i.Replayed > 0,
		LogicalSector: i.LogicalSector, PhysicalSector: i.PhysicalSector,
	}
}

type vpcImage struct{ *vpc.Image }

func (i vpcImage) describe() *Description {
	return &Description{Format: "vpc", Size: i.Size, ClusterSize: i.BlockSize, Fixed: i.Type == vpc.Fixed}
}

type vmdkImage struct{ *vmdk.Image }

func (i vmdkImage) describe() *Description {
	d := i.Descriptor
	v := &VMDK{CID: d.CID, ParentCID: d.ParentCID, CreateType: d.CreateType}
	if i.GrainSize != 0 {
		v.Extents = []VMDKExtent{{Size: i.Size, ClusterSize: i.GrainSize, Compressed: i.Compressed}}
	} else {
		for _, e := range d.Extents {
			v.Extents = append(v.Extents, VMDKExtent{File: e.File, Size: e.Sectors * sparse.Sector, Format: e.Type})
		}
	}
	return &Description{Format: "vmdk", Size: i.Size, ClusterSize: i.GrainSize, Fixed: i.GrainSize == 0, VMDK: v}
}

// magic is how an image of some format begins, and how it ends where it does not begin in a way of its own.
type magic struct {
	format string
	offset int
	bytes  string
}

var magics = []magic{
	{"vmdk", 0, vmdk.Magic},
	{"vmdk", 0, vmdk.MagicESX},
	{"vmdk", 0, vmdk.DescriptorMagic},
	{"vhdx", 0, vhdx.Magic},
	{"vpc", 0, vpc.Magic},
	{"vdi", vdi.MagicOffset, vdi.Magic},
}

// ProbeSize is as much of a file as Probe needs.
const ProbeSize = 512

// Probe names the format that a file with this beginning has; "" is none of those that are read here. A fixed vpc image
// cannot be told from a raw disk by its beginning. It is for those who ask for it, and never for a disk that a guest writes:
// a guest can write any beginning.
func Probe(head []byte) string {
	for _, m := range magics {
		if end := m.offset + len(m.bytes); len(head) >= end && string(head[m.offset:end]) == m.bytes {
			return m.format
		}
	}
	return ""
}
