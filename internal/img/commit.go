// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"errors"
	"io"
	"math"
	"strconv"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
)

// CommitRequest is what a person asks of commit: what images store above a base is to be stored in it.
type CommitRequest struct {
	Source   Source // the topmost image
	Cache    Cache
	Base     string // "" is the backing file of the topmost image
	Keep     bool   // leaves the topmost image as it is, which is so with a Base too; else it is emptied
	Rate     int64
	Warnings io.Writer // told of an image that was taken for raw

	Progress *Progress
}

// Run commits. When it fails the topmost image is as it was.
func (r *CommitRequest) Run(ctx context.Context) (err error) {
	top, info, err := openTop(r.Source)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, top.Close()) }()
	if top.ProbedRaw() {
		io.WriteString(r.Warnings, RawWarning(r.Source.Name))
	}
	layers, err := backingLayers(info, StoreOptions{ReadOnly: true})
	if err != nil {
		return backingError(r.Source, info, err)
	}
	if len(layers) == 0 {
		return Wordedf("Image does not have a backing file")
	}
	base := 0
	if r.Base != "" {
		if base = namedLayer(top.Name, layers, r.Base); base < 0 {
			return Wordedf("Did not find '%s' in the backing chain of '%s'", r.Base, r.Source.Name)
		}
	}
	if err := growBase(&layers[base], info.VirtualSize); err != nil {
		return err
	}
	if err := r.copy(ctx, top, info, layers[:base], layers[base]); err != nil {
		return err
	}
	if r.Keep || r.Base != "" {
		return nil
	}
	return empty(top)
}

// growBase makes the base as large as what is committed to it.
func growBase(base *layer, size int64) error {
	if base.info.VirtualSize >= size {
		return nil
	}
	src := base.src
	src.Store.ReadOnly = false
	err := Resize(&ResizeRequest{Source: src, Size: strconv.FormatInt(size, 10)})
	if err != nil {
		return Wordedf("Could not resize '%s': %s", base.src.Name, err.Error())
	}
	return nil
}

// copy writes to the base what top and the layers between them store.
func (r *CommitRequest) copy(ctx context.Context, top *Image, info *Info, between []layer, base layer) (err error) {
	loops, err := StartLoops(2)
	if err != nil {
		return err
	}
	defer loops.Stop()
	var source, target *Disk
	defer func() { err = closeAll(err, source, target) }()
	behind := chainSpec(between, "", false)
	src := Source{Name: top.Name, Format: top.Format, Store: StoreOptions{ReadOnly: true, NoLock: true}}
	source, err = OpenDisk(ctx, loops.At(0), src, DiskOptions{Backing: behind, NoBacking: behind == nil})
	if err != nil {
		return err
	}
	to := base.src
	to.Store.ReadOnly = false
	if target, err = OpenDisk(ctx, loops.At(1), to, DiskOptions{Cache: r.Cache}); err != nil {
		return err
	}
	c := &Convert{
		Sources: []*Disk{source}, Target: target, Exact: true, Rate: r.Rate, Advance: r.Progress.Advance, KeepAbsent: math.MaxInt64,
	}
	// Behind the end of an image in between there are zeros, not what the base has there.
	for _, l := range between {
		c.KeepAbsent = min(c.KeepAbsent, l.info.VirtualSize)
	}
	r.Progress.Expect(info.VirtualSize)
	if err := c.Run(ctx); err != nil && ctx.Err() == nil {
		return Wordedf("Block job failed: %s", err)
	} else if err != nil {
		return err
	}
	return nil
}

// empty makes an image store nothing, so that all of it is read from its backing file. At any point it is an image that
// reads as before, with clusters at worst that nobody uses.
func empty(i *Image) error {
	if i.Format != FormatQcow2 {
		return nil
	}
	h, err := i.header()
	if err != nil {
		return err
	}
	if h.ClearUnknownAutoclear() {
		b, err := h.Encode()
		if err == nil {
			err = i.writeHeader(b)
		}
		if err != nil {
			return Wordedf("Failed to empty %s: %s", i.Name, err)
		}
	}
	if err := i.Write(make([]byte, int64(h.L1Entries)*8), int64(h.L1Offset)); err != nil {
		return Wordedf("Failed to empty %s: %s", i.Name, err)
	}
	if err := i.Flush(); err != nil {
		return Wordedf("Failed to empty %s: %s", i.Name, err)
	}
	if err := i.emptyData(h); err != nil {
		return Wordedf("Failed to empty %s: %s", i.Name, err)
	}
	found, err := check.Run(i.Store, &check.Options{Repair: check.Leaks})
	if err == nil {
		err = i.Truncate(found.ImageEndOffset)
	}
	if err == nil {
		err = i.Flush()
	}
	if err != nil {
		return Wordedf("Failed to empty %s: %s", i.Name, err)
	}
	return nil
}

// emptyData gives back what an external data file holds.
func (i *Image) emptyData(h *qcow2.Header) (err error) {
	if !h.HasDataFile() {
		return nil
	}
	data, err := i.openData(h, StoreOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, data.Close()) }()
	n, err := data.Size()
	if err != nil {
		return err
	}
	return data.Discard(0, n)
}
