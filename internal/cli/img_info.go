// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"io"

	"github.com/sluice-blk/sluice/internal/img"
)

var imgInfo = imgVerb{
	name:  "info",
	usage: "[--image-opts] [-f fmt] [--output=ofmt] [--backing-chain] [-U] filename",
	run:   runImgInfo,
}

func runImgInfo(c *imgCall, args []string) int {
	var o imgSource
	var chain, json bool
	f := c.flags()
	f.image(&o)
	f.shared(&o)
	f.on(0, "backing-chain", &chain)
	f.output(&json)
	rest, ok := f.parse(args)
	switch {
	case !ok:
		return exitFailure
	case len(rest) != 1:
		return c.misused("Expecting one image file name")
	}
	list, code := c.gatherInfo(o.source(rest[0], true), chain)
	if code != exitOK {
		return code
	}
	return c.told(writeInfo(c.Out, list, json, chain))
}

func (c *imgCall) gatherInfo(src img.Source, chain bool) ([]*img.Info, int) {
	if chain {
		list, err := img.InfoChain(src)
		return list, c.told(err)
	}
	i, err := img.InfoOf(src)
	return []*img.Info{i}, c.told(err)
}

func writeInfo(w io.Writer, list []*img.Info, json, chain bool) error {
	switch {
	case json && chain:
		return img.WriteJSON(w, list)
	case json:
		return img.WriteJSON(w, list[0])
	}
	for n, i := range list {
		if n > 0 {
			if _, err := io.WriteString(w, "\n"); err != nil {
				return err
			}
		}
		if err := i.WriteText(w); err != nil {
			return err
		}
	}
	return nil
}
