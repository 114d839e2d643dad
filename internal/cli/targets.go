// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-blk/sluice/internal/bench"
)

// targetsFlags are the flags of bench targets.
type targetsFlags struct {
	only  []string
	check bool
	quick bool
	list  bool
	lab   labFlags
}

func newTargets(s Streams) *cobra.Command {
	f := &targetsFlags{}
	cmd := &cobra.Command{
		Use:   "targets [--check] [--only ID,...] ...",
		Short: "Measure what sluice is to reach, and say what it reached",
		Long: strings.TrimSpace(`
Measure each row of the list of targets beside the peer's best and fio's, and
print for each bound the figures and whether it was reached. A ratio counts by
its median; where the interval that holds it with 90 % lies on both sides of the
bound, that is said, and with --rounds auto (the default here) more rounds are
run until it does not, or there are too many.

--check measures three of the rows, with bounds so wide that noise alone does
not break them, and fails when one is broken for sure: it guards what was won.`),
		Example: `  sluice bench targets --dir /mnt/nvme
  sluice bench targets --only null-64,shm-64
  sluice bench targets --check`,
		Args: noArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error { return f.run(cmd, s) }),
	}
	set := cmd.Flags()
	set.SortFlags = false
	set.StringSliceVar(&f.only, "only", nil, "only these targets")
	set.BoolVar(&f.check, "check", false, "the short list with wide bounds; exit status 1 when a bound is broken")
	set.BoolVar(&f.quick, "quick", false, "short runs, few rounds and small images: to see that it works, not for figures")
	set.BoolVar(&f.list, "list", false, "print the list and measure nothing")
	f.lab.add(set, "auto")
	return cmd
}

func (f *targetsFlags) targets() ([]bench.Target, error) {
	all := bench.Targets
	if f.check {
		all = bench.Checks
	}
	if len(f.only) == 0 {
		return all, nil
	}
	var list []bench.Target
	for _, id := range f.only {
		i := slices.IndexFunc(all, func(t bench.Target) bool { return t.ID == id })
		if i < 0 {
			return nil, fmt.Errorf("--only: there is no target %q (see --list)", id)
		}
		list = append(list, all[i])
	}
	return list, nil
}

func (f *targetsFlags) run(cmd *cobra.Command, s Streams) (err error) {
	targets, err := f.targets()
	if err != nil {
		return &usage{err}
	}
	if f.list {
		return listTargets(s, targets)
	}
	if f.quick {
		f.lab.quick(cmd)
	}
	if !f.check {
		f.lab.wantFio()
	}
	rounds, err := f.lab.report.parse()
	if err != nil {
		return &usage{err}
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var setups []bench.Setup
	for i := range targets {
		setups = append(setups, targets[i].Setups...)
	}
	l, err := f.lab.open(ctx, mediaOf(setups))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	report := &bench.Report{Title: "sluice bench targets", Environment: environment(ctx, l.Peer, l.Fio, l.media), Notes: l.notes()}
	j := &judging{lab: l, targets: targets, options: f.lab.report.options(s, rounds), shm: f.lab.shm,
		window: 5 * f.lab.runtime, report: report}
	if err := j.run(ctx); err != nil {
		return err
	}
	name := "targets"
	if f.check {
		name = "check"
	}
	if err := f.lab.report.write(s, j.report, name); err != nil {
		return err
	}
	if lost := j.lost(); f.check && len(lost) > 0 {
		return fmt.Errorf("what was won is lost: %s", strings.Join(lost, "; "))
	}
	return nil
}

func listTargets(s Streams, targets []bench.Target) error {
	for i := range targets {
		t := &targets[i]
		var bounds, where []string
		for _, b := range t.Bounds {
			bounds = append(bounds, b.String())
		}
		for _, setup := range t.Setups {
			where = append(where, setup.Title())
		}
		between := ", "
		if t.Any {
			between = " or "
		}
		said := strings.Join(bounds, between)
		if t.Elsewhere != "" {
			said = t.Elsewhere
		}
		if _, err := fmt.Fprintf(s.Out, "%-12s %s\n", t.ID, said); err != nil {
			return err
		}
		for _, w := range where {
			if _, err := fmt.Fprintf(s.Out, "%-12s   in %s\n", "", w); err != nil {
				return err
			}
		}
	}
	return nil
}

// judging measures targets one after the other. An experiment that two of them ask for is run once, with the bounds of
// both.
type judging struct {
	*lab
	targets []bench.Target
	options bench.Options
	shm     string
	window  time.Duration // of idle disks
	report  *bench.Report
}

func (j *judging) run(ctx context.Context) error {
	done := make(map[string]*bench.Comparison)
	for i := range j.targets {
		t := &j.targets[i]
		for _, setup := range t.Setups {
			c := done[setup.ID()]
			if c == nil {
				var err error
				if c, err = j.lab.run(ctx, setup, j.boundsOf(setup), j.options); err != nil {
					return err
				}
				done[setup.ID()] = c
				j.report.Comparisons = append(j.report.Comparisons, c)
			}
			j.report.Outcomes = append(j.report.Outcomes, c.Judge(t)...)
		}
		if err := j.others(ctx, t); err != nil {
			return err
		}
	}
	return nil
}

// boundsOf are the bounds of all targets on one experiment.
func (j *judging) boundsOf(setup bench.Setup) (bounds []bench.Bound) {
	for i := range j.targets {
		for _, s := range j.targets[i].Setups {
			if s.ID() == setup.ID() {
				bounds = append(bounds, j.targets[i].Bounds...)
			}
		}
	}
	return bounds
}

// others judges the targets that are no comparison.
func (j *judging) others(ctx context.Context, t *bench.Target) error {
	if t.Elsewhere != "" {
		j.report.Notes = append(j.report.Notes, t.ID+": "+t.Elsewhere)
	}
	book := func(m bench.Measure, v float64, how string) {
		if o, ok := t.JudgeValue(m, v, how); ok {
			j.report.Outcomes = append(j.report.Outcomes, o)
		}
	}
	for _, b := range t.Bounds {
		switch b.Measure {
		case bench.Mallocs:
			n, err := mallocsPerRequest(ctx, j.Runtime)
			if err != nil {
				return fmt.Errorf("count allocations: %w", err)
			}
			book(b.Measure, n, "null disk, depth 64, served in this process")
		case bench.IdleCPU:
			const disks = 100
			c, err := bench.MeasureIdle(ctx, j.Program, j.shm, disks, j.window)
			if err != nil {
				return fmt.Errorf("measure idle disks: %w", err)
			}
			how := fmt.Sprintf("%d attached disks, %v", disks, j.window)
			book(bench.IdleCPU, c.CPUPercent, how)
			book(bench.DiskMiB, c.DiskMiB, how)
		case bench.AttachMsg:
			if err := j.attach(ctx, book); err != nil {
				return fmt.Errorf("measure an attach: %w", err)
			}
		}
	}
	return nil
}

// mallocsPerRequest serves a null disk from this process and counts what the whole process allocates while the driver is
// at work: the driver's loop allocates nothing either, and what is left is what the control plane does meanwhile.
func mallocsPerRequest(ctx context.Context, runtime time.Duration) (float64, error) {
	f := &benchFlags{observe: bench.Observation{Mallocs: true}}
	set := pflag.NewFlagSet("", pflag.ContinueOnError)
	f.loops.add(set)
	f.log.add(set)
	f.log.quiet(set)
	w := bench.Workload{IODepth: 64, Runtime: runtime, RampTime: runtime / 4}
	w.Defaults()
	res, err := f.serveAndRun(ctx, Streams{Err: io.Discard}, w)
	if err != nil {
		return 0, err
	}
	return float64(res.Mallocs) / float64(max(res.IOs(), 1)), nil
}

const (
	attachSize   = 16 << 30
	attachSpare  = 2 << 30 // for everybody else, should the server pin all of it
	attachRepeat = 5
)

// attach takes the worst of some.
func (j *judging) attach(ctx context.Context, book func(bench.Measure, float64, string)) error {
	if free := memInfo("MemAvailable"); free < (attachSize+attachSpare)>>10 {
		j.report.Notes = append(j.report.Notes, fmt.Sprintf("attach-16g: left out, this machine has %d MiB free, and a server may pin the guest's memory", free>>10))
		return nil
	}
	path, err := j.image(ctx, j.shm, 1<<20) // a file, since its engine may want to know the guest's memory
	if err != nil {
		return err
	}
	s := bench.Sluice{Program: j.Program, More: j.More, Keys: j.Keys}.Subject(bench.Medium{Name: "shm", Path: path}, 1)
	var worst time.Duration
	for range attachRepeat {
		took, err := bench.MeasureAttach(ctx, s, attachSize)
		if err != nil {
			return err
		}
		worst = max(worst, took)
	}
	book(bench.AttachMsg, float64(worst.Microseconds())/1e3, fmt.Sprintf("16 GiB, the worst of %d", attachRepeat))
	return nil
}

// lost are the bounds that do not hold.
func (j *judging) lost() (list []string) {
	for i := range j.report.Outcomes {
		if o := &j.report.Outcomes[i]; o.Lost() || o.NotHere != "" {
			list = append(list, fmt.Sprintf("%s: %s, %s (%s)", o.Where, o.Bound, o.Word(), o.Figures))
		}
	}
	return list
}
