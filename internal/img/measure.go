// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

// Measurement is how large the file of an image will be, in bytes. The order of the fields is that of the JSON.
type Measurement struct {
	Bitmaps        *int64 `json:"bitmaps,omitempty"` // on top, when the bitmaps of the source come along
	Required       int64  `json:"required"`          // right after it was made from the source
	FullyAllocated int64  `json:"fully-allocated"`   // when all of the disk has been written to
}

// WriteText writes it for people.
func (m *Measurement) WriteText(w io.Writer) error {
	text := fmt.Sprintf("required size: %d\nfully allocated size: %d\n", m.Required, m.FullyAllocated)
	if m.Bitmaps != nil {
		text += fmt.Sprintf("bitmaps size: %d\n", *m.Bitmaps)
	}
	_, err := io.WriteString(w, text)
	return err
}

// MeasureRequest is what a person asks of measure: the size of a disk, or an image that would be converted.
type MeasureRequest struct {
	Target   string // format of the new image
	Options  []string
	Size     int64
	Source   *Source // nil: Size is meant
	Snapshot string
}

// OptionsError tells that the options do not fit the format.
type OptionsError struct{ error }

// Unwrap gives what is wrong with them.
func (e *OptionsError) Unwrap() error { return e.error }

// Measure tells how large an image will be.
func Measure(ctx context.Context, r *MeasureRequest) (*Measurement, error) {
	o, err := r.options()
	if err != nil {
		return nil, err
	}
	from := &measured{size: r.Size}
	if r.Source != nil {
		if from, err = measureSource(ctx, r); err != nil {
			return nil, err
		}
	}
	if r.Target == FormatRaw {
		n := (from.size + 511) &^ 511
		return &Measurement{Required: n, FullyAllocated: n}, nil
	}
	return measureQcow2(o, from)
}

func (r *MeasureRequest) options() (*Options, error) {
	table := CreateOptions(r.Target, true)
	switch {
	case !NamedFormat(r.Target):
		return nil, Wordedf("Unknown file format '%s'", r.Target)
	case table == nil:
		return nil, Wordedf("Block driver '%s' does not support size measurement", r.Target)
	}
	o := NewOptions(table)
	for _, list := range r.Options {
		if err := o.Parse(list); err != nil {
			return nil, &OptionsError{err}
		}
	}
	return o, nil
}

// measured is what is known of the source.
type measured struct {
	size    int64
	extents [][2]int64 // that hold data: from, to
	bitmaps []qcow2.Bitmap
	tracked bool // it is of a format, and of a version, that has bitmaps
}

// measureSource looks where a source has data, through all of its chain.
func measureSource(ctx context.Context, r *MeasureRequest) (m *measured, err error) {
	loops, err := StartLoops(1)
	if err != nil {
		return nil, err
	}
	defer loops.Stop()
	d, err := OpenDisk(ctx, loops.At(0), *r.Source, DiskOptions{Snapshot: r.Snapshot})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	m = &measured{size: d.Size()}
	if d.Format() == FormatQcow2 {
		if m.bitmaps, m.tracked, err = bitmapsOf(*r.Source); err != nil {
			return nil, err
		}
	}
	err = d.Map(ctx, 0, m.size, func(e block.Extent) error {
		if e.Data && !e.Zero {
			m.add(e.Offset, e.Offset+e.Length)
		}
		return nil
	})
	return m, err
}

func (m *measured) add(from, to int64) {
	if n := len(m.extents); n > 0 && m.extents[n-1][1] == from {
		m.extents[n-1][1] = to
		return
	}
	m.extents = append(m.extents, [2]int64{from, to})
}

// data is how many bytes clusters of this size hold that have data of the source in them.
func (m *measured) data(cluster int64) (sum int64) {
	done := int64(0) // up to where clusters have been counted
	for _, e := range m.extents {
		from := max(done, e[0]&^(cluster-1))
		done = max(done, (e[1]+cluster-1)&^(cluster-1))
		sum += done - min(from, done)
	}
	return sum
}

// bitmapsOf tells whether an image may have bitmaps, which begins with version 3, and gives those that it has.
func bitmapsOf(src Source) (all []qcow2.Bitmap, tracked bool, err error) {
	src.Store.NoLock = true // the disk has it
	i, err := OpenImage(src)
	if err != nil {
		return nil, false, err
	}
	defer func() { err = errors.Join(err, i.Close()) }()
	h, err := i.header()
	if err != nil || h.Version < 3 {
		return nil, false, err
	}
	all, err = qcow2.ReadBitmaps(i.Read, h)
	return all, true, err
}

func measureQcow2(o *Options, from *measured) (*Measurement, error) {
	c, err := qcow2CreateOptions(o)
	if err != nil {
		return nil, err
	}
	c.Size = (from.size + 511) &^ 511
	c.DataFile, c.DataFileRaw = "", false // what lies there is counted as if it lay in the image
	h, err := c.Header()
	if err != nil {
		return nil, tooLarge(err)
	}
	g := h.Geometry()
	all, err := g.Measure(c.Size, 0)
	if err != nil {
		return nil, tooLarge(err)
	}
	m := &Measurement{Required: all.FullyAllocated, FullyAllocated: all.FullyAllocated}
	if c.Preallocation < create.Falloc && c.BackingFile == "" {
		m.Required = all.Required + from.data(g.ClusterSize)
	}
	if from.tracked && h.Version >= 3 {
		n := int64(0)
		if len(from.bitmaps) > 0 {
			n = g.MeasureBitmaps(c.Size, from.bitmaps)
		}
		m.Bitmaps = &n
	}
	return m, nil
}

// tooLarge words the refusal of a disk that the format cannot hold.
func tooLarge(err error) error {
	if errors.Is(err, syscall.EFBIG) {
		return Wordedf("The image size is too large (try using a larger cluster size)")
	}
	return err
}
