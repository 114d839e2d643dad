// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"

	"github.com/sluice-blk/sluice/internal/img"
)

var imgSnapshot = imgVerb{
	name:  "snapshot",
	usage: "[--image-opts] [-U] [-q] [-l | -a snapshot | -c snapshot | -d snapshot] filename",
	run:   runImgSnapshot,
}

func runImgSnapshot(c *imgCall, args []string) int {
	var o imgSource
	var name string
	var action img.SnapshotAction
	mixed := false
	choose := func(a img.SnapshotAction) func(string) error {
		return func(v string) error {
			mixed = mixed || action != 0
			action, name = a, v
			return nil
		}
	}
	list := false
	f := c.flags()
	f.each('a', "", choose(img.SnapshotApply))
	f.each('c', "", choose(img.SnapshotCreate))
	f.each('d', "", choose(img.SnapshotDelete))
	f.on('l', "", &list)
	f.on('q', "", new(bool))
	f.on(0, "image-opts", &o.imageOpts)
	f.objects()
	f.shared(&o)
	rest, ok := f.parse(args)
	switch {
	case !ok:
		return exitFailure
	case mixed || list && action != 0:
		return c.misused("Cannot mix '-l', '-a', '-c', '-d'")
	case len(rest) != 1:
		return c.misused("Expecting one image file name")
	case action != 0:
		return c.told(img.ChangeSnapshot(c.changed(o.source(rest[0], false)), action, name))
	}
	all, err := img.Snapshots(o.source(rest[0], true))
	if err == nil && len(all) > 0 {
		_, err = io.WriteString(c.Out, img.SnapshotTable(all))
	}
	return c.told(err)
}
