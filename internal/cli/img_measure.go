// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"

	"github.com/sluice-blk/sluice/internal/img"
)

var imgMeasure = imgVerb{
	name:  "measure",
	usage: "[--output=ofmt] [-O output_fmt] [-o options] [--size N | [--image-opts] [-f fmt] [-l snapshot_param] filename]",
	run:   runImgMeasure,
}

func runImgMeasure(c *imgCall, args []string) int {
	var o imgSource
	var size string
	json := false
	r := img.MeasureRequest{Target: img.FormatRaw}
	f := c.flags()
	f.image(&o)
	f.shared(&o)
	f.output(&json)
	f.text('O', "", &r.Target)
	f.options(&r.Options)
	f.each('l', "", func(v string) (err error) { r.Snapshot, err = snapshotParam(v); return err })
	f.text(0, "size", &size)
	rest, ok := f.parse(args)
	if ok && size != "" {
		r.Size, ok = c.imageSize(size)
	}
	switch {
	case !ok:
		return exitFailure
	case len(rest) > 1:
		return c.errorf("At most one filename argument is allowed.")
	case len(rest) == 1 && size != "":
		return c.errorf("--size N cannot be used together with a filename.")
	case len(rest) == 0 && size == "":
		return c.errorf("Either --size N or one filename must be specified.")
	case len(rest) == 0 && (o.imageOpts || o.format != "" || r.Snapshot != ""):
		return c.errorf("--image-opts, -f, and -l require a filename argument.")
	}
	if len(rest) == 1 {
		src := o.source(rest[0], true)
		r.Source = &src
	}
	return c.measured(&r, json)
}

func (c *imgCall) measured(r *img.MeasureRequest, json bool) int {
	for _, list := range r.Options {
		if img.WantsHelp(list) {
			return c.optionHelp(r.Target, "measured")
		}
	}
	var options *img.OptionsError
	m, err := img.Measure(c.untilSignal(), r)
	switch {
	case errors.As(err, &options):
		c.errorf("%v", err)
		return c.errorf("Invalid options for file format '%s'", r.Target)
	case err != nil:
		return c.errorf("%v", err)
	case json:
		err = img.WriteJSON(c.Out, m)
	default:
		err = m.WriteText(c.Out)
	}
	return c.told(err)
}
