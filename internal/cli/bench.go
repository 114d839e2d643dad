// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/bench"
	"github.com/sluice-blk/sluice/internal/daemon"
)

// benchFlags are the flags of bench.
type benchFlags struct {
	disks   diskList
	connect string
	json    bool
	trace   string
	loops   loopFlags
	work    workloadFlags
	log     logFlags
	observe bench.Observation
}

// workloadFlags describe a workload in fio's words.
type workloadFlags struct {
	w        bench.Workload
	bs, size string
}

func (f *workloadFlags) add(set *pflag.FlagSet) {
	set.StringVar(&f.w.RW, "rw", "randread", "read, write, rw, randread, randwrite, randrw, trim or randtrim")
	set.StringVar(&f.bs, "bs", "4k", "size of a request")
	set.IntVar(&f.w.IODepth, "iodepth", 1, "requests outstanding in each job")
	set.IntVar(&f.w.NumJobs, "numjobs", 1, "jobs, each a virtqueue driven by a thread of its own")
	set.DurationVar(&f.w.Runtime, "runtime", 5*time.Second, "how long to measure")
	set.DurationVar(&f.w.RampTime, "ramp-time", 0, "how long to run before that")
	set.StringVar(&f.size, "size", "", "use only so much of the disk, from its start")
	set.IntVar(&f.w.RWMixRead, "rwmixread", 50, "percent of reads in rw and randrw")
	set.IntVar(&f.w.Fsync, "fsync", 0, "flush after so many writes of a job; 0 never")
	set.BoolVar(&f.w.Verify, "verify", false, "write patterns, compare each read, and read everything back at the end")
	set.BoolVar(&f.w.Poll, "poll", false, "poll the used ring and ask for no notifications")
	set.IntVar(&f.w.QueueSize, "queue-size", 0, "descriptors of a virtqueue (default: 256, or what the depth needs)")
	set.IntVar(&f.w.Batch, "iodepth-batch", 0, "requests placed for each kick; 0 is whatever is free")
	set.BoolVar(&f.w.NoEvent, "no-event-idx", false, "do not negotiate the event index")
	set.Uint64Var(&f.w.Seed, "randseed", 1, "seed of offsets and patterns")
}

// workload makes the workload, or a usage error.
func (f *workloadFlags) workload() (bench.Workload, error) {
	w := f.w
	bs, err := parseSize(f.bs)
	if err != nil {
		return w, fmt.Errorf("--bs: %w", err)
	}
	if bs > 1<<30 {
		return w, fmt.Errorf("--bs is %s (want at most 32M)", f.bs)
	}
	w.BS = int(bs)
	for flag, zero := range map[string]bool{"bs": bs == 0, "iodepth": w.IODepth == 0, "numjobs": w.NumJobs == 0, "runtime": w.Runtime == 0} {
		if zero { // which would stand for the default below
			return w, fmt.Errorf("--%s is 0, and nothing would be measured", flag)
		}
	}
	if f.size != "" {
		if w.Size, err = parseSize(f.size); err != nil {
			return w, fmt.Errorf("--size: %w", err)
		}
	}
	w.Defaults()
	return w, w.Check()
}

// connectMax is how long bench waits for a server that somebody else runs: it is there, or a person wants to know.
const connectMax = 3 * time.Second

func newBench(s Streams) *cobra.Command {
	f := &benchFlags{}
	cmd := &cobra.Command{
		Use:   "bench [--disk PATH[,key=value...] | --connect SOCKET] [--rw=...] ...",
		Short: "Measure a disk as a guest's driver sees it",
		Long: strings.TrimSpace(`
Play a guest's virtio-blk driver over vhost-user and measure: against a disk that
is served from this process (--disk, as for serve; without one a null disk), or
against whoever listens on a socket (--connect).

Workloads and figures have fio's names. Each job is a virtqueue with a thread.
Writing workloads overwrite the disk. CPU figures are of the whole server process;
on --disk that is this one without the jobs' threads.`),
		Example: `  sluice bench --rw=randread --iodepth=64
  sluice bench --disk /dev/shm/disk.raw --rw=randwrite --iodepth=64 --verify
  sluice bench --connect /run/disk.sock --numjobs=4 --iodepth=64 --json`,
		Args: noArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context(), s) }),
	}
	set := cmd.Flags()
	set.SortFlags = false
	set.Var(diskFlag{&f.disks}, "disk", "the disk to serve and measure, as for serve")
	set.StringVar(&f.connect, "connect", "", "measure the server that listens on this vhost-user socket")
	f.work.add(set)
	set.BoolVar(&f.json, "json", false, "print one JSON object, in the manner of fio")
	set.StringVar(&f.trace, "trace", "", "with --disk: write the last requests of the run to this file, for ui.perfetto.dev")
	f.loops.add(set)
	f.log.add(set)
	f.log.quiet(set)
	cmd.AddCommand(newCompare(s), newSeeds(s), newTargets(s))
	return cmd
}

func (f *benchFlags) run(parent context.Context, s Streams) error {
	w, err := f.work.workload()
	if err != nil {
		return &usage{err}
	}
	ctx, stop := signal.NotifyContext(parent, os.Interrupt, syscall.SIGTERM)
	defer stop()
	var res *bench.Result
	switch {
	case f.connect != "" && len(f.disks) > 0:
		return &usage{errors.New("--disk and --connect exclude each other")}
	case f.connect != "" && f.trace != "":
		return &usage{errors.New("--trace is for a disk that is served from here (of another server: sluice ctl SOCKET trace)")}
	case f.connect != "":
		w.Connect = connectMax
		res, err = bench.Run(ctx, f.connect, w)
	default:
		res, err = f.serveAndRun(ctx, s, w)
	}
	if err != nil {
		return err
	}
	if f.json {
		return res.WriteJSON(s.Out)
	}
	res.WriteText(s.Out)
	return f.writeStages(s.Out, res)
}

// writeStages prints where a server of ours spent the time of the requests, from the first one to the last.
func (f *benchFlags) writeStages(out io.Writer, res *bench.Result) error {
	if res.Server == nil {
		return nil
	}
	queues, _ := res.Server.Queues.([]daemon.QueueReport)
	for i := range queues {
		if len(queues) > 1 {
			fmt.Fprintf(out, "  server, queue %d on %s:\n", queues[i].Index, queues[i].Loop)
		}
		if err := writeStages(out, "  ", queues[i].Stages); err != nil {
			return err
		}
	}
	return nil
}

// serveAndRun serves the disk from this process, on a socket that nobody else knows, and adds what the server counted.
func (f *benchFlags) serveAndRun(ctx context.Context, s Streams, w bench.Workload) (*bench.Result, error) {
	log, err := f.log.logger(s.Err)
	if err != nil {
		return nil, &usage{err}
	}
	disk := daemon.DiskConfig{Driver: "null", Size: 1 << 30}
	switch len(f.disks) {
	case 0:
	case 1:
		disk = f.disks[0].config
	default:
		return nil, &usage{errors.New("bench measures one --disk")}
	}
	if disk.Queues < w.NumJobs {
		disk.Queues = w.NumJobs
	}
	loops, err := f.loops.configs()
	if err != nil {
		return nil, &usage{err}
	}
	dir, err := os.MkdirTemp("", "sluice-bench-")
	if err != nil {
		return nil, fmt.Errorf("make a directory for the socket: %w", err)
	}
	defer os.RemoveAll(dir)
	disk.Exports = []daemon.ExportConfig{{Socket: filepath.Join(dir, "disk.sock")}}
	daemon.TuneRuntime(len(loops) + w.NumJobs)
	d, err := daemon.New(daemon.Config{Loops: loops, Disks: []daemon.DiskConfig{disk}, Trace: f.trace, Logger: log})
	if err != nil {
		return nil, &usage{err}
	}
	if err := d.Start(ctx); err != nil {
		return nil, err
	}
	res, err := benchServed(ctx, d, disk.Exports[0].Socket, w, f.observe)
	return res, errors.Join(err, d.Stop(context.WithoutCancel(ctx)))
}

func benchServed(ctx context.Context, d *daemon.Daemon, socket string, w bench.Workload, what bench.Observation) (*bench.Result, error) {
	before, err := d.Stats(ctx)
	if err != nil {
		return nil, err
	}
	res, err := bench.Observe(ctx, socket, w, what)
	if err != nil {
		return nil, err
	}
	after, err := d.Stats(ctx)
	if err != nil {
		return nil, err
	}
	res.Server = serverCounters(&before, &after)
	report, err := d.Report(ctx, &daemon.StatsArgs{})
	if err != nil {
		return nil, err
	}
	res.Server.Queues = report.Disks[0].Exports[0].Queues
	return res, nil
}

// serverCounters is the difference of two readings of a daemon with one disk.
func serverCounters(before, after *daemon.Stats) *bench.ServerCounters {
	b, a := before.Disks[0].Exports[0].Device, after.Disks[0].Exports[0].Device
	c := &bench.ServerCounters{
		Requests: a.Requests - b.Requests, Kicks: a.Kicks - b.Kicks, Notifications: a.Notifications - b.Notifications,
		Engine: after.Disks[0].Info.Engine,
	}
	for i := range after.Loops {
		la, lb := &after.Loops[i], &before.Loops[i]
		c.Poller = la.Poller.String()
		c.SysCalls += la.SysCalls - lb.SysCalls
		for k := range la.Engines {
			c.Submissions += la.Engines[k].Submissions - lb.Engines[k].Submissions
			c.Submitted += la.Engines[k].Requests - lb.Engines[k].Requests
			if aio.EngineKind(k) != aio.EngineIOUring { // there the wait is the submission
				c.SysCalls += la.Engines[k].Submissions - lb.Engines[k].Submissions
			}
		}
	}
	c.SysCalls += c.Notifications + c.Kicks // one write, one read
	return c
}
