// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"
	"slices"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// BitmapAction is one thing to do with a bitmap.
type BitmapAction struct {
	Verb   string // add, remove, clear, enable, disable or merge
	Source string // merge: the bitmap to take bits from
}

// BitmapRequest is what a person asks of bitmap. Actions are done in their order; what was done before one fails stays
// done.
type BitmapRequest struct {
	Source
	Bitmap      string
	Actions     []BitmapAction
	Granularity int64 // of add; 0 chooses
	From        *Source
}

// Bitmap changes the persistent bitmaps of an image.
func Bitmap(r *BitmapRequest) error {
	i, err := OpenImage(r.Source)
	if err != nil {
		return err
	}
	if i.ProbedRaw() {
		r.warn(RawWarning(r.Name))
	}
	if i.Format != FormatQcow2 {
		a := r.Actions[0]
		return errors.Join(r.failed(a, noBitmaps(a, r.Bitmap)), i.Close())
	}
	t, err := i.tables(r.Source, metadata.Options{})
	if err != nil {
		return errors.Join(err, i.Close())
	}
	if err := r.onTables(t); err != nil {
		return errors.Join(err, t.Close())
	}
	return t.Close()
}

// noBitmaps is the answer of a format that has none.
func noBitmaps(a BitmapAction, name string) error {
	if a.Verb == "add" {
		return Wordedf("Can't store persistent bitmaps to an image of this format: Operation not supported")
	}
	return bitmapMissing(name)
}

func bitmapMissing(name string) error { return Wordedf("Dirty bitmap '%s' not found", name) }

func (r *BitmapRequest) failed(a BitmapAction, err error) error {
	if err == nil {
		return nil
	}
	return Wordedf("Operation %s on bitmap %s failed: %s", a.Verb, r.Bitmap, err.Error())
}

// onTables does the actions. The image that merge takes from is open while they are done.
func (r *BitmapRequest) onTables(t *tables) error {
	from := t
	if r.From != nil {
		other, err := openMergeSource(*r.From)
		if err != nil {
			return err
		}
		if other != nil {
			defer other.Close() // read-only
		}
		from = other
	}
	for _, a := range r.Actions {
		if err := r.failed(a, r.do(t, from, a)); err != nil {
			return err
		}
	}
	return nil
}

// openMergeSource is nil for an image of a format without bitmaps.
func openMergeSource(src Source) (*tables, error) {
	i, err := OpenImage(src)
	if err != nil {
		return nil, err
	}
	if i.Format != FormatQcow2 {
		return nil, i.Close()
	}
	t, err := i.tables(src, metadata.Options{})
	if err != nil {
		return nil, errors.Join(err, i.Close())
	}
	return t, nil
}

func (r *BitmapRequest) do(t, from *tables, a BitmapAction) error {
	if a.Verb == "add" {
		return r.add(t)
	}
	b, err := t.bitmap(r.Bitmap)
	switch {
	case err != nil:
		return err
	case a.Verb == "remove":
		return t.RemoveBitmap(r.Bitmap)
	case b.Flags&qcow2.BitmapInUse != 0 && a.Verb != "merge":
		return inconsistent(r.Bitmap)
	}
	switch a.Verb {
	case "clear":
		return t.ClearBitmap(r.Bitmap)
	case "enable", "disable":
		return t.EnableBitmap(r.Bitmap, a.Verb == "enable")
	}
	return r.merge(t, from, b, a.Source)
}

func inconsistent(name string) error {
	return Wordedf("Bitmap '%s' is inconsistent and cannot be used\nTry block-dirty-bitmap-remove to delete this bitmap from disk", name)
}

func (t *tables) bitmap(name string) (*qcow2.Bitmap, error) {
	all := t.Bitmaps()
	i := slices.IndexFunc(all, func(b qcow2.Bitmap) bool { return b.Name == name })
	if i < 0 {
		return nil, bitmapMissing(name)
	}
	return &all[i], nil
}

func (r *BitmapRequest) add(t *tables) error {
	granularity := r.Granularity
	if granularity == 0 {
		granularity = min(max(4096, t.Geometry().ClusterSize), 65536)
	}
	_, missing := t.bitmap(r.Bitmap)
	switch {
	case granularity < 1<<qcow2.MinGranularityBits || granularity > 1<<qcow2.MaxGranularityBits || granularity&(granularity-1) != 0:
		return Wordedf("Granularity must be power of 2 and at least 512")
	case r.Bitmap == "":
		return Wordedf("Bitmap name cannot be empty")
	case len(r.Bitmap) > qcow2.MaxBitmapName:
		return Wordedf("Can't make bitmap '%s' persistent: Name length exceeds maximum (%d characters)", r.Bitmap, qcow2.MaxBitmapName)
	case missing == nil:
		return Wordedf("Bitmap already exists: %s", r.Bitmap)
	case t.Header().Version < 3:
		return Wordedf("Can't make bitmap '%s' persistent: Cannot store dirty bitmaps in qcow2 v2 files", r.Bitmap)
	}
	return t.AddBitmap(r.Bitmap, granularity, false)
}

func (r *BitmapRequest) merge(t, from *tables, dst *qcow2.Bitmap, source string) error {
	if from == nil {
		return bitmapMissing(source)
	}
	src, err := from.bitmap(source)
	switch {
	case err != nil:
		return err
	case dst.Flags&qcow2.BitmapInUse != 0:
		return inconsistent(r.Bitmap)
	case src.Flags&qcow2.BitmapInUse != 0:
		return inconsistent(source)
	case t.Image.Size() != from.Image.Size():
		return Wordedf("Bitmaps are of different sizes (destination size is %d, source size is %d) and can't be merged", t.Image.Size(), from.Image.Size())
	}
	return t.MergeBitmap(r.Bitmap, from.Image, source)
}
