// SPDX-License-Identifier: Apache-2.0

// Package demo is the main job from end to end: it serves disks from this very process, has a real Linux guest work on
// them, and checks on the host what the guest did. Where no guest can be booted the built-in driver takes its place, and
// the report says so.
//
// The work disk gets a file system, files whose checksums are kept, a verified random write job, a trim. A second image
// is read by the job of the batching series (4k random reads, libaio, direct, 4 jobs of depth 64) once for each engine,
// with batching off and on; each of these rows has a disk and a loop of its own, so that its counters are its own.
//
// Control plane only; one demo at a time in a process.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/daemon"
	"github.com/sluice-blk/sluice/internal/guestvm"
)

// Options say what the demo does. The zero value plus a Dir works.
type Options struct {
	Dir     string        // where images, sockets and logs go; they are removed at the end
	Size    int64         // of the work disk, bytes; 0: 1 GiB
	Format  string        // of the disks: raw (or empty) or qcow2
	Runtime time.Duration // of each row; 0: 3 s
	NoGuest bool          // the built-in driver alone
	Engines []aio.EngineKind
	Accel   guestvm.Accel
	Kernel  string // a bzImage or a directory with one; empty: the host's or Debian's cloud kernel
	CPUs    int    // of the guest; 0: 2
	Out     io.Writer
	Console io.Writer // the guest's, as it comes; nil: nobody sees it
	Log     *slog.Logger
}

// Report is what the demo found.
type Report struct {
	Guest    string // how the guest was run, or why there was none
	Emulated bool   // the guest's instructions were emulated, so that it was the limit
	Rows     []Row
	Checks   []string // what was checked on the host, each of which held
	Duration time.Duration
}

// Row is a line of the table: one engine, with batching or without.
type Row struct {
	Engine   aio.EngineKind
	Batching bool
	IOPS     float64
	P50, P99 time.Duration
	Requests uint64
	// PerSubmission and PerNotification are requests for each system call that carried some to the kernel, and for each
	// call of the guest.
	PerSubmission, PerNotification float64
}

// Run does the demo. It fails when anything that is checked does not hold.
func Run(ctx context.Context, o Options) (*Report, error) {
	o.defaults()
	started := time.Now()
	d := &demo{o: o, report: &Report{}}
	defer d.cleanUp()
	if err := d.prepare(ctx); err != nil {
		return nil, err
	}
	err := d.work(ctx)
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
	defer cancel()
	if err = errors.Join(err, d.daemon.Stop(stop)); err != nil {
		return nil, err
	}
	if err := d.checkHost(ctx); err != nil {
		return nil, err
	}
	d.report.Duration = time.Since(started)
	return d.report, nil
}

// The formats that the disks can have.
const (
	formatRaw   = "raw"
	formatQcow2 = "qcow2"
)

func (o *Options) defaults() {
	if o.Format == "" {
		o.Format = formatRaw
	}
	if o.Size == 0 {
		o.Size = 1 << 30
	}
	if o.Runtime == 0 {
		o.Runtime = 3 * time.Second
	}
	if o.CPUs == 0 {
		o.CPUs = 2
	}
	if o.Out == nil {
		o.Out = io.Discard
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Engines == nil {
		o.Engines = []aio.EngineKind{aio.EngineIOUring, aio.EngineLinuxAIO, aio.EngineThreads}
	}
}

// demo is one run.
type demo struct {
	o      Options
	report *Report
	dir    string
	daemon *daemon.Daemon
	rows   []Row // in the order of the disks behind the work disk
	guest  bool
	said   guestSaid
}

func (d *demo) say(format string, args ...any) { fmt.Fprintf(d.o.Out, format+"\n", args...) }

// prepare makes the images and serves them.
func (d *demo) prepare(ctx context.Context) error {
	if err := d.decideGuest(ctx); err != nil {
		return err
	}
	var err error
	if d.dir, err = os.MkdirTemp(d.o.Dir, "sluice-demo-"); err != nil {
		return fmt.Errorf("make a directory for the demo: %w", err)
	}
	d.say("making a %d MiB work disk and a read-only image for the table, both %s, in %s", d.o.Size>>20, d.o.Format, d.dir)
	if err := d.makeImage(ctx, d.work0(), d.o.Size, false); err != nil {
		return err
	}
	if err := d.makeImage(ctx, d.image(), imageSize, true); err != nil {
		return err
	}
	return d.serve(ctx)
}

// decideGuest finds out whether a guest can be booted, and says why not.
func (d *demo) decideGuest(ctx context.Context) error {
	if d.o.NoGuest {
		d.report.Guest = "no guest was asked for: the built-in driver did the work"
		return nil
	}
	if err := guestvm.Check(ctx); err != nil {
		d.report.Guest = fmt.Sprintf("no guest can be booted here (%v): the built-in driver did the work", err)
		d.say("%s", d.report.Guest)
		return nil
	}
	d.guest = true
	return nil
}

func (d *demo) work0() string           { return filepath.Join(d.dir, "work."+d.o.Format) }
func (d *demo) image() string           { return filepath.Join(d.dir, "image."+d.o.Format) }
func (d *demo) socket(i int) string     { return filepath.Join(d.dir, fmt.Sprintf("disk%d.sock", i)) }
func (d *demo) rowDisk(row int) int     { return row + 1 }
func (d *demo) path(name string) string { return filepath.Join(d.dir, name) }

// serve starts the work disk on a loop with default settings, and each row's disk on a loop of its own.
func (d *demo) serve(ctx context.Context) error {
	cfg := daemon.Config{Logger: d.o.Log, Loops: []daemon.LoopConfig{{}}}
	disk := func(c daemon.DiskConfig, loop int) {
		c.Loop = &loop
		c.Serial = fmt.Sprintf("demo%d", len(cfg.Disks))
		c.Queues = d.o.CPUs
		c.Exports = []daemon.ExportConfig{{Socket: d.socket(len(cfg.Disks))}}
		cfg.Disks = append(cfg.Disks, c)
	}
	disk(daemon.DiskConfig{Path: d.work0(), Format: d.o.Format}, 0)
	for _, engine := range d.o.Engines {
		for _, batching := range []bool{false, true} {
			c := daemon.DiskConfig{Path: d.image(), Format: d.o.Format, ReadOnly: true, Engine: engine}
			cfg.Loops = append(cfg.Loops, daemon.LoopConfig{Unbatched: !batching})
			disk(c, len(cfg.Loops)-1)
			d.rows = append(d.rows, Row{Engine: engine, Batching: batching})
		}
	}
	daemon.TuneRuntime(len(cfg.Loops))
	dm, err := daemon.New(cfg)
	if err != nil {
		return err
	}
	if err := dm.Start(ctx); err != nil {
		return d.withoutEngine(ctx, err)
	}
	d.daemon = dm
	return nil
}

// withoutEngine leaves out an engine that this kernel has not got, saying so, and serves again.
func (d *demo) withoutEngine(ctx context.Context, cause error) error {
	i := slices.Index(d.o.Engines, aio.EngineIOUring)
	if i < 0 || !errors.Is(cause, aio.ErrNotSupported) {
		return cause
	}
	d.say("no rows for io_uring: %v", cause)
	d.o.Engines = slices.Delete(slices.Clone(d.o.Engines), i, i+1)
	d.rows = nil
	return d.serve(ctx)
}

func (d *demo) work(ctx context.Context) error {
	if d.guest {
		return d.workInGuest(ctx)
	}
	return d.workWithDriver(ctx)
}

// count reads the counters of each row's disk and loop.
func (d *demo) count(ctx context.Context) error {
	s, err := d.daemon.Stats(ctx)
	if err != nil {
		return err
	}
	for i := range d.rows {
		r := &d.rows[i]
		device := s.Disks[d.rowDisk(i)].Exports[0].Device
		engine := s.Loops[i+1].Engines[r.Engine]
		r.Requests = device.Requests
		r.PerSubmission = ratio(engine.Requests, engine.Submissions)
		r.PerNotification = ratio(device.Requests, device.Notifications)
	}
	d.report.Rows = d.rows
	return nil
}

func ratio(a, b uint64) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

func (d *demo) cleanUp() {
	if d.dir != "" {
		_ = os.RemoveAll(d.dir) // what stays behind is a directory of ours below the one that was named
	}
}
