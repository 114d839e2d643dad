// SPDX-License-Identifier: Apache-2.0

package img

import (
	"encoding/binary"
	"errors"
	"math"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// Making an image one of version 2, which has no zero clusters, no bitmaps and no feature bits. The image is whole after
// each step; the last one writes the header.

func errSnapshots() error { return Wordedf("Internal snapshots prevent downgrade of image") }

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
			return errSnapshots()
		}
	}
	return nil
}

func (a *amendment) downgrade() error {
	err := a.tables(func(t *tables) error {
		for _, b := range t.Bitmaps() {
			if err := t.RemoveBitmap(b.Name); err != nil {
				return err
			}
		}
		return t.writeZeroClusters()
	})
	if err != nil {
		return err
	}
	if err := a.dropZeroFlags(); err != nil {
		return err
	}
	return a.change(func(h *qcow2.Header) {
		h.Version, h.Additional = 2, nil
		h.Incompatible, h.Compatible, h.Autoclear = 0, 0, 0
	})
}

// writeZeroClusters stores zeros where a cluster is said to read as zeros and that cannot be said by leaving it out: where
// it has a host cluster, and where a backing file would show.
func (t *tables) writeZeroClusters() error {
	backed := t.Header().BackingFile != ""
	for off := int64(0); off < t.Image.Size(); {
		e, err := t.Map(off, t.Image.Size()-off)
		if err != nil {
			return err
		}
		if e.Kind == metadata.ZeroAllocated || e.Kind == metadata.Zero && backed {
			if err := t.allocate(off, e.Length, t.dataStore().writeZeros); err != nil {
				return err
			}
		}
		off += e.Length
	}
	return nil
}

// dropZeroFlags clears the entries of zero clusters that have no host cluster, in all L2 tables; without a backing file
// they read as zeros all the same.
func (a *amendment) dropZeroFlags() error {
	h, err := a.image.header()
	if err != nil {
		return err
	}
	snapshots, _, err := qcow2.ReadSnapshots(a.image.Read, h)
	if err != nil {
		return err
	}
	roots := []l1Place{{h.L1Offset, h.L1Entries}}
	for _, s := range snapshots {
		roots = append(roots, l1Place{s.L1Offset, s.L1Entries})
	}
	g := h.Geometry()
	for _, r := range roots {
		err := a.image.eachL2(&g, r, func(off int64, table []byte) error {
			return a.dropIn(h, &g, off, table)
		})
		if err != nil {
			return err
		}
	}
	return a.image.Flush()
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

func (a *amendment) dropIn(h *qcow2.Header, g *qcow2.Geometry, off int64, table []byte) error {
	changed := false
	for n := range g.L2Entries() {
		switch g.Kind(g.Entry(table, n)) {
		case qcow2.Zero:
			if h.BackingFile != "" {
				return errSnapshots() // of the active disk none are left
			}
			g.PutEntry(table, n, qcow2.L2Entry{})
			changed = true
		case qcow2.ZeroAllocated:
			return errSnapshots()
		}
	}
	if !changed {
		return nil
	}
	return a.image.Write(table, off)
}
