// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"math"
	"strconv"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/img"
)

var imgBench = imgVerb{
	name: "bench",
	usage: "[-c count] [-d depth] [-f fmt] [--flush-interval=flush_interval] [-i aio] [-n] [--no-drain] [-o offset] [--pattern=pattern] " +
		"[-q] [-s buffer_size] [-S step_size] [-t cache] [-w] [-U] filename",
	run: runImgBench,
}

func runImgBench(c *imgCall, args []string) int {
	var src imgSource
	var quiet bool
	r := img.BenchRequest{Bench: img.Bench{Count: 75000, Depth: 64, Size: 4096}, Out: c.Out}
	r.Options.Warnings = c.Err
	f := c.flags()
	f.image(&src)
	f.shared(&src)
	f.on('q', "", &quiet)
	addBenchFlags(f, &r)
	rest, ok := f.parse(args)
	switch {
	case !ok:
		return exitFailure
	case len(rest) != 1:
		return c.misused("Expecting one image file name")
	case !r.Write && r.FlushInterval > 0:
		return c.errorf("--flush-interval is only available in write tests")
	case r.FlushInterval > 0 && r.FlushInterval < r.Depth:
		return c.errorf("Flush interval can't be smaller than depth")
	}
	r.Source = src.source(rest[0], !r.Write)
	took, err := r.Run(c.loops())
	if err != nil {
		return c.ended(err, rest[0])
	}
	fmt.Fprintf(c.Out, "Run completed in %3.3f seconds.\n", took.Seconds())
	return exitOK
}

func addBenchFlags(f *imgFlags, r *img.BenchRequest) {
	f.on('w', "", &r.Write)
	f.on(0, "no-drain", &r.NoDrain)
	f.list = append(f.list, imgFlag{short: 'n', set: func(string) error { return benchEngine(&r.Options.Engine, "native") }})
	f.each('c', "", func(v string) error {
		return benchNumber(&r.Count, v, 0, math.MaxInt32, "Invalid request count specified")
	})
	f.each('d', "", func(v string) error { return benchNumber(&r.Depth, v, 1, 1<<16, "Invalid queue depth specified") })
	f.each(0, "flush-interval", func(v string) error {
		return benchNumber(&r.FlushInterval, v, 0, math.MaxInt32, "Invalid flush interval specified")
	})
	f.each(0, "pattern", func(v string) error {
		n := 0
		err := benchNumber(&n, v, 0, 255, "Invalid pattern byte specified")
		r.Pattern = byte(n)
		return err
	})
	f.each('i', "", func(v string) error { return benchEngine(&r.Options.Engine, v) })
	f.each('o', "", func(v string) error { return benchSize(&r.Offset, v, "Invalid offset specified") })
	f.each('s', "", func(v string) error { return benchSize(&r.Size, v, "Invalid buffer size specified") })
	f.each('S', "", func(v string) error { return benchSize(&r.Step, v, "Invalid step_size specified") })
	f.each('t', "", func(v string) error {
		if r.Options.Cache = img.Cache(v); !r.Options.Cache.Valid() {
			return img.Wordedf("Invalid cache mode")
		}
		return nil
	})
}

func benchNumber(to *int, v string, least, most int64, what string) error {
	n, err := strconv.ParseInt(v, 0, 64)
	if err != nil || n < least || n > most {
		return img.Wordedf("%s", what)
	}
	*to = int(n)
	return nil
}

func benchSize(to *int64, v, what string) error {
	n, err := img.ParseImageSize(v)
	if err != nil {
		return sizeHelp(what)
	}
	*to = n
	return nil
}

// benchEngine reads the names that qemu-img has for our engines.
func benchEngine(to *aio.EngineKind, v string) error {
	switch v {
	case "threads":
		*to = aio.EngineThreads
	case "native":
		*to = aio.EngineLinuxAIO
	case "io_uring":
		*to = aio.EngineIOUring
	default:
		return img.Wordedf("Invalid aio option: %s", v)
	}
	return nil
}
