// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/sluice-blk/sluice/internal/img"
)

// imgVerb is one verb of the image tool; it stands in a file of its own, img_VERB.go. run gets the arguments after the
// verb's name and answers the exit status.
type imgVerb struct {
	name  string
	usage string // its arguments, for people
	run   func(c *imgCall, args []string) int
}

// imgVerbs are all of them, as help lists them.
func imgVerbs() []imgVerb {
	return []imgVerb{
		imgAmend,
		imgBench,
		imgBitmap,
		imgCheck,
		imgCommit,
		imgCompare,
		imgConvert,
		imgCreate,
		imgDD,
		imgInfo,
		imgMap,
		imgMeasure,
		imgRebase,
		imgResize,
		imgSnapshot,
	}
}

// The tool as it answers through a link of this name, and the version of that tool whose flags and texts these are.
const (
	qemuImgName    = "qemu-img"
	qemuImgVersion = "7.2.0"
)

// imgCall is one call of the tool.
type imgCall struct {
	Streams
	tool string // what messages begin with
	ctx  context.Context
	stop context.CancelFunc // of what untilSignal began
}

// MainOf runs the command line that a process was started with: argv with the program's name. Called through a link named
// qemu-img it is the image tool alone.
func MainOf(argv []string, s Streams) int {
	if len(argv) > 0 && filepath.Base(argv[0]) == qemuImgName {
		return runImg(qemuImgName, argv[1:], s)
	}
	return Main(argv[min(1, len(argv)):], s)
}

// runImg runs the tool with the arguments after its name.
func runImg(tool string, args []string, s Streams) int {
	c := &imgCall{Streams: s, tool: tool, ctx: context.Background(), stop: func() {}}
	defer func() { c.stop() }()
	return c.dispatch(args)
}

// untilSignal is the context of a verb that ends in good order when SIGINT or SIGTERM come; a second one ends the
// process. Verbs that do not ask for it are ended by the first: what they leave behind is whole at any time.
func (c *imgCall) untilSignal() context.Context {
	c.ctx, c.stop = signal.NotifyContext(c.ctx, syscall.SIGINT, syscall.SIGTERM)
	context.AfterFunc(c.ctx, c.stop)
	return c.ctx
}

// newImg puts the tool among the verbs of sluice. Its flags are qemu-img's, which cobra does not know to read.
func newImg(s Streams) *cobra.Command {
	return &cobra.Command{
		Use:                "img VERB [OPTIONS] FILE...",
		Short:              "Make, examine and change disk images, with qemu-img's verbs and flags",
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if code := runImg("sluice img", args, s); code != exitOK {
				return &status{code}
			}
			return nil
		},
	}
}

// status is an exit status of a verb that has said all there is to say.
type status struct{ code int }

func (s *status) Error() string { return fmt.Sprintf("exit status %d", s.code) }

func (c *imgCall) dispatch(args []string) int {
	var help, version bool
	f := c.flags()
	f.on(0, "version", &version)
	f.on('V', "", &version)
	f.on('h', "help", &help)
	f.text('T', "trace", new(string)) // what QEMU would trace, this program has not
	rest, ok := f.leading(args)
	switch {
	case !ok:
		return exitFailure
	case help:
		return c.help()
	case version:
		return c.version()
	case len(rest) == 0:
		return c.misused("Not enough arguments")
	}
	verbs := imgVerbs()
	i := slices.IndexFunc(verbs, func(v imgVerb) bool { return v.name == rest[0] })
	if i < 0 {
		return c.misused("Command not found: %s", rest[0])
	}
	if slices.Contains(rest[1:], "--help") || slices.Contains(rest[1:], "-h") {
		return c.help()
	}
	return verbs[i].run(c, rest[1:])
}

func (c *imgCall) version() int {
	fmt.Fprintf(c.Out, "%s version %s (%s)\n", qemuImgName, qemuImgVersion, versionLine())
	return exitOK
}

func (c *imgCall) help() int {
	fmt.Fprintf(c.Out, "%s version %s (%s)\n", qemuImgName, qemuImgVersion, versionLine())
	fmt.Fprintf(c.Out, "usage: %s [standard options] command [command options]\n", c.tool)
	io.WriteString(c.Out, `Disk image tool, with the verbs, flags, output and exit statuses of qemu-img

    '-h', '--help'       display this help and exit
    '-V', '--version'    output version information and exit
    '-T', '--trace'      accepted and ignored

Command syntax:
`)
	for _, v := range imgVerbs() {
		fmt.Fprintf(c.Out, "  %s %s\n", v.name, v.usage)
	}
	fmt.Fprintf(c.Out, `
Sizes are bytes, or have a suffix k, M, G, T, P or E (powers of 1024). Options of
-o are name=value,name=value; -o help lists them. What differs from qemu-img, and
why: docs/IMG.md.

Supported formats: %s
`, strings.Join(img.FormatNames(), " "))
	return exitOK
}

// errorf tells what went wrong, and is the exit status of a failure.
func (c *imgCall) errorf(format string, args ...any) int {
	fmt.Fprintf(c.Err, "%s: %s\n", c.tool, fmt.Sprintf(format, args...))
	return exitFailure
}

// told tells an error, if there is one, and is the exit status for it.
func (c *imgCall) told(err error) int {
	if err == nil {
		return exitOK
	}
	return c.errorf("%v", err)
}

// say tells text as it is, on standard error.
func (c *imgCall) say(text string) { io.WriteString(c.Err, text) }

// warnf tells what looks wrong.
func (c *imgCall) warnf(format string, args ...any) { c.errorf("warning: "+format, args...) }

// misused tells what is wrong with the command line.
func (c *imgCall) misused(format string, args ...any) int {
	c.errorf(format, args...)
	fmt.Fprintf(c.Err, "Try '%s --help' for more information\n", c.tool)
	return exitFailure
}
