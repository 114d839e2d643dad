// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"math"
	"strconv"
)

// DDBlock is the block size of dd, in which it counts.
const (
	DDBlock    = 512
	DDBlockMax = math.MaxInt32
)

// DDRequest is what a person asks of dd: a part of an image, copied to a new one.
type DDRequest struct {
	Source Source // read-only
	Target string
	Format string // of the target

	Block    int64 // bytes; what Count and Skip count
	Count    int64 // blocks that are copied at most
	HasCount bool
	Skip     int64 // blocks of the source that are left out

	Warn func(text string)
}

// Run makes the target and copies. All of it is written, zeros too.
func (r *DDRequest) Run(ctx context.Context) (err error) {
	loops, err := StartLoops(2)
	if err != nil {
		return err
	}
	defer loops.Stop()
	var source, target *Disk
	defer func() { err = closeAll(err, source, target) }()
	if CreateOptions(r.Format, true) == nil {
		return Wordedf("Unknown file format")
	}
	if source, err = OpenDisk(ctx, loops.At(0), r.Source, DiskOptions{}); err != nil {
		return err
	}
	skip, n := r.part(source.Size())
	if err := r.create(n); err != nil {
		return Wordedf("%s: error while creating output image: %s", r.Target, err.Error())
	}
	if target, err = OpenDisk(ctx, loops.At(1), Source{Name: r.Target, Format: r.Format}, DiskOptions{}); err != nil {
		return err
	}
	switch {
	case n == 0 && skip >= source.Size() && r.Skip > 0:
		r.Warn(r.Source.Name + ": cannot skip to specified offset")
		return nil
	case n == 0:
		return nil
	}
	return (&Convert{Sources: []*Disk{source}, Target: target, Skip: skip, Length: n}).Run(ctx)
}

// part is where the copy begins, and how long it is.
func (r *DDRequest) part(size int64) (skip, n int64) {
	skip = size
	if r.Skip < size/r.Block+1 {
		skip = min(r.Skip*r.Block, size)
	}
	n = size - skip
	if r.HasCount && r.Count <= n/r.Block {
		n = r.Count * r.Block
	}
	return skip, n
}

func (r *DDRequest) create(size int64) error {
	o := NewOptions(CreateOptions(r.Format, true))
	if err := o.Set("size", strconv.FormatInt((size+511)&^511, 10)); err != nil {
		return err
	}
	return Create(r.Target, r.Format, o)
}
