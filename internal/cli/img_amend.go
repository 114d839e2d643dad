// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"

	"github.com/sluice-blk/sluice/internal/img"
)

var imgAmend = imgVerb{
	name:  "amend",
	usage: "[--image-opts] [-p] [-q] [-f fmt] [-t cache] [--force] -o options filename",
	run:   runImgAmend,
}

func runImgAmend(c *imgCall, args []string) int {
	var o imgSource
	var cache img.Cache
	r := img.AmendRequest{Progress: func(float64) {}}
	progress, silent, help := false, false, false
	f := c.flags()
	f.image(&o)
	f.cache('t', &cache)
	f.on('p', "", &progress)
	f.on('q', "", &silent)
	f.on(0, "force", new(bool))
	f.options(&r.Options)
	rest, ok := f.parse(args)
	if !ok {
		return exitFailure
	}
	for _, list := range r.Options {
		help = help || img.WantsHelp(list)
	}
	switch {
	case len(r.Options) == 0:
		return c.misused("Must specify options (-o)")
	case help && len(rest) < 2 && o.format != "":
		return c.amendHelp(o.format)
	case len(rest) != 1:
		return c.errorf("Expecting one image file name")
	}
	if help {
		i, err := img.OpenImage(o.source(rest[0], true))
		if err != nil {
			return c.errorf("%v", err)
		}
		defer i.Close()
		return c.amendHelp(i.Format)
	}
	if progress && !silent {
		r.Progress = func(part float64) { fmt.Fprintf(c.Out, "    (%.2f/100%%)\r", part*100) }
		defer fmt.Fprintln(c.Out)
	}
	r.Source = c.changed(o.source(rest[0], false))
	r.Store.Unsafe = cache == "unsafe"
	return c.told(img.Amend(&r))
}

// amendHelp lists what amend takes for a format.
func (c *imgCall) amendHelp(format string) int {
	table := img.AmendOptions(format)
	switch {
	case !img.NamedFormat(format):
		return c.errorf("Unknown file format '%s'", format)
	case table == nil:
		return c.errorf("Format driver '%s' does not support option amendment", format)
	}
	return c.told(img.WriteHelp(c.Out, fmt.Sprintf("Amend options for '%s':", format), table))
}
