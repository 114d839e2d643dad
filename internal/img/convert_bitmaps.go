// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"errors"
	"slices"

	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// checkBitmaps finds out which bitmaps of the source are to be copied, before anything is made.
func (c *conversion) checkBitmaps() error {
	if !c.r.Bitmaps {
		return nil
	}
	if len(c.sources) != 1 {
		return Wordedf("Copying bitmaps only possible with single source")
	}
	if c.sources[0].format != FormatQcow2 {
		return Wordedf("Source lacks bitmap support")
	}
	q, _ := c.sources[0].image.Specific.Data.(*Qcow2Info)
	for _, b := range q.Bitmaps {
		switch broken := slices.Contains(b.Flags, "in-use"); {
		case !broken:
			c.bitmaps = append(c.bitmaps, b)
		case !c.r.SkipBroken:
			return Wordedf("Cannot copy inconsistent bitmap '%s'\nTry --skip-broken-bitmaps, or use 'qemu-img bitmap --remove' to delete it", b.Name)
		case c.r.Warn != nil:
			c.r.Warn("Skipping inconsistent bitmap '" + b.Name + "'")
		}
	}
	return nil
}

// copyBitmaps makes them in the target, whose disk is closed for that.
func (c *conversion) copyBitmaps(context.Context) (err error) {
	if len(c.bitmaps) == 0 {
		return nil
	}
	if err := c.target.Close(); err != nil {
		return err
	}
	src := Source{Name: c.r.Target, Format: c.r.Format, ImageOpts: c.r.TargetOpts}
	i, err := OpenImage(src)
	if err != nil {
		return err
	}
	to, err := i.tables(src, metadata.Options{})
	if err != nil {
		return errors.Join(err, i.Close())
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	from, err := openMergeSource(c.r.Sources[0])
	if err != nil {
		return err
	}
	defer from.Close() // read-only
	for _, b := range c.bitmaps {
		if _, missing := to.bitmap(b.Name); missing == nil {
			return Wordedf("Failed to create bitmap %s: Bitmap already exists: %s", b.Name, b.Name)
		}
		if err := to.AddBitmap(b.Name, b.Granularity, true); err != nil {
			return Wordedf("Failed to create bitmap %s: %s", b.Name, err)
		}
		err := to.MergeBitmap(b.Name, from.Image, b.Name)
		if err == nil && slices.Contains(b.Flags, "auto") {
			err = to.EnableBitmap(b.Name, true)
		}
		if err != nil {
			return Wordedf("Failed to populate bitmap %s: %s", b.Name, err)
		}
	}
	return nil
}
