// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"

	"github.com/sluice-blk/sluice/internal/img"
)

var imgResize = imgVerb{
	name:  "resize",
	usage: "[--image-opts] [-f fmt] [--preallocation=prealloc] [-q] [--shrink] filename [+ | -]size",
	run:   runImgResize,
}

func runImgResize(c *imgCall, args []string) int {
	// The size comes last, and would be taken for flags where it begins with '-'.
	if len(args) < 2 {
		return c.misused("Not enough arguments")
	}
	var o imgSource
	r := img.ResizeRequest{Size: args[len(args)-1]}
	silent := false
	f := c.flags()
	f.image(&o)
	f.on('q', "", &silent)
	f.on(0, "shrink", &r.Shrink)
	f.text(0, "preallocation", &r.Preallocation)
	rest, ok := f.parse(args[:len(args)-1])
	switch {
	case !ok:
		return exitFailure
	case len(rest) != 1:
		return c.misused("Expecting image file name and size")
	}
	r.Source = c.changed(o.source(rest[0], false))
	switch err := img.Resize(&r); {
	case errors.Is(err, img.ErrShrink):
		c.errorf("Use the --shrink option to perform a shrink operation.")
		c.warnf("Shrinking an image will delete all data beyond the shrunken image's end. Before performing such an operation, make sure there is no important data there.")
		return exitFailure
	case err != nil:
		return c.errorf("%v", err)
	}
	if !silent {
		fmt.Fprintln(c.Out, "Image resized.")
	}
	return exitOK
}
