// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"strconv"

	"github.com/sluice-blk/sluice/internal/img"
)

var imgCreate = imgVerb{
	name:  "create",
	usage: "[-q] [-f fmt] [-b backing_file [-F backing_fmt]] [-u] [-o options] filename [size]",
	run:   runImgCreate,
}

// imgCreateFlags are the flags of create.
type imgCreateFlags struct {
	format                     string
	backing, backingFormat     string
	hasBacking, unsafe, silent bool
	options                    []string
}

func runImgCreate(c *imgCall, args []string) int {
	o := imgCreateFlags{format: img.FormatRaw}
	f := c.flags()
	f.text('f', "", &o.format)
	f.each('b', "", func(v string) error { o.backing, o.hasBacking = v, true; return nil })
	f.text('F', "", &o.backingFormat)
	f.on('u', "", &o.unsafe)
	f.on('q', "", &o.silent)
	f.options(&o.options)
	f.objects()
	rest, ok := f.parse(args)
	if !ok {
		return exitFailure
	}
	file := ""
	if len(rest) > 0 {
		file = rest[0]
	}
	for _, list := range o.options {
		if img.WantsHelp(list) {
			return c.optionHelp(o.format, file)
		}
	}
	switch {
	case len(rest) == 0:
		return c.misused("Expecting image file name")
	case len(rest) > 2:
		return c.misused("Unexpected argument: %s", rest[2])
	}
	size := ""
	if len(rest) == 2 {
		n, ok := c.imageSize(rest[1])
		if !ok {
			return exitFailure
		}
		size = strconv.FormatInt(n, 10)
	}
	if err := o.create(c.Out, file, size); err != nil {
		return c.createFailed(file, err)
	}
	return exitOK
}

// createFailed tells why an image was not made.
func (c *imgCall) createFailed(file string, err error) int {
	return c.errorf("%s: %v", file, err)
}

// optionHelp lists what -o takes.
func (c *imgCall) optionHelp(format, file string) int {
	table := img.CreateOptions(format, file != "")
	switch {
	case !img.NamedFormat(format):
		return c.errorf("Unknown file format '%s'", format)
	case table == nil:
		return c.errorf("Format driver '%s' does not support image creation", format)
	}
	title := "Supported options:"
	if file == "" {
		title = fmt.Sprintf("Supported %s options:", format)
	}
	if err := img.WriteHelp(c.Out, title, table); err != nil {
		return c.errorf("%v", err)
	}
	if file == "" {
		io.WriteString(c.Out, "\nThe protocol level may support further options.\nSpecify the target filename to include those options.\n")
	}
	return exitOK
}

// create makes the image. size is "" when it was not given.
func (o *imgCreateFlags) create(out io.Writer, file, size string) error {
	opts, err := img.PrepareCreate(&img.CreateRequest{
		Path: file, Format: o.format, Size: size, Options: o.options, Backing: o.backing, HasBacking: o.hasBacking,
		BackingFormat: o.backingFormat, Unsafe: o.unsafe,
	})
	if err != nil {
		return err
	}
	if !o.silent {
		fmt.Fprintf(out, "Formatting '%s', fmt=%s %s\n", file, o.format, opts)
	}
	return img.Create(file, o.format, opts)
}
