// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-blk/sluice/internal/bench"
)

// seedsFlags are the flags of bench seeds.
type seedsFlags struct {
	series []string
	quick  bool
	lab    labFlags
}

func newSeeds(s Streams) *cobra.Command {
	f := &seedsFlags{}
	cmd := &cobra.Command{
		Use:   "seeds [--quick] [--series 1,2,3] ...",
		Short: "Measure the tables that the work on batching started from",
		Long:  seedsText(),
		Example: `  sluice bench seeds --quick
  sluice bench seeds --dir /mnt/nvme --format markdown --chart seeds.svg`,
		Args: noArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error { return f.run(cmd, s) }),
	}
	set := cmd.Flags()
	set.SortFlags = false
	set.StringSliceVar(&f.series, "series", seriesIDs(), "which tables")
	set.BoolVar(&f.quick, "quick", false, "short runs, few rounds and small images: to see that it works, not for figures")
	f.lab.add(set, "5")
	return cmd
}

func seriesIDs() (ids []string) {
	for _, s := range bench.Seeds {
		ids = append(ids, s.ID)
	}
	return ids
}

func seedsText() string {
	var b strings.Builder
	b.WriteString("Measure, beside the peer, in three series of tables:\n\n")
	for _, s := range bench.Seeds {
		fmt.Fprintf(&b, "  %s  %s\n", s.ID, s.Title)
	}
	b.WriteString(strings.TrimRight(`
In the third each server has two queues, which share a loop (loops=1) or have
one each (loops=2); the peer's main loop and iothread stand beside them.

Images are made in --dir and --shm, written over, and removed. What is printed
is explained in sluice bench compare --help.`, "\n"))
	return b.String()
}

// What --quick sets where nothing else was said.
const (
	quickRuntime = 300 * time.Millisecond
	quickRounds  = "2"
	quickSize    = "64M"
)

func (f *seedsFlags) run(cmd *cobra.Command, s Streams) (err error) {
	if f.quick {
		f.lab.quick(cmd)
	}
	rounds, err := f.lab.report.parse()
	if err != nil {
		return &usage{err}
	}
	var setups []bench.Setup
	for _, id := range f.series {
		i := slices.IndexFunc(bench.Seeds, func(s bench.Series) bool { return s.ID == id })
		if i < 0 {
			return &usage{fmt.Errorf("--series is %q (want of %s)", id, strings.Join(seriesIDs(), ", "))}
		}
		for _, setup := range bench.Seeds[i].Setups {
			setup.Series = id
			setups = append(setups, setup)
		}
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	l, err := f.lab.open(ctx, mediaOf(setups))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	r, err := l.series(ctx, setups, f.lab.report.options(s, rounds))
	if err != nil {
		return err
	}
	return f.lab.report.write(s, r, "seeds")
}

func (l *lab) series(ctx context.Context, setups []bench.Setup, o bench.Options) (*bench.Report, error) {
	r := &bench.Report{Title: "sluice bench seeds", Environment: environment(ctx, l.Peer, l.Fio, l.media), Notes: l.notes()}
	for _, setup := range setups {
		c, err := l.run(ctx, setup, nil, o)
		if err != nil {
			return nil, err
		}
		r.Comparisons = append(r.Comparisons, c)
	}
	return r, nil
}

// quick shortens what was not set by hand.
func (f *labFlags) quick(cmd *cobra.Command) {
	set := cmd.Flags()
	if !set.Changed("runtime") {
		f.runtime = quickRuntime
	}
	if !set.Changed("rounds") {
		f.report.rounds = quickRounds
	}
	if !set.Changed("image-size") {
		f.size = quickSize
	}
}
