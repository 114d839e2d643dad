// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"slices"
	"strings"

	"github.com/sluice-blk/sluice/internal/img"
)

// imgFlags reads a command line as getopt_long does, which is what scripts that call qemu-img were written against: flags
// anywhere, short ones in one word, a value in the same word or the next, long names cut short where that is unambiguous.
type imgFlags struct {
	c    *imgCall
	list []imgFlag
}

type imgFlag struct {
	short byte
	long  string
	takes bool // a value
	set   func(value string) error
}

func (c *imgCall) flags() *imgFlags { return &imgFlags{c: c} }

// on is a flag without a value. short may be 0, long may be "".
func (f *imgFlags) on(short byte, long string, to *bool) {
	f.list = append(f.list, imgFlag{short: short, long: long, set: func(string) error { *to = true; return nil }})
}

// do is a flag without a value that may be given more than once.
func (f *imgFlags) do(long string, act func()) {
	f.list = append(f.list, imgFlag{long: long, set: func(string) error { act(); return nil }})
}

// text is a flag with a value, of which the last one counts.
func (f *imgFlags) text(short byte, long string, to *string) {
	f.each(short, long, func(v string) error { *to = v; return nil })
}

// options is -o: lists of options, each of which must be well formed.
func (f *imgFlags) options(to *[]string) {
	f.each('o', "", func(v string) error {
		_, err := img.SplitOptions(v)
		*to = append(*to, v)
		return err
	})
}

// each calls set with each value of the flag; an error of set ends the parsing and is told.
func (f *imgFlags) each(short byte, long string, set func(string) error) {
	f.list = append(f.list, imgFlag{short: short, long: long, takes: true, set: set})
}

// image adds the flags that say how an image is to be opened.
func (f *imgFlags) image(o *imgSource) {
	f.text('f', "", &o.format)
	f.on(0, "image-opts", &o.imageOpts)
	f.objects()
}

// shared adds -U.
func (f *imgFlags) shared(o *imgSource) { f.on('U', "force-share", &o.shared) }

// objects adds --object, which names keys of encrypted images.
func (f *imgFlags) objects() {
	f.each(0, "object", func(string) error {
		return errors.New("--object is not supported (it is for keys of encrypted images, which are not supported yet)")
	})
}

// cache adds the flag for a cache mode: -t, or -T for what is read.
func (f *imgFlags) cache(short byte, to *img.Cache) {
	what := "cache option"
	if short == 'T' {
		what = "source cache option"
	}
	f.each(short, "", func(v string) error {
		*to = img.Cache(v)
		if !to.Valid() {
			return img.Wordedf("Invalid %s: %s", what, v)
		}
		return nil
	})
}

// output adds --output.
func (f *imgFlags) output(json *bool) {
	f.each(0, "output", func(v string) error {
		*json = v == "json"
		if v != "json" && v != "human" {
			return img.Wordedf("--output must be used with human or json as argument.")
		}
		return nil
	})
}

// imgSource says which image is meant.
type imgSource struct {
	format    string // "" to probe
	imageOpts bool
	shared    bool
}

// source is the image of this name.
func (o *imgSource) source(name string, readOnly bool) img.Source {
	return img.Source{
		Name: name, Format: o.format, ImageOpts: o.imageOpts,
		Store: img.StoreOptions{ReadOnly: readOnly, Shared: o.shared},
	}
}

// parse reads args and gives the words that are no flags. When ok is false it has told what is wrong.
func (f *imgFlags) parse(args []string) (rest []string, ok bool) {
	for len(args) > 0 {
		word := args[0]
		if word == "--" {
			return append(rest, args[1:]...), true
		}
		if len(word) < 2 || word[0] != '-' {
			rest, args = append(rest, word), args[1:]
			continue
		}
		if args, ok = f.word(args); !ok {
			return nil, false
		}
	}
	return rest, true
}

// leading reads flags up to the first word that is none.
func (f *imgFlags) leading(args []string) (rest []string, ok bool) {
	for len(args) > 0 && len(args[0]) > 1 && args[0][0] == '-' {
		if args, ok = f.word(args); !ok {
			return nil, false
		}
	}
	return args, true
}

// word takes the flags of the first word, and their value, off args.
func (f *imgFlags) word(args []string) (rest []string, ok bool) {
	if long, is := strings.CutPrefix(args[0], "--"); is {
		return f.longWord(long, args)
	}
	word, args := args[0], args[1:]
	for i := 1; i < len(word); i++ {
		at := slices.IndexFunc(f.list, func(g imgFlag) bool { return g.short == word[i] })
		if at < 0 {
			f.c.misused("unrecognized option '%s'", word)
			return nil, false
		}
		g := f.list[at]
		switch {
		case !g.takes:
			if !f.set(g, "") {
				return nil, false
			}
			continue
		case i+1 < len(word):
			return args, f.set(g, word[i+1:])
		case len(args) == 0:
			f.c.misused("missing argument for option '%s'", word)
			return nil, false
		}
		return args[1:], f.set(g, args[0])
	}
	return args, true
}

func (f *imgFlags) longWord(long string, args []string) (rest []string, ok bool) {
	name, value, joined := strings.Cut(long, "=")
	g := f.long(name)
	switch {
	case g == nil || joined && !g.takes:
		f.c.misused("unrecognized option '%s'", args[0])
		return nil, false
	case !g.takes || joined:
		return args[1:], f.set(*g, value)
	case len(args) == 1:
		f.c.misused("missing argument for option '%s'", args[0])
		return nil, false
	}
	return args[2:], f.set(*g, args[1])
}

// long finds the flag with this name, or the only one that begins with it.
func (f *imgFlags) long(name string) (found *imgFlag) {
	for i := range f.list {
		g := &f.list[i]
		switch {
		case g.long == "" || !strings.HasPrefix(g.long, name):
		case g.long == name:
			return g
		case found != nil:
			return nil
		default:
			found = g
		}
	}
	return found
}

func (f *imgFlags) set(g imgFlag, value string) bool {
	if err := g.set(value); err != nil {
		f.c.errorf("%v", err)
		return false
	}
	return true
}

// changed is an image that will be changed: what a person should know of it is told.
func (c *imgCall) changed(src img.Source) img.Source {
	src.Warn = c.say
	return src
}
