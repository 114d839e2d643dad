// SPDX-License-Identifier: Apache-2.0

package img

import (
	"path/filepath"

	"github.com/sluice-blk/sluice/internal/node/foreign"
)

// VMDKInfo is specific to vmdk.
type VMDKInfo struct {
	CID        uint32           `json:"cid"`
	ParentCID  uint32           `json:"parent-cid"`
	CreateType string           `json:"create-type"`
	Extents    []VMDKExtentInfo `json:"extents"`
}

// VMDKExtentInfo is a part of the disk of a vmdk image.
type VMDKExtentInfo struct {
	Compressed  bool   `json:"compressed,omitempty"`
	VirtualSize int64  `json:"virtual-size"`
	Filename    string `json:"filename"`
	ClusterSize int64  `json:"cluster-size,omitempty"`
	Format      string `json:"format"`
}

// foreignInfo fills in what an image of a format that is only read tells. Files that it names are not looked at.
func (i *Image) foreignInfo(info *Info) error {
	size, err := i.Size()
	if err != nil {
		return err
	}
	d, err := foreign.Describe(i.Format, i.f, size)
	if err != nil {
		return err
	}
	info.VirtualSize, info.ClusterSize, info.Dirty = d.Size, d.ClusterSize, d.Unclean
	if d.VMDK != nil {
		info.Specific = &FormatSpecific{Type: i.Format, Data: i.vmdkInfo(d.VMDK)}
	}
	return nil
}

func (i *Image) vmdkInfo(v *foreign.VMDK) *VMDKInfo {
	all := &VMDKInfo{CID: v.CID, ParentCID: v.ParentCID, CreateType: v.CreateType}
	for _, e := range v.Extents {
		name := e.File
		switch {
		case name == "":
			name = i.Name
		case !filepath.IsAbs(name):
			name = filepath.Join(filepath.Dir(i.Name), name)
		}
		all.Extents = append(all.Extents, VMDKExtentInfo{
			Compressed: e.Compressed, VirtualSize: e.Size, Filename: name, ClusterSize: e.ClusterSize, Format: e.Format,
		})
	}
	return all
}
