// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"github.com/sluice-blk/sluice/internal/img"
)

var imgRebase = imgVerb{
	name:  "rebase",
	usage: "[--image-opts] [-U] [-q] [-f fmt] [-t cache] [-T src_cache] [-p] [-u] -b backing_file [-F backing_fmt] filename",
	run:   runImgRebase,
}

func runImgRebase(c *imgCall, args []string) int {
	var src imgSource
	var progress, quiet, named bool
	r := img.RebaseRequest{Warnings: c.Err}
	f := c.flags()
	f.image(&src)
	f.on('U', "force-share", &r.Shared)
	f.each('b', "", func(v string) error { r.Backing, named = v, true; return nil })
	f.text('F', "", &r.BackingFormat)
	f.on('u', "", &r.Unsafe)
	f.on('p', "", &progress)
	f.on('q', "", &quiet)
	f.each('t', "", func(v string) error { r.Cache = img.Cache(v); return nil })
	f.each('T', "", func(v string) error { r.SourceCache = img.Cache(v); return nil })
	rest, ok := f.parse(args)
	switch {
	case !ok:
		return exitFailure
	case len(rest) != 1:
		return c.misused("Expecting one image file name")
	case !named && !r.Unsafe:
		return c.misused("Must specify backing file (-b) or use unsafe mode (-u)")
	case !r.Cache.Valid():
		return c.errorf("Invalid cache option: %s", string(r.Cache))
	case !r.SourceCache.Valid():
		return c.errorf("Invalid source cache option: %s", string(r.SourceCache))
	}
	r.Source = src.source(rest[0], false)
	r.Progress = c.progress(progress && !quiet)
	err := r.Run(c.loops())
	if err == nil {
		r.Progress.Done()
	}
	r.Progress.End()
	return c.interruptible(err, "rebase: '"+rest[0]+"' shows what it showed, with its old backing file")
}
