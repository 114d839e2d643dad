// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// ResizeRequest is what a person asks of resize.
type ResizeRequest struct {
	Source
	Size          string // bytes with a suffix, + or - before it makes it relative
	Shrink        bool   // what lies behind the new end may go
	Preallocation string
}

// ErrShrink refuses to cut an image without having been told that this is meant.
var ErrShrink = errors.New("shrinking was not asked for")

// Resize changes the size of a disk. An image whose format nobody named is probed, but one that is taken for raw is only
// that: its beginning, which a guest may have written, names no other file, and nothing but the length is touched.
func Resize(r *ResizeRequest) error {
	sign, n, err := parseRelative(r.Size)
	if err != nil {
		return err
	}
	if !slices.Contains([]string{"", "off", "metadata", "falloc", "full"}, r.Preallocation) {
		return Wordedf("Invalid preallocation mode '%s'", r.Preallocation)
	}
	i, err := OpenImage(r.Source)
	if err != nil {
		return err
	}
	if i.ProbedRaw() {
		r.warn(RawWarning(r.Name))
	}
	target, err := i.resizable(r)
	if err != nil {
		return errors.Join(err, i.Close())
	}
	return errors.Join(r.apply(target, sign, n), target.Close())
}

// parseRelative reads a size with a sign: 0 is absolute.
func parseRelative(s string) (sign int64, n uint64, err error) {
	switch {
	case strings.HasPrefix(s, "+"):
		sign, s = 1, s[1:]
	case strings.HasPrefix(s, "-"):
		sign, s = -1, s[1:]
	}
	o := NewOptions([]OptionInfo{{Name: "size", Kind: OptionSize}})
	if err := o.Set("size", s); err != nil {
		return 0, 0, err
	}
	return sign, o.Number("size"), nil
}

// resizer is something whose size can change.
type resizer interface {
	length() (int64, error)
	// grow and shrink change the size from the old one to the new one.
	grow(from, to int64, preallocation string) error
	shrink(to int64) error
	Close() error
}

func (i *Image) resizable(r *ResizeRequest) (resizer, error) {
	switch i.Format {
	case FormatRaw:
		return &rawResizer{i}, nil
	case FormatQcow2:
		if err := i.named(); err != nil {
			return nil, Wordedf("Could not open '%s': %s", r.Name, err.Error())
		}
		t, err := i.tables(r.Source, metadata.Options{})
		if err != nil {
			return nil, err
		}
		return &qcow2Resizer{t}, nil
	}
	return nil, Wordedf("Image format driver does not support resize")
}

// errNameFormat asks for -f where following what the image says needs more than a guess.
func errNameFormat(what string) error {
	return fmt.Errorf("the image begins as a qcow2 image that names %s, and its format was only guessed (if it is one, say so: -f qcow2; if it is a raw disk whose guest wrote that: -f raw)", what)
}

// named refuses an image that was only guessed to be one and names a data file: that file would be written to.
func (i *Image) named() error {
	if !i.Probed {
		return nil
	}
	h, err := i.header()
	if err == nil && h.HasDataFile() {
		err = errNameFormat("a data file")
	}
	return err
}

func (r *ResizeRequest) apply(target resizer, sign int64, n uint64) error {
	now, err := target.length()
	if err != nil {
		return err
	}
	size, ok := int64(n), n <= math.MaxInt64
	if sign != 0 {
		size = now + sign*int64(n)
		ok = ok && size > 0 && (sign < 0) == (size < now)
		ok = ok || n == 0
	}
	preallocating := r.Preallocation != "" && r.Preallocation != "off"
	switch {
	case !ok || size <= 0:
		return Wordedf("New image size must be positive")
	case size <= now && preallocating:
		return Wordedf("Preallocation can only be used for growing images")
	case size > maxDisk:
		return Wordedf("offset(%d) exceeds maximum(%d)", size, int64(maxDisk))
	case size < now && !r.Shrink:
		return ErrShrink
	case size < now:
		return target.shrink(size)
	case size == now:
		return nil
	}
	return target.grow(now, size, r.Preallocation)
}

// rawResizer changes the length of a file.
type rawResizer struct{ *Image }

func (r *rawResizer) length() (int64, error) { return r.rawSize() }

func (r *rawResizer) shrink(to int64) error { return r.truncate(to) }

func (r *rawResizer) truncate(n int64) error {
	if r.Device() {
		return Wordedf("Cannot resize device files")
	}
	if err := r.Truncate(n); err != nil {
		return Wordedf("Failed to resize file: %s", err)
	}
	return r.Flush()
}

func (r *rawResizer) grow(from, to int64, preallocation string) error {
	if preallocation == "metadata" {
		return Wordedf("Unsupported preallocation mode: %s", preallocation)
	}
	if err := r.truncate(to); err != nil {
		return err
	}
	return Preallocate(r.Store, from, to-from, preallocation)
}

// qcow2Resizer changes the tables of an image.
type qcow2Resizer struct{ *tables }

func (r *qcow2Resizer) length() (int64, error) { return r.Image.Size(), nil }

func (r *qcow2Resizer) check(to int64) error {
	switch {
	case to%512 != 0:
		return Wordedf("The new size must be a multiple of 512")
	case r.Header().Version < 3 && len(r.Snapshots()) > 0:
		return Wordedf("Can't resize a v2 image which has snapshots")
	}
	return nil
}

// growable refuses an image that was only guessed to be one where its backing file would have to be read, or where zeros
// in front of it could not be said.
func (r *qcow2Resizer) growable(from int64) error {
	h := r.Header()
	if !r.image.Probed || h.BackingFile == "" {
		return nil
	}
	if h.Version < 3 {
		return errNameFormat("a backing file")
	}
	if from%r.Geometry().ClusterSize == 0 {
		return nil
	}
	e, err := r.Map(from-1, 1)
	if err == nil && e.Kind == metadata.Unallocated {
		err = errNameFormat("a backing file")
	}
	return err
}

func (r *qcow2Resizer) shrink(to int64) error {
	if err := r.check(to); err != nil {
		return err
	}
	if err := r.Resize(to, true); err != nil || r.data == nil {
		return err
	}
	return errors.Join(r.Commit(), r.data.Truncate(to))
}

// grow lets the new part read as zeros, and preallocates it when that is asked for.
func (r *qcow2Resizer) grow(from, to int64, preallocation string) error {
	if err := r.check(to); err != nil {
		return err
	}
	if err := r.growable(from); err != nil {
		return err
	}
	if r.data != nil {
		if err := r.data.Truncate(to); err != nil {
			return Wordedf("Failed to grow the data file: %s", err)
		}
	}
	if err := r.Resize(to, false); err != nil {
		return err
	}
	if err := r.zero(from, to); err != nil {
		return err
	}
	if r.Header().IsDataFileRaw() && (preallocation == "" || preallocation == "off") {
		preallocation = "metadata" // or the tables would say less than the data file does
	}
	return r.preallocate(from, to, preallocation)
}

// zero makes read as zeros what the new part would show: the rest of the cluster that the old end lies in, and what
// a backing file has there.
func (r *qcow2Resizer) zero(from, to int64) error {
	cluster := r.Geometry().ClusterSize
	edge := min(to, (from+cluster-1)&^(cluster-1))
	backing, err := r.backingSize()
	if err != nil {
		return err
	}
	shown := max(edge, min(to, backing))
	if r.image.Probed {
		return r.zeroAlone(from, edge, shown)
	}
	shows, err := r.shows(from, shown, backing)
	if err != nil || !shows {
		return err
	}
	return r.zeroRange(from, shown-from, DiskOptions{})
}

// zeroAlone does it without opening the backing file.
func (r *qcow2Resizer) zeroAlone(from, edge, shown int64) error {
	shows, err := r.shows(from, edge, 0)
	if err == nil && shows {
		err = r.zeroRange(from, edge-from, DiskOptions{NoBacking: true})
	}
	for off := edge; err == nil && off < shown; {
		var n int64
		n, err = r.Zero(off, shown-off, true)
		if err == nil && n == 0 {
			err = errNameFormat("a backing file")
		}
		off += n
	}
	return err
}

// zeroRange writes zeroes as any other write, through the whole graph.
func (r *qcow2Resizer) zeroRange(off, n int64, o DiskOptions) error {
	if err := r.closeTables(); err != nil {
		return err
	}
	o.Locked = true // by this process
	src := r.src
	src.Name, src.ImageOpts, src.Format, src.Store.NoLock = r.image.Name, false, FormatQcow2, true
	if err := zeroRange(src, off, n, o); err != nil {
		return err
	}
	return r.reopen()
}

// backingSize is the size of what stands behind the image, 0 when nothing does.
func (r *qcow2Resizer) backingSize() (int64, error) {
	h := r.Header()
	switch {
	case h.BackingFile == "":
		return 0, nil
	case r.image.Probed:
		return math.MaxInt64, nil // its file is not opened
	}
	info, err := InfoOf(Source{Name: Beside(r.image.Name, h.BackingFile), Format: h.BackingFormat(), Store: StoreOptions{ReadOnly: true}})
	if err != nil {
		return 0, err
	}
	return info.VirtualSize, nil
}

// shows tells whether anything but zeros could be seen in [from, to).
func (r *qcow2Resizer) shows(from, to, backing int64) (bool, error) {
	for off := from; off < to; {
		e, err := r.Map(off, to-off)
		if err != nil {
			return false, err
		}
		switch {
		case e.Kind == metadata.Data || e.Kind == metadata.Compressed:
			return true, nil
		case e.Kind == metadata.Unallocated && off < backing:
			return true, nil
		}
		off += e.Length
	}
	return false, nil
}

// zeroRange writes zeroes to an image.
func zeroRange(src Source, off, n int64, o DiskOptions) (err error) {
	loops, err := StartLoops(1)
	if err != nil {
		return err
	}
	defer loops.Stop()
	d, err := OpenDisk(context.Background(), loops.At(0), src, o)
	if err != nil {
		return err
	}
	err = d.Zero(off, n, false) // what is allocated stays so
	if err == nil {
		err = d.Flush()
	}
	return errors.Join(err, d.Close())
}

// preallocate gives host clusters to the whole clusters of the new part.
func (r *qcow2Resizer) preallocate(from, to int64, mode string) error {
	fills := map[string]func(off, n int64) error{
		"metadata": r.dataStore().Zero,
		"falloc": func(off, n int64) error {
			return errors.Join(r.dataStore().Zero(off, n), r.dataStore().Allocate(off, n))
		},
		"full": r.dataStore().writeZeros,
	}
	cluster := r.Geometry().ClusterSize
	from = (from + cluster - 1) &^ (cluster - 1)
	if fill := fills[mode]; fill != nil && from < to {
		return r.allocate(from, to-from, fill)
	}
	return nil
}
