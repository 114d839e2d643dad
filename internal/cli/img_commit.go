// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"

	"github.com/sluice-blk/sluice/internal/img"
)

var imgCommit = imgVerb{
	name:  "commit",
	usage: "[--image-opts] [-q] [-f fmt] [-t cache] [-b base] [-r rate_limit] [-d] [-p] filename",
	run:   runImgCommit,
}

func runImgCommit(c *imgCall, args []string) int {
	var src imgSource
	var progress, quiet bool
	r := img.CommitRequest{Warnings: c.Err}
	f := c.flags()
	f.image(&src)
	f.text('b', "", &r.Base)
	f.on('d', "", &r.Keep)
	f.on('p', "", &progress)
	f.on('q', "", &quiet)
	f.each('t', "", func(v string) error { r.Cache = img.Cache(v); return nil })
	f.each('r', "", func(v string) error { return setRate(&r.Rate, v) })
	rest, ok := f.parse(args)
	switch {
	case !ok:
		return exitFailure
	case len(rest) != 1:
		return c.misused("Expecting one image file name")
	case !r.Cache.Valid():
		return c.errorf("Invalid cache option: %s", string(r.Cache))
	}
	r.Source = src.source(rest[0], false)
	r.Progress = c.progress(progress && !quiet)
	err := r.Run(c.loops())
	if err == nil {
		r.Progress.Done()
	}
	r.Progress.End()
	if err != nil {
		return c.interruptible(err, "commit: nothing of '"+rest[0]+"' is lost, and it can be committed again")
	}
	if !quiet {
		fmt.Fprintln(c.Out, "Image committed.")
	}
	return exitOK
}
