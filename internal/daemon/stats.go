// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/export/vhostblk"
)

// Stats are the counters of a daemon, each part taken at its own moment.
type Stats struct {
	Loops []aio.Stats // in the order of Config.Loops
	Disks []DiskStats // in the order of Config.Disks
}

// DiskStats are the counters of one disk.
type DiskStats struct {
	Name    string
	Info    block.Info
	Block   block.Counters // what passed the disk's door
	Exports []ExportStats  // in the order of DiskConfig.Exports
}

// ExportStats are the counters of one export.
type ExportStats struct {
	Name     string
	Device   vhostblk.Stats
	Sessions uint64 // front-ends that were served
	Broken   uint64 // of these, sessions that ended with an error
}

// Stats asks every loop and disk. It is for a daemon between Start and Stop; before and after it answers an error.
func (d *Daemon) Stats(ctx context.Context) (Stats, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state != stateStarted {
		return Stats{}, fmt.Errorf("read the counters: the daemon does not run")
	}
	return d.count(ctx)
}

// Report is what the control command "stats" answers, for whoever has the daemon at hand. It is for a daemon between Start
// and Stop; before and after it answers an error.
func (d *Daemon) Report(ctx context.Context, args *StatsArgs) (*Report, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state != stateStarted {
		return nil, fmt.Errorf("read the counters: the daemon does not run")
	}
	return d.observe(ctx, args)
}

// count is Stats for whoever holds the lock.
func (d *Daemon) count(ctx context.Context) (Stats, error) {
	var s Stats
	for _, l := range d.loops.All() {
		s.Loops = append(s.Loops, l.Stats())
	}
	for _, disk := range d.disks {
		one, err := disk.stats(ctx)
		if err != nil {
			return Stats{}, err
		}
		for _, e := range d.exports {
			if e.disk != disk {
				continue
			}
			es := ExportStats{Name: e.name, Sessions: e.sessions.Sessions.Load(), Broken: e.sessions.Broken.Load()}
			if es.Device, err = e.device.Stats(ctx); err != nil {
				return Stats{}, fmt.Errorf("read the counters of %s: %w", e.name, err)
			}
			one.Exports = append(one.Exports, es)
		}
		s.Disks = append(s.Disks, one)
	}
	return s, nil
}

// reportMax bounds how long a daemon that stops waits for its own counters: they are a service, and a disk that hangs
// must not keep them from being skipped.
const reportMax = 2 * time.Second

// report logs what was done, for each export and each loop, when the daemon is about to stop.
func (d *Daemon) report() {
	if d.lost.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), reportMax)
	defer cancel()
	s, err := d.count(ctx)
	if err != nil {
		d.log.Warn("counters could not be read", "err", err)
		return
	}
	for _, disk := range s.Disks {
		for _, e := range disk.Exports {
			d.log.Info("export served", "disk", disk.Name, "export", e.Name, "sessions", e.Sessions,
				"requests", e.Device.Requests, "errors", e.Device.Errors, "kicks", e.Device.Kicks, "notifications", e.Device.Notifications)
		}
	}
	for i := range s.Loops {
		l := &s.Loops[i]
		var sum aio.EngineCounters
		for k := range l.Engines {
			sum.Requests += l.Engines[k].Requests
			sum.Submissions += l.Engines[k].Submissions
		}
		attrs := []any{"loop", i, "poller", l.Poller.String(), "turns", l.Turns, "syscalls", l.SysCalls,
			"submitted", sum.Requests, "submissions", sum.Submissions}
		if l.Pins != (aio.PinCounters{}) {
			attrs = append(attrs, "fixed_buffers", l.Pins.Fixed, "refused", l.Pins.Refused)
		}
		d.log.Info("loop served", attrs...)
	}
}

// Disks are the open disks, in the order of Config.Disks, between Start and Stop.
func (d *Daemon) Disks() []*Disk {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]*Disk(nil), d.disks...)
}

// Loops are the running loops, in the order of Config.Loops, between Start and Stop.
func (d *Daemon) Loops() []*aio.Loop {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.loops == nil {
		return nil
	}
	return append([]*aio.Loop(nil), d.loops.All()...)
}
