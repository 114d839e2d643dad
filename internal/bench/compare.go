// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// Experiment is a set of subjects with one workload on one medium.
type Experiment struct {
	ID       string    `json:"id"`
	Title    string    `json:"title"`
	Medium   Medium    `json:"medium"`
	Workload Workload  `json:"-"`
	Subjects []Subject `json:"-"`
	// Bounds are what a verdict is needed on, so that [Rounds] can tell when there are enough; none: on the first subject of
	// ours against the peer's best.
	Bounds []Bound `json:"-"`
}

// Rounds says how often each subject is measured: Min times, and then, until the spread allows a verdict, up to Max times.
type Rounds struct {
	Min int `json:"min"`
	Max int `json:"max"`
}

// Row is what the runs of one subject gave.
type Row struct {
	Subject Subject
	WarmUp  *Result // discarded, but for the count of system calls
	Runs    []*Result
	// Dropped says why a subject was not measured after the warm-up; empty: it was.
	Dropped string
}

// Comparison is the outcome of interleaved runs.
type Comparison struct {
	Experiment
	Rows   []Row
	Rounds int
}

// warmUpMax is the longest warm-up run: it brings up clocks, caches and the file's pages, and shows who is out of the
// question.
const warmUpMax = time.Second

// Options of a comparison.
type Options struct {
	Rounds Rounds
	// Prune leaves out, after the warm-up, configurations of the peer and of fio that are far behind another of their kind
	// in everything.
	Prune bool
	// OthersMax is how much of the machine, in percent, others may use during a run; beyond that it is run again after a
	// pause, a few times, and the quietest counts. 0: nobody asks.
	OthersMax float64
	// Progress hears of each run.
	Progress func(string)
}

// Compare measures the subjects in turn, round by round, so that what the machine does besides falls on all of them alike.
// Each server is started for its run and ended after it, since two cannot hold one image. A first round warms up; it is
// also the one in which system calls are counted, which slows a server.
func Compare(ctx context.Context, e Experiment, o Options) (*Comparison, error) {
	e.Workload.Defaults()
	if err := e.Workload.Check(); err != nil {
		return nil, err
	}
	c := &Comparison{Experiment: e, Rows: make([]Row, len(e.Subjects))}
	for i, s := range e.Subjects {
		c.Rows[i].Subject = s
	}
	dir, err := os.MkdirTemp("", "sluice-compare-")
	if err != nil {
		return nil, fmt.Errorf("make a directory for the sockets: %w", err)
	}
	r := &comparing{Comparison: c, o: o, dir: dir, device: DeviceOf(e.Medium.Path)}
	return c, errors.Join(r.run(ctx), os.RemoveAll(dir))
}

// comparing is a comparison at work.
type comparing struct {
	*Comparison
	o      Options
	dir    string
	device string
	starts int
}

func (r *comparing) run(ctx context.Context) error {
	warm := r.Workload
	warm.Runtime = min(warm.Runtime, warmUpMax)
	for i := range r.Rows {
		row := &r.Rows[i]
		res, err := r.one(ctx, row, warm, Observation{Device: r.device, SysCalls: true})
		if err != nil {
			return err
		}
		row.WarmUp = res
		r.say("warm-up", row, res)
	}
	if r.o.Prune {
		r.prune()
	}
	for r.Rounds < r.o.Rounds.Max && (r.Rounds < r.o.Rounds.Min || !r.decided()) {
		r.Rounds++
		for i := range r.Rows {
			// Every second round goes the other way, so that nobody is always behind the same neighbour.
			row := &r.Rows[i]
			if r.Rounds%2 == 0 {
				row = &r.Rows[len(r.Rows)-1-i]
			}
			if row.Dropped != "" {
				continue
			}
			res, err := r.quiet(ctx, row)
			if err != nil {
				return err
			}
			row.Runs = append(row.Runs, res)
			r.say(fmt.Sprintf("round %d", r.Rounds), row, res)
		}
	}
	return nil
}

func (r *comparing) one(ctx context.Context, row *Row, w Workload, what Observation) (*Result, error) {
	r.starts++
	res, err := measure(ctx, &row.Subject, filepath.Join(r.dir, fmt.Sprintf("%d.sock", r.starts)), w, what)
	if err != nil {
		return nil, fmt.Errorf("measure %s: %w", row.Subject.Name, err)
	}
	return res, nil
}

// When others are at work: how often a run is repeated, and after which pause.
const quietTries = 5

var quietPause = 2 * time.Second

// quiet is one run, repeated while others use too much of the machine.
func (r *comparing) quiet(ctx context.Context, row *Row) (best *Result, err error) {
	for try := range quietTries {
		if try > 0 {
			sleep(ctx, quietPause)
		}
		res, err := r.one(ctx, row, r.Workload, Observation{Device: r.device})
		if err != nil {
			return nil, err
		}
		if best == nil || res.Limits.Others < best.Limits.Others {
			best = res
		}
		if r.o.OthersMax <= 0 || best.Limits.Others <= r.o.OthersMax {
			break
		}
	}
	return best, nil
}

func (r *comparing) say(when string, row *Row, res *Result) {
	if r.o.Progress == nil {
		return
	}
	r.o.Progress(fmt.Sprintf("%s, %s: %-44s %9.0f IOPS  %6.2f us of CPU a request  p50 %.0f us  %s",
		r.Title, when, row.Subject.Name, res.IOPS(), res.ServerCPUPerIO(), P50.of(res), res.Limits.Cause()))
}

// farBehind is the factor by which a configuration must lose to another one in everything to be left out.
const farBehind = 1.5

// prune leaves out who cannot be the best of its kind in anything.
func (r *comparing) prune() {
	loses := func(a, b *Result) bool {
		return a.IOPS()*farBehind < b.IOPS() && a.ServerCPUPerIO() > farBehind*b.ServerCPUPerIO() && P50.of(a) > farBehind*P50.of(b)
	}
	for i := range r.Rows {
		a := &r.Rows[i]
		if a.Subject.Role != Peer && a.Subject.Role != Direct {
			continue
		}
		for j := range r.Rows {
			b := &r.Rows[j]
			if a.Subject.Role == b.Subject.Role && a.Dropped == "" && b.Dropped == "" && loses(a.WarmUp, b.WarmUp) {
				a.Dropped = "far behind " + b.Subject.Name + " in the warm-up"
			}
		}
	}
}

// decided says whether more rounds could change what is to be found out.
func (r *comparing) decided() bool {
	if len(r.Bounds) == 0 {
		first := r.First(Ours)
		for _, m := range []Measure{IOPS, CPU} {
			best := r.Best(Peer, m)
			if first >= 0 && best >= 0 && !r.Ratio(first, best, m).decided() {
				return false
			}
		}
		return true
	}
	for _, b := range r.Bounds {
		if ratio, ok := r.ratioOfBound(&b); ok && !ratio.Sure(b.Limit) {
			return false
		}
	}
	return true
}

// values are a row's figures by round.
func (c *Comparison) values(row int, m Measure) (v []float64) {
	for _, r := range c.Rows[row].Runs {
		v = append(v, m.of(r))
	}
	return v
}

// Figure sums up one measure of a row.
func (c *Comparison) Figure(row int, m Measure) Figure { return figureOf(c.values(row, m)) }

// Ratio relates two rows.
func (c *Comparison) Ratio(row, to int, m Measure) Ratio {
	return ratioOf(c.values(row, m), c.values(to, m))
}

// First is the first row of a role that was measured, or -1.
func (c *Comparison) First(role Role) int {
	for i := range c.Rows {
		if c.Rows[i].Subject.Role == role && len(c.Rows[i].Runs) > 0 {
			return i
		}
	}
	return -1
}

// Best is the row of a role that is best in one measure, or -1. It may be another one in another measure: whoever is
// compared with the best of a role is compared with the best in that very figure.
func (c *Comparison) Best(role Role, m Measure) int {
	best, at := 0.0, -1
	for i := range c.Rows {
		if c.Rows[i].Subject.Role != role || len(c.Rows[i].Runs) == 0 {
			continue
		}
		v := c.Figure(i, m).Median
		if v > 0 && (at < 0 || (v < best) == m.LessIsBetter() && v != best) {
			best, at = v, i
		}
	}
	return at
}

// reference is the row that ratios of a table are to: the peer's best, else ours without batching or whatever is last.
func (c *Comparison) reference(m Measure) int {
	if best := c.Best(Peer, m); best >= 0 {
		return best
	}
	return len(c.Rows) - 1
}

// SysCallsPerIO is the server's system calls a request and who counted: kernel, or server where only our own could be
// asked; empty when nobody did.
func (r *Row) SysCallsPerIO() (n float64, source string) {
	if r.WarmUp != nil && r.WarmUp.SysCalls > 0 && r.WarmUp.IOs() > 0 {
		return r.WarmUp.SysCalls / float64(r.WarmUp.IOs()), "kernel"
	}
	for _, run := range r.Runs {
		if s := run.Server; s != nil {
			return ratio(s.SysCalls+s.Notifications, s.Requests), "server"
		}
	}
	return 0, ""
}

// per is the median over a row's runs of something that a run may not have.
func (r *Row) per(of func(*Result) float64) (float64, bool) {
	var v []float64
	for _, run := range r.Runs {
		if x := of(run); x > 0 {
			v = append(v, x)
		}
	}
	return figureOf(v).Median, len(v) > 0
}

// Limits of the run in the middle by requests a second.
func (r *Row) limits() *Limits {
	if len(r.Runs) == 0 {
		return nil
	}
	want := figureOf(valuesOf(r.Runs, IOPS)).Median
	middle := r.Runs[0]
	for _, run := range r.Runs {
		if distance(run.IOPS(), want) < distance(middle.IOPS(), want) {
			middle = run
		}
	}
	return &middle.Limits
}

func valuesOf(runs []*Result, m Measure) (v []float64) {
	for _, r := range runs {
		v = append(v, m.of(r))
	}
	return v
}

func distance(a, b float64) float64 { return max(a-b, b-a) }
