// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"

	"github.com/sluice-blk/sluice/internal/daemon"
	"github.com/sluice-blk/sluice/internal/img"
)

var imgConvert = imgVerb{
	name: "convert",
	usage: "[--image-opts] [--target-image-opts] [--target-is-zero] [--bitmaps [--skip-broken-bitmaps]] [-U] [-C] [-c] [-p] [-q] [-n] " +
		"[-f fmt] [-t cache] [-T src_cache] [-O output_fmt] [-B backing_file [-F backing_fmt]] [-o options] [-l snapshot_param] " +
		"[-S sparse_size] [-r rate_limit] [-m num_coroutines] [-W] [--salvage] filename [filename2 [...]] output_filename",
	run: runImgConvert,
}

// imgConvertFlags are the flags of convert.
type imgConvertFlags struct {
	img.ConvertRequest
	source       imgSource
	hasSparse    bool
	progress     bool
	quiet        bool
	targetFormat string
}

func runImgConvert(c *imgCall, args []string) int {
	o := imgConvertFlags{}
	o.TargetCache, o.Sparse, o.Workers = "unsafe", img.SparseDefault, img.ConvertWorkersDefault
	f := c.flags()
	o.add(f)
	rest, ok := f.parse(args)
	if !ok {
		return exitFailure
	}
	o.Format = o.targetFormat
	if o.Format == "" && !o.TargetOpts {
		o.Format = img.FormatRaw
	}
	for _, list := range o.Options {
		if img.WantsHelp(list) {
			file := ""
			if len(rest) > 0 {
				file = rest[len(rest)-1]
			}
			return c.optionHelp(o.Format, file)
		}
	}
	if err := o.check(rest); err != nil {
		return c.errorf("%v", err)
	}
	for _, name := range rest[:len(rest)-1] {
		o.Sources = append(o.Sources, o.source.source(name, true))
	}
	o.Target = rest[len(rest)-1]
	if !o.quiet {
		o.Warn = func(text string) { c.warnf("%s", text) }
	}
	o.Progress = c.progress(o.progress && !o.quiet)
	err := o.Run(c.loops())
	if err == nil {
		o.Progress.Done()
	}
	o.Progress.End()
	return c.ended(err, o.Target)
}

// add makes the flags known.
func (o *imgConvertFlags) add(f *imgFlags) {
	f.image(&o.source)
	f.shared(&o.source)
	f.text('O', "", &o.targetFormat)
	f.text('B', "", &o.Backing)
	f.text('F', "", &o.BackingFormat)
	f.options(&o.Options)
	f.on('C', "", &o.CopyOffload)
	f.on('c', "", &o.Compress)
	f.on('n', "", &o.NoCreate)
	f.on('p', "", &o.progress)
	f.on('q', "", &o.quiet)
	f.on('W', "", &o.OutOfOrder)
	f.on(0, "salvage", &o.Salvage)
	f.on(0, "target-is-zero", &o.TargetIsZero)
	f.on(0, "target-image-opts", &o.TargetOpts)
	f.on(0, "bitmaps", &o.Bitmaps)
	f.on(0, "skip-broken-bitmaps", &o.SkipBroken)
	f.each('t', "", func(v string) error { o.TargetCache = img.Cache(v); return nil })
	f.each('T', "", func(v string) error { o.SourceCache = img.Cache(v); return nil })
	f.each('l', "", func(v string) (err error) { o.Snapshot, err = snapshotParam(v); return err })
	f.each('S', "", func(v string) error { o.hasSparse = true; return o.setSparse(v) })
	f.each('m', "", o.setWorkers)
	f.each('r', "", func(v string) error { return setRate(&o.Rate, v) })
}

func (o *imgConvertFlags) setSparse(v string) error {
	n, err := img.ParseImageSize(v)
	switch {
	case err != nil:
		return sizeHelp("Invalid buffer size for sparse output specified")
	case n%512 != 0 || n > img.SparseMax:
		return img.Wordedf("Invalid buffer size for sparse output specified. Valid sizes are multiples of 512 up to %d. Select 0 to disable sparse detection (fully allocates output).", img.SparseMax)
	}
	o.Sparse = n
	return nil
}

func (o *imgConvertFlags) setWorkers(v string) error {
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 || n > img.ConvertWorkersMax {
		return img.Wordedf("Invalid number of coroutines. Allowed number of coroutines is between 1 and %d", img.ConvertWorkersMax)
	}
	o.Workers = n
	return nil
}

// sizeHelp is how a size that cannot be read is refused. The text has two lines, and each is a message.
func sizeHelp(what string) error {
	return img.Wordedf("%s. You may use k, M, G, T, P or E suffixes for\n%s: kilobytes, megabytes, gigabytes, terabytes, petabytes and exabytes.", what, qemuImgName)
}

func setRate(to *int64, v string) error {
	n, err := img.ParseImageSize(v)
	if err != nil {
		return sizeHelp("Invalid rate limit specified")
	}
	*to = n
	return nil
}

// snapshotParam reads an ID, a name, or snapshot.id=ID,snapshot.name=NAME.
func snapshotParam(v string) (string, error) {
	if !strings.HasPrefix(v, "snapshot.") {
		return v, nil
	}
	parts, err := img.SplitOptions(v)
	if err != nil {
		return "", err
	}
	found := ""
	for _, p := range parts {
		key, value, _ := strings.Cut(p, "=")
		if key != "snapshot.id" && key != "snapshot.name" {
			return "", img.Wordedf("Failed in parsing snapshot param '%s'", v)
		}
		found = value
	}
	return found, nil
}

// check refuses what does not go together.
func (o *imgConvertFlags) check(files []string) error {
	switch {
	case o.SkipBroken && !o.Bitmaps:
		return img.Wordedf("Use of --skip-broken-bitmaps requires --bitmaps")
	case o.NoCreate && len(o.Options) > 0:
		return img.Wordedf("-o has no effect when skipping image creation")
	case len(files) < 2:
		return img.Wordedf("Must specify image file name")
	case o.CopyOffload && o.Compress:
		return img.Wordedf("Cannot enable copy offloading when -c is used")
	case o.CopyOffload && o.hasSparse:
		return img.Wordedf("Cannot enable copy offloading when -S is used")
	case o.CopyOffload && o.Salvage:
		return img.Wordedf("Cannot use copy offloading in salvaging mode")
	case o.TargetOpts && !o.NoCreate:
		return img.Wordedf("--target-image-opts requires use of -n flag")
	case o.TargetIsZero && !o.NoCreate:
		return img.Wordedf("--target-is-zero requires use of -n flag")
	case !o.SourceCache.Valid():
		return img.Wordedf("Invalid source cache option: %s", string(o.SourceCache))
	case !o.TargetCache.Valid():
		return img.Wordedf("Invalid cache option: %s", string(o.TargetCache))
	}
	return nil
}

// ended tells how a verb ended that was writing target, and is the exit status.
func (c *imgCall) ended(err error, target string) int {
	return c.interruptible(err, "'"+target+"' is not complete")
}

// interruptible tells how a verb ended; left is what an interrupt leaves behind.
func (c *imgCall) interruptible(err error, left string) int {
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, context.Canceled):
		return c.errorf("interrupted: %s", left)
	}
	return c.errorf("%s", strings.ReplaceAll(err.Error(), qemuImgName+":", c.tool+":"))
}

// imgLoops is how many loops a verb that moves data runs at most.
const imgLoops = 2

// loops prepares the process for a verb that runs loops, and gives the context for it.
func (c *imgCall) loops() context.Context {
	daemon.TuneRuntime(imgLoops)
	return c.untilSignal()
}

// progress tells on the output how far a verb has got, or else tells on SIGUSR1, until the process ends.
func (c *imgCall) progress(shown bool) *img.Progress {
	if shown {
		return img.NewProgress(c.Out)
	}
	p := img.NewProgress(nil)
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGUSR1)
	go func() {
		for range asked {
			p.Ask(c.Err)
		}
	}()
	return p
}
