// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"

	"github.com/sluice-blk/sluice/internal/img"
)

var imgDD = imgVerb{
	name:  "dd",
	usage: "[--image-opts] [-U] [-f fmt] [-O output_fmt] [bs=block_size] [count=blocks] [skip=blocks] if=input of=output",
	run:   runImgDD,
}

func runImgDD(c *imgCall, args []string) int {
	var src imgSource
	r := img.DDRequest{Format: img.FormatRaw, Block: img.DDBlock}
	f := c.flags()
	f.image(&src)
	f.shared(&src)
	f.text('O', "", &r.Format)
	rest, ok := f.parse(args)
	if !ok {
		return exitFailure
	}
	input := ""
	for _, operand := range rest {
		if err := setDDOperand(&r, &input, operand); err != nil {
			return c.ended(err, "")
		}
	}
	if input == "" || r.Target == "" {
		return c.errorf("Must specify both input and output files")
	}
	r.Source = src.source(input, true)
	r.Warn = func(text string) { c.errorf("%s", text) }
	return c.ended(r.Run(c.loops()), r.Target)
}

// setDDOperand takes one name=value.
func setDDOperand(r *img.DDRequest, input *string, operand string) (err error) {
	name, value, _ := strings.Cut(operand, "=")
	number := func(to *int64) error {
		n, err := img.ParseImageSize(value)
		if err != nil {
			return sizeHelp("Invalid " + name + " specified")
		}
		*to = n
		return nil
	}
	switch name {
	case "if":
		*input = value
	case "of":
		r.Target = value
	case "count":
		r.HasCount = true
		return number(&r.Count)
	case "skip":
		return number(&r.Skip)
	case "bs":
		if err = number(&r.Block); err == nil && (r.Block < 1 || r.Block > img.DDBlockMax) {
			return img.Wordedf("Invalid bs specified. Must be between 1 and %d.", img.DDBlockMax)
		}
		return err
	default:
		return img.Wordedf("unrecognized operand %s", name)
	}
	return nil
}
