// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"

	"github.com/sluice-blk/sluice/internal/img"
	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
)

var imgCheck = imgVerb{
	name:  "check",
	usage: "[--image-opts] [-q] [-f fmt] [--output=ofmt] [-r [leaks | all]] [-T src_cache] [-U] filename",
	run:   runImgCheck,
}

// exitNoCheck is for formats that cannot be checked.
const exitNoCheck = 63

func runImgCheck(c *imgCall, args []string) int {
	var o imgSource
	var r img.CheckRequest
	var cache img.Cache
	var repair string
	json, silent := false, false
	f := c.flags()
	f.image(&o)
	f.shared(&o)
	f.output(&json)
	f.text('r', "repair", &repair)
	f.cache('T', &cache)
	f.on('q', "", &silent)
	rest, ok := f.parse(args)
	switch repair {
	case "leaks":
		r.Repair = check.Leaks
	case "all":
		r.Repair = check.Everything
	}
	switch {
	case !ok:
		return exitFailure
	case repair != "" && r.Repair == check.Nothing:
		return c.misused("Unknown option value for -r (expecting 'leaks' or 'all'): %s", repair)
	case len(rest) != 1:
		return c.misused("Expecting one image file name")
	}
	r.Source = o.source(rest[0], r.Repair == check.Nothing)
	r.Report = func(line string) { fmt.Fprintln(c.Err, line) }
	r.Repaired = func(leaks, corruptions int64) {
		if !json && !silent {
			fmt.Fprintf(c.Out, "The following inconsistencies were found and repaired:\n\n    %d leaked clusters\n    %d corruptions\n\n"+
				"Double checking the fixed image now...\n", leaks, corruptions)
		}
	}
	result, err := img.Check(&r)
	switch {
	case errors.Is(err, img.ErrNoCheck):
		c.errorf("%v", err)
		return exitNoCheck
	case err != nil:
		return c.errorf("%v", err)
	case json:
		err = img.WriteJSON(c.Out, result)
	case !silent:
		err = result.WriteText(c.Out)
	}
	if err != nil {
		return c.errorf("%v", err)
	}
	return result.ExitStatus()
}
