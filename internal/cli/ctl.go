// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-blk/sluice/internal/control"
	"github.com/sluice-blk/sluice/internal/daemon"
)

// ctlFlags are the flags of ctl.
type ctlFlags struct {
	json  bool
	watch time.Duration
	disk  string
}

// ctlVerb is something that can be asked of a daemon.
type ctlVerb struct {
	want string // its arguments
	help string
	args func(n int) bool
	do   func(ctx context.Context, c *control.Client, f *ctlFlags, args []string, out io.Writer) error
}

// ctlVerbs are all of them. A further one is an entry here and a handler in the daemon.
var ctlVerbs = map[string]ctlVerb{
	"status": {help: "what is served, by which loops and engines", args: none, do: ctlStatus},
	"trace":  {want: "start FILE | stop", help: "write the last requests to FILE, for ui.perfetto.dev", args: func(n int) bool { return n == 1 || n == 2 }, do: ctlTrace},
	"stats":  {help: "counters, latencies by stage and batch sizes; --disk, --watch", args: none, do: ctlStats},
}

func none(n int) bool { return n == 0 }

func newCtl(s Streams) *cobra.Command {
	f := &ctlFlags{}
	cmd := &cobra.Command{
		Use:   "ctl SOCKET VERB [ARGUMENT...]",
		Short: "Ask a running sluice serve",
		Long:  ctlText(),
		Example: `  sluice serve --disk disk.raw --vhost-user /run/disk.sock --control /run/sluice.ctl
  sluice ctl /run/sluice.ctl status
  sluice ctl /run/sluice.ctl stats --watch 1s`,
		Args: func(_ *cobra.Command, args []string) error { return checkCtl(args) },
		RunE: verb(func(cmd *cobra.Command, args []string) error { return f.run(cmd.Context(), s, args) }),
	}
	set := cmd.Flags()
	set.SortFlags = false
	set.BoolVar(&f.json, "json", false, "print the answer as JSON, one object a line with --watch")
	set.DurationVar(&f.watch, "watch", 0, "stats: print the figures of each such interval (such as 1s) until interrupted")
	set.StringVar(&f.disk, "disk", "", "stats: only the disk of this name")
	return cmd
}

func ctlText() string {
	var b strings.Builder
	b.WriteString("Ask the sluice serve that made the socket with --control. Verbs:\n\n")
	for _, name := range slices.Sorted(maps.Keys(ctlVerbs)) {
		v := ctlVerbs[name]
		fmt.Fprintf(&b, "  %-28s%s\n", strings.TrimSpace(name+" "+v.want), v.help)
	}
	b.WriteString("\nWhat the figures mean, and the protocol for programs: docs/OBSERVABILITY.md.")
	return b.String()
}

func checkCtl(args []string) error {
	if len(args) < 2 {
		return errors.New("a socket and a verb are wanted")
	}
	v, ok := ctlVerbs[args[1]]
	switch {
	case !ok:
		return fmt.Errorf("unknown verb %q (want %s)", args[1], strings.Join(slices.Sorted(maps.Keys(ctlVerbs)), ", "))
	case !v.args(len(args) - 2):
		return fmt.Errorf("%s wants %s", args[1], orNothing(v.want))
	}
	return nil
}

func orNothing(want string) string {
	if want == "" {
		return "no arguments"
	}
	return want
}

func (f *ctlFlags) run(parent context.Context, s Streams, args []string) error {
	switch {
	case args[1] != "stats" && (f.watch != 0 || f.disk != ""):
		return &usage{errors.New("--watch and --disk are for stats")}
	case f.watch < 0:
		return &usage{fmt.Errorf("--watch is %v and cannot be negative", f.watch)}
	}
	ctx, stop := signal.NotifyContext(parent, os.Interrupt, syscall.SIGTERM)
	defer stop()
	c, err := control.Dial(ctx, args[0])
	if err != nil {
		return err
	}
	err = ctlVerbs[args[1]].do(ctx, c, f, args[2:], s.Out)
	if ctx.Err() != nil && f.watch > 0 {
		err = nil // that is how a watch ends
	}
	return errors.Join(err, c.Close())
}

func ctlStatus(ctx context.Context, c *control.Client, f *ctlFlags, _ []string, out io.Writer) error {
	var s daemon.Status
	if err := c.Do(ctx, "status", nil, &s); err != nil {
		return err
	}
	if f.json {
		return writeIndented(out, &s)
	}
	return writeStatus(out, &s)
}

func ctlStats(ctx context.Context, c *control.Client, f *ctlFlags, _ []string, out io.Writer) error {
	ask := func() (*daemon.Report, error) {
		r := new(daemon.Report)
		err := c.Do(ctx, "stats", &daemon.StatsArgs{Disk: f.disk}, r)
		return r, err
	}
	r, err := ask()
	if err != nil {
		return err
	}
	if f.watch == 0 {
		if f.json {
			return writeIndented(out, r)
		}
		return writeReport(out, r)
	}
	for tick := time.NewTicker(f.watch); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return nil
		case <-tick.C:
		}
		next, err := ask()
		if err != nil {
			tick.Stop()
			return err
		}
		between := next.Since(r)
		if f.json {
			err = json.NewEncoder(out).Encode(between)
		} else {
			err = writeInterval(out, between)
		}
		if err != nil {
			tick.Stop()
			return err
		}
		r = next
	}
}

// ctlTrace starts or stops a trace. The daemon writes the file, wherever it was started, so the name is made absolute here.
func ctlTrace(ctx context.Context, c *control.Client, f *ctlFlags, args []string, out io.Writer) error {
	switch {
	case args[0] == "start" && len(args) == 2:
		file, err := filepath.Abs(args[1])
		if err != nil {
			return fmt.Errorf("find out where %s is: %w", args[1], err)
		}
		return c.Do(ctx, "trace-start", &daemon.TraceArgs{File: file}, nil)
	case args[0] == "stop" && len(args) == 1:
		var r daemon.TraceResult
		if err := c.Do(ctx, "trace-stop", nil, &r); err != nil {
			return err
		}
		if f.json {
			return writeIndented(out, &r)
		}
		_, err := fmt.Fprintf(out, "%s: the last %d of %d requests\n", r.File, r.Kept, r.Requests)
		return err
	}
	return &usage{errors.New("trace wants start FILE or stop")}
}

func writeIndented(out io.Writer, v any) error {
	enc := json.NewEncoder(out)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}
