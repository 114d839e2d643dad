// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"github.com/sluice-blk/sluice/internal/img"
)

var imgBitmap = imgVerb{
	name: "bitmap",
	usage: "(--merge SOURCE | --add | --remove | --clear | --enable | --disable)... [-b source_file [-F source_fmt]]" +
		" [-g granularity] [--image-opts | -f fmt] filename bitmap",
	run: runImgBitmap,
}

func runImgBitmap(c *imgCall, args []string) int {
	var o, from imgSource
	var fromFile, granularity string
	r := img.BitmapRequest{}
	hasFrom, adds, merges := false, false, false
	f := c.flags()
	f.image(&o)
	for _, verb := range []string{"add", "remove", "clear", "enable", "disable"} {
		f.do(verb, func() {
			r.Actions = append(r.Actions, img.BitmapAction{Verb: verb})
			adds = adds || verb == "add"
		})
	}
	f.each(0, "merge", func(v string) error {
		r.Actions = append(r.Actions, img.BitmapAction{Verb: "merge", Source: v})
		merges = true
		return nil
	})
	f.each('b', "", func(v string) error { fromFile, hasFrom = v, true; return nil })
	f.text('F', "", &from.format)
	f.text('g', "granularity", &granularity)
	rest, ok := f.parse(args)
	if ok && granularity != "" {
		r.Granularity, ok = c.namedSize("granularity", granularity)
	}
	switch {
	case !ok:
		return exitFailure
	case len(rest) != 2 && len(r.Actions) > 0:
		return c.errorf("Expecting filename and bitmap name")
	case len(r.Actions) == 0:
		return c.errorf("Need at least one of --add, --remove, --clear, --enable, --disable, or --merge")
	case granularity != "" && !adds:
		return c.errorf("granularity only supported with --add")
	case hasFrom && !merges:
		return c.errorf("Merge bitmap source file only supported with --merge")
	case from.format != "" && !hasFrom:
		return c.errorf("-F only supported with -b")
	}
	r.Source, r.Bitmap = c.changed(o.source(rest[0], false)), rest[1]
	if hasFrom {
		src := from.source(fromFile, true)
		r.From = &src
	}
	return c.told(img.Bitmap(&r))
}
