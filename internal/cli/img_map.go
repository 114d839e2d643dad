// SPDX-License-Identifier: Apache-2.0

package cli

import "github.com/sluice-blk/sluice/internal/img"

var imgMap = imgVerb{
	name:  "map",
	usage: "[--image-opts] [-f fmt] [--start-offset=offset] [--max-length=len] [--output=ofmt] [-U] filename",
	run:   runImgMap,
}

func runImgMap(c *imgCall, args []string) int {
	var o imgSource
	var start, length string
	json := false
	f := c.flags()
	f.image(&o)
	f.shared(&o)
	f.output(&json)
	f.text('s', "start-offset", &start)
	f.text('l', "max-length", &length)
	rest, ok := f.parse(args)
	r := img.MapRequest{Length: -1}
	if ok && start != "" {
		r.Start, ok = c.namedSize("start offset", start)
	}
	if ok && length != "" {
		r.Length, ok = c.namedSize("max length", length)
	}
	switch {
	case !ok:
		return exitFailure
	case len(rest) != 1:
		return c.misused("Expecting one image file name")
	}
	r.Source = o.source(rest[0], true)
	// The heading comes when the image has been opened.
	var w *img.MapWriter
	err := img.Map(c.untilSignal(), &r, func(e img.MapEntry) (err error) {
		if w == nil {
			if w, err = img.NewMapWriter(c.Out, json); err != nil {
				return err
			}
		}
		return w.Write(e)
	})
	if err == nil {
		err = w.End()
	}
	return c.told(err)
}
