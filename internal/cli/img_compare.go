// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"

	"github.com/sluice-blk/sluice/internal/img"
)

var imgCompare = imgVerb{
	name:  "compare",
	usage: "[--image-opts] [-f fmt] [-F fmt] [-T src_cache] [-p] [-q] [-s] [-U] filename1 filename2",
	run:   runImgCompare,
}

func runImgCompare(c *imgCall, args []string) int {
	var first, second imgSource
	var cache img.Cache
	var progress, quiet, strict bool
	f := c.flags()
	f.image(&first)
	f.shared(&first)
	f.text('F', "", &second.format)
	f.each('T', "", func(v string) error { cache = img.Cache(v); return nil })
	f.on('p', "", &progress)
	f.on('q', "", &quiet)
	f.on('s', "", &strict)
	rest, ok := f.parse(args)
	switch {
	case !ok:
		return img.CompareOpenFailed
	case len(rest) != 2:
		return c.misused("Expecting two image file names")
	case !cache.Valid():
		c.errorf("Invalid source cache option: %s", string(cache))
		return img.CompareOpenFailed
	}
	second.imageOpts, second.shared = first.imageOpts, first.shared
	r := img.CompareRequest{Sources: [2]img.Source{first.source(rest[0], true), second.source(rest[1], true)}, Cache: cache, Strict: strict}
	r.Say = func(text string) { fmt.Fprintln(c.Out, text) }
	if quiet {
		r.Say = func(string) {}
	}
	r.Progress = c.progress(progress && !quiet)
	outcome, err := r.Run(c.loops())
	r.Progress.End()
	switch {
	case err == nil:
	case errors.Is(err, c.ctx.Err()):
		c.errorf("interrupted")
	default:
		c.errorf("%v", err)
	}
	return outcome
}
