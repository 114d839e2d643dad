// SPDX-License-Identifier: Apache-2.0

package img

import (
	"encoding/binary"
	"errors"
	"math"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
)

// Making an image one of version 2, which has no zero clusters, no bitmaps and no feature bits. The image is whole after
// each step; the last one writes the header.

// downgradable refuses what version 2 cannot say.
func (a *amendment) downgradable(h *qcow2.Header) error {
	switch features := h.Incompatible &^ qcow2.Dirty; {
	case h.HasDataFile():
		return Wordedf("Cannot downgrade an image with a data file")
	case features != 0:
		return Wordedf("Cannot downgrade an image with incompatible features 0x%x set", features)
	}
	snapshots, _, err := qcow2.ReadSnapshots(a.image.Read, h)
	if err != nil {
		return err
	}
	for _, s := range snapshots {
		if s.VMState > math.MaxUint32 || s.DiskSize != h.Size {
			return Wordedf("Internal snapshots prevent downgrade of image")
		}
	}
	return nil
}

func (a *amendment) downgrade() error {
	h, err := a.image.header()
	if err == nil {
		err = a.downgradable(h)
	}
	if err != nil {
		return err
	}
	err = a.tables(func(t *tables) error {
		for _, b := range t.Bitmaps() {
			if err := t.RemoveBitmap(b.Name); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := a.expandZeros(); err != nil {
		return err
	}
	return a.change(func(h *qcow2.Header) {
		h.Version, h.Additional = 2, nil
		h.Incompatible, h.Compatible, h.Autoclear = 0, 0, 0
		h.SetExtension(qcow2.ExtensionFeatureNames, nil)
	})
}

// expandZeros rewrites every L2 table without zero clusters: without a backing file what is left out reads as zeros, with
// one zeros are stored. Refcounts are counted anew after that, as the dirty bit demands meanwhile.
func (a *amendment) expandZeros() error {
	z, err := a.newZeroExpander()
	if err != nil {
		return err
	}
	if err := a.change(func(h *qcow2.Header) { h.Incompatible |= qcow2.Dirty }); err != nil {
		return err
	}
	for _, r := range z.roots {
		if err := a.image.eachL2(&z.g, r, z.table); err != nil {
			return err
		}
	}
	if err := a.image.Flush(); err != nil {
		return err
	}
	_, err = check.RebuildRefcounts(a.image.Store)
	return err
}

// zeroExpander rewrites L2 tables.
type zeroExpander struct {
	image  *Image
	g      qcow2.Geometry
	roots  []l1Place // the active one, and those of snapshots
	backed bool
	end    int64 // of the file, where clusters are added
	done   map[int64]bool
}

func (a *amendment) newZeroExpander() (*zeroExpander, error) {
	h, err := a.image.header()
	if err != nil {
		return nil, err
	}
	snapshots, _, err := qcow2.ReadSnapshots(a.image.Read, h)
	if err != nil {
		return nil, err
	}
	z := &zeroExpander{image: a.image, g: h.Geometry(), backed: h.BackingFile != "", done: make(map[int64]bool)}
	z.roots = []l1Place{{h.L1Offset, h.L1Entries}}
	for _, s := range snapshots {
		if err := s.Validate(&z.g); err != nil {
			return nil, err
		}
		z.roots = append(z.roots, l1Place{s.L1Offset, s.L1Entries})
	}
	size, err := a.image.Size()
	z.end = z.g.Clusters(size) << z.g.ClusterBits
	return z, err
}

// table rewrites one, which several L1 tables may share.
func (z *zeroExpander) table(off int64, table []byte) error {
	if z.done[off] {
		return nil
	}
	z.done[off] = true
	changed := false
	for n := range z.g.L2Entries() {
		kind := z.g.Kind(z.g.Entry(table, n))
		if kind != qcow2.Zero && kind != qcow2.ZeroAllocated {
			continue
		}
		e := qcow2.L2Entry{}
		if z.backed {
			if err := z.image.Zero(z.end, z.g.ClusterSize); err != nil {
				return err
			}
			e = z.g.DataEntry(z.end, false)
			z.end += z.g.ClusterSize
		}
		z.g.PutEntry(table, n, e)
		changed = true
	}
	if !changed {
		return nil
	}
	return z.image.Write(table, off)
}

// l1Place is where an L1 table lies.
type l1Place struct {
	off     int64
	entries uint32
}

// eachL2 reads the L2 tables that an L1 table names. Its size has been checked when the image was opened.
func (i *Image) eachL2(g *qcow2.Geometry, r l1Place, each func(off int64, table []byte) error) error {
	l1 := make([]byte, int64(r.entries)*8)
	if err := i.Read(l1, r.off); err != nil {
		return err
	}
	table := make([]byte, g.ClusterSize)
	for n := 0; n < len(l1); n += 8 {
		off := qcow2.L1Entry(binary.BigEndian.Uint64(l1[n:])).Offset()
		switch {
		case off == 0:
			continue
		case !g.Aligned(off):
			return &qcow2.CorruptError{Offset: r.off, What: "L2 table is not aligned"}
		}
		if err := errors.Join(i.Read(table, off), each(off, table)); err != nil {
			return err
		}
	}
	return nil
}
