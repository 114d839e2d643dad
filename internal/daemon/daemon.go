// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-blk/sluice/aio"
)

// Daemon serves the disks of one configuration. New, Start and Stop are called in this order, once each; everything else
// is safe for concurrent use.
type Daemon struct {
	config Config
	log    *slog.Logger
	quiet  *slog.Logger // for what clients cause
	failed chan error

	mu      sync.Mutex
	state   state
	loops   *Loops
	disks   []*Disk
	exports []*export
	control *Socket // nil: none
	started time.Time
	tracer  tracer
	undo    []func() error // takes down what Start made, last first

	lost atomic.Bool // a loop has died: nothing that was on it can be waited for

	socketsMu sync.Mutex // apart from mu, which Stop holds while it waits
	sockets   []*Socket

	// before is asked before each step of Start. It is there for tests, which make the n-th step fail.
	before func(step string) error
}

type state uint8

const (
	stateNew state = iota
	stateStarted
	stateStopped
)

// New checks the configuration and opens nothing.
func New(c Config) (*Daemon, error) {
	if len(c.Loops) == 0 {
		c.Loops = []LoopConfig{{}}
	}
	if err := c.Validate(); err != nil {
		return nil, err
	}
	d := &Daemon{config: c, log: c.Logger, failed: make(chan error, 1)}
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	d.quiet = slog.New(newQuietHandler(d.log.Handler(), time.Now))
	return d, nil
}

// Start opens everything and answers when clients can connect. After an error nothing is left open; listeners that the
// configuration handed in are closed, too. When ctx ends before that, its cause is the error.
func (d *Daemon) Start(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state != stateNew {
		return errors.New("start daemon: it has been started before")
	}
	d.state = stateStarted
	d.adoptListeners()
	err := d.startLoops(ctx)
	for i := 0; err == nil && i < len(d.config.Disks); i++ {
		err = d.startDisk(ctx, &d.config.Disks[i])
	}
	if err == nil {
		err = d.listenControl(ctx)
	}
	if err == nil {
		err = d.traceFromStart(ctx)
	}
	if err == nil {
		err = d.startServers(ctx)
	}
	if err == nil {
		d.serveControl()
	}
	if err != nil {
		d.state = stateStopped
		return errors.Join(err, d.takeDown())
	}
	return nil
}

// step is asked before each thing that Start opens.
func (d *Daemon) step(ctx context.Context, name string) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%s: %w", name, context.Cause(ctx))
	}
	if d.before != nil {
		return d.before(name)
	}
	return nil
}

func (d *Daemon) takeDown() error {
	if d.lost.Load() {
		d.Abandon()
		return nil // Failed has told; what waits for the dead loop would wait for ever
	}
	var errs []error
	for i := len(d.undo) - 1; i >= 0; i-- {
		errs = append(errs, d.undo[i]())
	}
	d.undo = nil
	return errors.Join(errs...)
}

// adoptListeners makes the listeners of the configuration ours before anything can fail.
func (d *Daemon) adoptListeners() {
	for i := range d.config.Disks {
		for _, e := range d.config.Disks[i].Exports {
			if e.Listener != nil {
				d.undo = append(d.undo, e.Listener.Close)
			}
		}
	}
}

func (d *Daemon) startLoops(ctx context.Context) error {
	if err := d.step(ctx, "start loops"); err != nil {
		return err
	}
	loops, err := StartLoops(ctx, d.config.Loops)
	if err != nil {
		return err
	}
	d.loops = loops
	d.undo = append(d.undo, func() error { loops.Stop(); return nil })
	for i, l := range loops.All() {
		kind, reason := l.Poller()
		attrs := []any{"loop", i, "poller", kind.String(), "why", reason}
		if c := d.config.Loops[i]; c.Pin {
			attrs = append(attrs, "cpu", c.CPU)
		}
		d.log.Info("loop runs", attrs...)
	}
	return nil
}

func (d *Daemon) startDisk(ctx context.Context, c *DiskConfig) error {
	if err := d.step(ctx, "open disk "+c.Name()); err != nil {
		return err
	}
	all := d.loops.All()
	used, loopOf := c.place(len(all))
	loops := make([]*aio.Loop, len(used))
	for i, l := range used {
		loops[i] = all[l]
	}
	disk, err := openDisk(ctx, c, loops, len(d.disks))
	if err != nil {
		return err
	}
	where := c.placement(len(all))
	if len(disk.loops) < len(loops) { // it must be on one, and is on the one that was its turn
		used = []int{used[slices.Index(loops, disk.loops[0])]}
		clear(loopOf)
		where = single(len(loopOf), used[0])
	}
	disk.loopOf = loopOf
	d.disks = append(d.disks, disk)
	d.undo = append(d.undo, func() error { return disk.Close(context.Background()) })
	disk.describe(d.log)
	disk.warn(d.log)
	disk.watch(d.log)
	d.log.Info("queues are placed", "disk", disk.Name(), "queues", len(loopOf), "where", where, "merge", !c.NoMerge)
	for i := range c.Exports {
		if err := d.startExport(ctx, disk, &c.Exports[i]); err != nil {
			return err
		}
	}
	return nil
}

func (d *Daemon) startExport(ctx context.Context, disk *Disk, c *ExportConfig) error {
	if err := d.step(ctx, "listen on "+c.name()); err != nil {
		return err
	}
	e := &export{disk: disk, name: c.name(), listener: c.Listener, log: d.quiet.With("disk", disk.Name(), "export", c.name())}
	if e.listener == nil {
		s, err := ListenUnix(c.Socket)
		if err != nil {
			return fmt.Errorf("export disk %s: %w", disk.Name(), err)
		}
		e.listener = s
		d.adoptSocket(s)
	}
	if err := d.step(ctx, "make device of "+c.name()); err != nil {
		return err
	}
	if err := e.makeDevice(); err != nil {
		return fmt.Errorf("export disk %s: %w", disk.Name(), err)
	}
	d.exports = append(d.exports, e)
	d.undo = append(d.undo, e.closeDevice)
	return nil
}

// adoptSocket has the socket closed at the end, and its file removed whatever the end is.
func (d *Daemon) adoptSocket(s *Socket) {
	d.undo = append(d.undo, s.Close)
	d.socketsMu.Lock()
	defer d.socketsMu.Unlock()
	d.sockets = append(d.sockets, s)
}

// startServers begins to serve when everything is open, so that no guest gets a disk of a daemon that fails to start.
func (d *Daemon) startServers(ctx context.Context) error {
	if err := d.step(ctx, "serve"); err != nil {
		return err
	}
	serve, cancel := context.WithCancel(context.Background())
	var serving, watching sync.WaitGroup
	left := make(chan struct{}, len(d.exports))
	for _, e := range d.exports {
		serving.Go(func() {
			e.serve(serve)
			left <- struct{}{}
		})
	}
	watching.Go(func() { d.watch(serve, left) })
	d.undo = append(d.undo, func() error {
		cancel()
		serving.Wait()
		watching.Wait()
		d.report() // all that was in flight has been answered
		return nil
	})
	return nil
}

// watch tells by Failed when there is nothing left that could serve.
func (d *Daemon) watch(serve context.Context, left <-chan struct{}) {
	for n := len(d.exports); ; {
		select {
		case <-serve.Done():
			return
		case err := <-d.loops.Died():
			d.lost.Store(true)
			d.failed <- fmt.Errorf("serve: %w", errors.Join(err, errLoopDied))
			return
		case <-left:
			if n--; n == 0 && serve.Err() == nil {
				d.failed <- errors.New("serve: every export has ended")
				return
			}
		}
	}
}

// errLoopDied marks the one failure after which nothing can be drained: what was in flight on that loop is lost.
var errLoopDied = errors.New("requests in flight are lost")

// Failed gives one error when the daemon can serve no more: a loop has ended by itself, or every export has.
func (d *Daemon) Failed() <-chan error { return d.failed }

// Abandon removes the socket files and waits for nothing. It is for a process that is about to exit.
func (d *Daemon) Abandon() {
	d.socketsMu.Lock()
	defer d.socketsMu.Unlock()
	for _, s := range d.sockets {
		s.Unlink()
	}
}

// Stop lets every client's requests in flight finish, then closes sockets, disks and loops. It answers nil when the
// daemon does not run. After a loop has died it removes the socket files and waits for nothing. When ctx ends first, it answers the cause and goes on in the background.
func (d *Daemon) Stop(ctx context.Context) error {
	done := make(chan error, 1)
	go func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.state != stateStarted {
			d.state = stateStopped
			done <- nil
			return
		}
		d.state = stateStopped
		done <- d.takeDown()
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("stop daemon: %w", context.Cause(ctx))
	}
}
