// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

// Subject is a server under comparison: how to start it on a socket.
type Subject struct {
	Name string
	// Args is the command line; in each word %S stands for the socket's path.
	Args []string
}

// Comparison is the outcome of interleaved runs.
type Comparison struct {
	Workload Workload
	Subjects []Subject
	Runs     [][]*Result // by subject, then by round
	Logs     [][][]byte  // what each server printed, likewise
}

// Compare measures the subjects in turn, rounds times, so that what the machine does besides falls on all of them alike.
// Each server is started for its run and ended after it, since two cannot hold one image. progress hears of each run.
func Compare(ctx context.Context, subjects []Subject, w Workload, rounds int, progress func(string)) (*Comparison, error) {
	c := &Comparison{Workload: w, Subjects: subjects, Runs: make([][]*Result, len(subjects)), Logs: make([][][]byte, len(subjects))}
	dir, err := os.MkdirTemp("", "sluice-compare-")
	if err != nil {
		return nil, fmt.Errorf("make a directory for the sockets: %w", err)
	}
	defer os.RemoveAll(dir)
	for round := range rounds {
		for i, s := range subjects {
			res, log, err := measure(ctx, s, filepath.Join(dir, fmt.Sprintf("%d-%d.sock", round, i)), w)
			if err != nil {
				return nil, fmt.Errorf("measure %s: %w", s.Name, err)
			}
			c.Runs[i] = append(c.Runs[i], res)
			c.Logs[i] = append(c.Logs[i], log)
			progress(fmt.Sprintf("round %d of %d: %-40s %9.0f IOPS  %6.2f us of server CPU a request", round+1, rounds, s.Name, res.IOPS(), res.ServerCPUPerIO()))
		}
	}
	return c, nil
}

// measure starts one server, drives the workload, and ends it.
func measure(ctx context.Context, s Subject, socket string, w Workload) (res *Result, log []byte, err error) {
	args := make([]string, len(s.Args))
	for i, a := range s.Args {
		args[i] = strings.ReplaceAll(a, "%S", socket)
	}
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	gone := make(chan error, 1)
	go func() { gone <- cmd.Wait() }()
	dial, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case err := <-gone:
			gone <- err
			cancel(fmt.Errorf("the server ended: %v", err)) // end tells the error itself
		case <-dial.Done():
		}
	}()
	res, err = Run(dial, socket, w)
	if cause := context.Cause(dial); err != nil && cause != nil {
		err = errors.Join(cause, err)
	}
	cancel(nil)
	<-ended
	err = errors.Join(err, end(cmd, gone))
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, out.Bytes())
	}
	return res, out.Bytes(), err
}

// end asks a server to stop, and makes it after a while.
func end(cmd *exec.Cmd, gone <-chan error) error {
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("end the server: %w", err)
	}
	select {
	case err := <-gone:
		return err
	case <-time.After(20 * time.Second):
		return errors.Join(errors.New("the server did not end at SIGTERM"), cmd.Process.Kill(), <-gone)
	}
}

// Figure is the median of some runs and the spread around it.
type Figure struct{ Median, Min, Max float64 }

// Figure sums up one figure of a subject.
func (c *Comparison) Figure(subject int, of func(*Result) float64) Figure {
	var v []float64
	for _, r := range c.Runs[subject] {
		v = append(v, of(r))
	}
	slices.Sort(v)
	if len(v) == 0 {
		return Figure{}
	}
	m := v[len(v)/2]
	if len(v)%2 == 0 {
		m = (v[len(v)/2-1] + m) / 2
	}
	return Figure{m, v[0], v[len(v)-1]}
}

// Spread is the distance of the extremes in percent of the median.
func (f Figure) Spread() float64 {
	if f.Median == 0 {
		return 0
	}
	return (f.Max - f.Min) / f.Median * 100
}

// WriteMarkdown prints a table with one row a subject; ratios are to the last subject. extra gives the text of one more
// column, named by its title.
func (c *Comparison) WriteMarkdown(w io.Writer, title string, extra func(subject int) string) error {
	last := len(c.Subjects) - 1
	iops := func(r *Result) float64 { return r.IOPS() }
	cpu := func(r *Result) float64 { return r.ServerCPUPerIO() }
	base, baseCPU := c.Figure(last, iops), c.Figure(last, cpu)
	t := tabwriter.NewWriter(w, 0, 0, 1, ' ', 0)
	fmt.Fprintf(t, "| server\t| IOPS\t| spread\t| ratio\t| CPU us/request\t| ratio\t| p50 us\t| p99 us\t| %s\t|\n", title)
	fmt.Fprintf(t, "|---\t|---\t|---\t|---\t|---\t|---\t|---\t|---\t|---\t|\n")
	for i, s := range c.Subjects {
		f, g := c.Figure(i, iops), c.Figure(i, cpu)
		p50 := c.Figure(i, func(r *Result) float64 { return us(r.Main().P50) })
		p99 := c.Figure(i, func(r *Result) float64 { return us(r.Main().P99) })
		fmt.Fprintf(t, "| %s\t| %.0f\t| %.0f %%\t| %.2f\t| %.2f\t| %.2f\t| %.0f\t| %.0f\t| %s\t|\n", s.Name, f.Median, f.Spread(),
			over(f.Median, base.Median), g.Median, over(g.Median, baseCPU.Median), p50.Median, p99.Median, extra(i))
	}
	return t.Flush()
}

func over(a, b float64) float64 {
	if b == 0 {
		return 0
	}
	return a / b
}
