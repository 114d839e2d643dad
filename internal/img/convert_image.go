// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"errors"
	"os"
	"slices"
	"strconv"
)

// ConvertRequest is what a person asks of convert.
type ConvertRequest struct {
	Sources     []Source // read-only; several are put one behind the other
	SourceCache Cache
	Snapshot    string // an internal snapshot of the source, by ID or name

	Target        string
	Format        string // of the target
	TargetOpts    bool   // Target is a list of properties
	TargetCache   Cache
	Options       []string // lists of -o
	Backing       string
	BackingFormat string
	NoCreate      bool
	TargetIsZero  bool

	Compress    bool
	CopyOffload bool
	Sparse      int64
	Workers     int
	OutOfOrder  bool
	Rate        int64
	Salvage     bool
	Bitmaps     bool
	SkipBroken  bool // leave out bitmaps that cannot be trusted

	Warn     func(text string) // hears of what was passed over
	Progress *Progress
}

// Run makes the target and copies the sources into it.
func (r *ConvertRequest) Run(ctx context.Context) (err error) {
	loops, err := StartLoops(2)
	if err != nil {
		return err
	}
	defer loops.Stop()
	c := &conversion{r: r, loops: loops}
	defer func() { err = closeAll(err, append(c.sources, c.target)...) }()
	for _, step := range []func(context.Context) error{c.openSources, c.prepare, c.create, c.openTarget, c.copy, c.copyBitmaps} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// conversion is a request that is being carried out.
type conversion struct {
	r       *ConvertRequest
	loops   *Loops
	sources []*Disk
	total   int64
	options *Options // of the new image
	target  *Disk
	backed  bool         // the target has a backing file
	regular bool         // the target is a file that was empty
	bitmaps []BitmapInfo // that are to be copied
}

func (c *conversion) openSources(ctx context.Context) error {
	for _, src := range c.r.Sources {
		d, err := OpenDisk(ctx, c.loops.At(0), src, DiskOptions{Cache: c.r.SourceCache, Snapshot: c.r.Snapshot})
		if err != nil {
			return err
		}
		c.sources = append(c.sources, d)
		c.total += d.Size()
	}
	return nil
}

// prepare checks what is asked of the target.
func (c *conversion) prepare(context.Context) error {
	r := c.r
	if err := c.checkBitmaps(); err != nil {
		return err
	}
	if r.NoCreate {
		c.backed = r.Backing != ""
		return nil
	}
	table := CreateOptions(r.Format, true)
	switch {
	case !KnownFormat(r.Format):
		return Wordedf("Unknown file format '%s'", r.Format)
	case table == nil:
		return Wordedf("Format driver '%s' does not support image creation", r.Format)
	}
	o := NewOptions(table)
	for _, list := range r.Options {
		if err := o.Parse(list); err != nil {
			return err
		}
	}
	// The size is the source's, whatever the options say.
	if err := o.Set("size", strconv.FormatInt(c.total, 10)); err != nil {
		return err
	}
	if r.Backing != "" && o.Set("backing_file", r.Backing) != nil {
		return Wordedf("Backing file not supported for file format '%s'", r.Format)
	}
	if r.BackingFormat != "" && o.Set("backing_fmt", r.BackingFormat) != nil {
		return Wordedf("Backing format not supported for file format '%s'", r.Format)
	}
	c.options = o
	c.backed = o.Has("backing_file")
	return c.checkOptions()
}

// checkOptions refuses what does not go together.
func (c *conversion) checkOptions() error {
	o := c.options
	switch {
	case c.backed && len(c.sources) > 1:
		return Wordedf("Having a backing file for the target makes no sense when concatenating multiple input images")
	case c.backed && !o.Has("backing_fmt"):
		return Wordedf("Use of backing file requires explicit backing format")
	case c.backed && o.Has("backing_fmt") && !KnownFormat(o.Text("backing_fmt")):
		return Wordedf("%s: error while converting %s: Parameter 'backing-fmt' does not accept value '%s'", c.r.Target, c.r.Format, o.Text("backing_fmt"))
	case c.r.Compress && c.r.Format != FormatQcow2:
		return Wordedf("Compression not supported for this file format")
	case c.r.Compress && !slices.Contains([]string{"", "off"}, o.Text("preallocation")):
		return Wordedf("Compression and preallocation not supported at the same time")
	case c.r.Bitmaps && (c.r.Format != FormatQcow2 || o.Text("compat") == "0.10" || o.Text("compat") == "v2"):
		return Wordedf("Format driver '%s' does not support bitmaps", c.r.Format)
	}
	return nil
}

func (c *conversion) create(context.Context) error {
	r := c.r
	if r.NoCreate {
		return nil
	}
	if err := Create(r.Target, r.Format, c.options); err != nil {
		return Wordedf("%s: error while converting %s: %s", r.Target, r.Format, err.Error())
	}
	st, err := os.Stat(r.Target)
	c.regular = err == nil && st.Mode().IsRegular()
	return nil
}

func (c *conversion) openTarget(ctx context.Context) (err error) {
	r := c.r
	src := Source{Name: r.Target, Format: r.Format, ImageOpts: r.TargetOpts}
	c.target, err = OpenDisk(ctx, c.loops.At(1), src, DiskOptions{Cache: r.TargetCache})
	if err != nil {
		return err
	}
	switch {
	case c.target.Size() < c.total:
		return Wordedf("output file is smaller than input file")
	case r.Compress && c.target.format != FormatQcow2:
		return Wordedf("Compression not supported for this file format")
	}
	return nil
}

func (c *conversion) copy(ctx context.Context) (err error) {
	r := c.r
	engine := &Convert{
		Sources: c.sources, Target: c.target, Sparse: r.Sparse, Workers: r.Workers, OutOfOrder: r.OutOfOrder, Rate: r.Rate,
		OnlyTop: c.backed, Advance: r.Progress.Advance,
	}
	engine.TargetZero = r.TargetIsZero || !r.NoCreate && !c.backed && c.regular
	if r.Salvage {
		engine.Salvage = func(text string) {
			if r.Warn != nil {
				r.Warn(text)
			}
		}
	}
	if r.CopyOffload {
		engine.CopyRange = newRangeCopier(c.target)
		defer engine.CopyRange.close()
	}
	if r.Compress {
		packing, failed := openCompression(ctx, c.target)
		if failed != nil {
			return failed
		}
		defer func() { err = errors.Join(err, packing.close()) }()
		engine.Compress = packing
		engine.Grain = engine.Compress.Cluster
	}
	r.Progress.Expect(c.total)
	if r.Progress.Shown() {
		if work, err := engine.Work(ctx); err == nil { // else it is told when it is met
			engine.ByWork = true
			r.Progress.Expect(work)
		}
	}
	return engine.Run(ctx)
}
