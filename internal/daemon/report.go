// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/export/vhostblk"
	"github.com/sluice-blk/sluice/internal/hist"
)

// StatsArgs are the arguments of the command "stats".
type StatsArgs struct {
	Disk string `json:"disk,omitempty"` // only this one; empty: all
}

// Report is the answer to "stats": what was counted since the daemon started. Fields are added to it and never change
// their meaning. Times are nanoseconds.
type Report struct {
	PID         int          `json:"pid"`
	UptimeNanos int64        `json:"uptime_ns"`
	Loops       []LoopReport `json:"loops"`
	Disks       []DiskReport `json:"disks"`
}

// LoopReport is what one loop counted.
type LoopReport struct {
	Name      string         `json:"name"`
	Poller    string         `json:"poller"`
	Turns     uint64         `json:"turns"`
	SysCalls  uint64         `json:"syscalls"`
	Sleeps    uint64         `json:"sleeps"`
	Polls     uint64         `json:"polls"`
	PollHits  uint64         `json:"poll_hits"`
	PollNanos uint64         `json:"poll_ns"`
	Polled    uint64         `json:"polled"`
	Yields    uint64         `json:"yields"`
	Wakeups   uint64         `json:"wakeups"`
	Posted    uint64         `json:"posted"`
	Timers    uint64         `json:"timers"`
	Ready     uint64         `json:"ready"`
	Engines   []EngineReport `json:"engines"` // those that were used
}

// EngineReport is what one engine of a loop counted. It serves all disks of the loop together.
type EngineReport struct {
	Name          string       `json:"name"`
	Requests      uint64       `json:"requests"`
	Submissions   uint64       `json:"submissions"`
	Resubmits     uint64       `json:"resubmits"`
	Again         uint64       `json:"again"`
	Errors        uint64       `json:"errors"`
	PerSubmission *SizesReport `json:"per_submission"`
}

// DiskReport is what one disk counted.
type DiskReport struct {
	Name    string         `json:"name"`
	Engine  string         `json:"engine"`
	Block   BlockReport    `json:"block"`
	Image   *ImageReport   `json:"image,omitempty"` // of a disk in an image format
	Exports []ExportReport `json:"exports"`
}

// BlockReport is what passed the disk's door, whoever sent it.
type BlockReport struct {
	Reads          uint64 `json:"reads"`
	Writes         uint64 `json:"writes"`
	Flushes        uint64 `json:"flushes"`
	Discards       uint64 `json:"discards"`
	WriteZeroes    uint64 `json:"write_zeroes"`
	ReadBytes      uint64 `json:"read_bytes"`
	WriteBytes     uint64 `json:"write_bytes"`
	Errors         uint64 `json:"errors"`
	Refused        uint64 `json:"refused"`
	Bounced        uint64 `json:"bounced"`
	Merged         uint64 `json:"merged_blocks"`
	Split          uint64 `json:"split"`
	EmulatedFUA    uint64 `json:"emulated_fua"`
	EmulatedZeroes uint64 `json:"emulated_zeroes"`
	Waited         uint64 `json:"waited"`
	Held           uint64 `json:"held"`
}

// ExportReport is what one export counted.
type ExportReport struct {
	Name     string        `json:"name"`
	Sessions uint64        `json:"sessions"`
	Broken   uint64        `json:"broken"`
	Queues   []QueueReport `json:"queues"` // those that were ever started
}

// QueueReport is what one queue counted, over all guests that used it.
type QueueReport struct {
	Index           int                      `json:"index"`
	Loop            string                   `json:"loop"`
	Running         bool                     `json:"running"`
	Kicks           uint64                   `json:"kicks"`
	Batches         uint64                   `json:"batches"`
	Requests        uint64                   `json:"requests"`
	Reads           uint64                   `json:"reads"`
	Writes          uint64                   `json:"writes"`
	Flushes         uint64                   `json:"flushes"`
	Discards        uint64                   `json:"discards"`
	ReadBytes       uint64                   `json:"read_bytes"`
	WriteBytes      uint64                   `json:"write_bytes"`
	ReadNanos       uint64                   `json:"read_ns"`
	WriteNanos      uint64                   `json:"write_ns"`
	FlushNanos      uint64                   `json:"flush_ns"`
	Errors          uint64                   `json:"errors"`
	Merges          uint64                   `json:"merges"`
	Merged          uint64                   `json:"merged"`
	MergesFailed    uint64                   `json:"merges_failed"`
	Publishes       uint64                   `json:"publishes"`
	Notifications   uint64                   `json:"notifications"`
	Held            uint64                   `json:"notifications_held"`
	PerBatch        *SizesReport             `json:"per_batch"`
	PerPublish      *SizesReport             `json:"per_publish"`
	PerNotification *SizesReport             `json:"per_notification"`
	Stages          map[string]LatencyReport `json:"stages"` // by name, see vhostblk.Stage
}

// LatencyReport sums up a histogram, and gives its steps so that reports can be added and subtracted.
type LatencyReport struct {
	Count   uint64       `json:"count"`
	Sum     uint64       `json:"sum_ns"`
	Min     uint64       `json:"min_ns"`
	Max     uint64       `json:"max_ns"`
	Mean    uint64       `json:"mean_ns"`
	P50     uint64       `json:"p50_ns"`
	P90     uint64       `json:"p90_ns"`
	P99     uint64       `json:"p99_ns"`
	P999    uint64       `json:"p999_ns"`
	P9999   uint64       `json:"p9999_ns"`
	Buckets hist.Buckets `json:"buckets"`
}

// SizesReport sums up a histogram of batch sizes; each step begins with the size that it names.
type SizesReport struct {
	Count   uint64       `json:"count"`
	Sum     uint64       `json:"sum"`
	Mean    float64      `json:"mean"`
	Buckets hist.Buckets `json:"buckets"`
}

// Latency reports a histogram.
func Latency(h *hist.Hist) LatencyReport {
	return LatencyReport{
		Count: h.Count(), Sum: h.Sum(), Min: h.Min(), Max: h.Max(), Mean: h.Mean(), P50: h.Percentile(50), P90: h.Percentile(90),
		P99: h.Percentile(99), P999: h.Percentile(99.9), P9999: h.Percentile(99.99), Buckets: h.Buckets(make(hist.Buckets, 0, 64)),
	}
}

// Hist is the histogram that was reported.
func (r *LatencyReport) Hist() hist.Hist { return hist.Restore(r.Buckets, r.Sum, r.Min, r.Max) }

func sizes(s *hist.Sizes) *SizesReport {
	return &SizesReport{Count: s.Count(), Sum: s.Sum(), Mean: s.Mean(), Buckets: s.Buckets(make(hist.Buckets, 0, 8))}
}

// observe makes the report. It is for between serveControl and its end.
func (d *Daemon) observe(ctx context.Context, args *StatsArgs) (*Report, error) {
	r := &Report{PID: os.Getpid(), UptimeNanos: int64(time.Since(d.started)), Loops: []LoopReport{}, Disks: []DiskReport{}}
	for _, l := range d.loops.All() {
		one, err := loopReport(ctx, l)
		if err != nil {
			return nil, err
		}
		r.Loops = append(r.Loops, one)
	}
	for _, disk := range d.disks {
		if args.Disk != "" && args.Disk != disk.Name() {
			continue
		}
		one, err := d.diskReport(ctx, disk)
		if err != nil {
			return nil, err
		}
		r.Disks = append(r.Disks, one)
	}
	if args.Disk != "" && len(r.Disks) == 0 {
		return nil, fmt.Errorf("there is no disk %q (status names them)", args.Disk)
	}
	return r, nil
}

func loopReport(ctx context.Context, l *aio.Loop) (LoopReport, error) {
	s := new(aio.Stats) // its own, since the call may run after ctx has ended
	if err := l.Call(ctx, func() error { *s = l.Stats(); return nil }); err != nil {
		return LoopReport{}, fmt.Errorf("ask %s: %w", l.Name(), err)
	}
	c := &s.Counters
	r := LoopReport{
		Name: l.Name(), Poller: s.Poller.String(), Turns: c.Turns, SysCalls: c.SysCalls, Sleeps: c.Sleeps, Polls: c.Polls,
		PollHits: c.PollHits, PollNanos: c.PollNanos, Polled: c.Polled, Yields: c.Yields, Wakeups: c.Wakeups, Posted: c.Posted,
		Timers: c.Timers, Ready: c.Ready, Engines: []EngineReport{},
	}
	for kind := range s.Engines {
		e := &s.Engines[kind]
		if e.Requests == 0 {
			continue
		}
		r.Engines = append(r.Engines, EngineReport{
			Name: aio.EngineKind(kind).String(), Requests: e.Requests, Submissions: e.Submissions, Resubmits: e.Resubmits,
			Again: e.Again, Errors: e.Errors, PerSubmission: sizes(&e.Batches),
		})
	}
	return r, nil
}

func (d *Daemon) diskReport(ctx context.Context, disk *Disk) (DiskReport, error) {
	s, err := disk.stats(ctx)
	if err != nil {
		return DiskReport{}, err
	}
	r := DiskReport{Name: s.Name, Engine: s.Info.Engine, Block: blockReport(&s.Block), Exports: []ExportReport{}}
	if r.Image, err = disk.imageReport(ctx); err != nil {
		return DiskReport{}, err
	}
	for _, e := range d.exports {
		if e.disk != disk {
			continue
		}
		one := ExportReport{Name: e.name, Sessions: e.sessions.Sessions.Load(), Broken: e.sessions.Broken.Load(), Queues: []QueueReport{}}
		views, err := e.device.Views(ctx, nil)
		if err != nil {
			return DiskReport{}, fmt.Errorf("ask %s: %w", e.name, err)
		}
		for i := range views {
			one.Queues = append(one.Queues, queueReport(&views[i]))
		}
		r.Exports = append(r.Exports, one)
	}
	return r, nil
}

func blockReport(c *block.Counters) BlockReport {
	return BlockReport{
		Reads: c.Reads, Writes: c.Writes, Flushes: c.Flushes, Discards: c.Discards, WriteZeroes: c.WriteZeroes, ReadBytes: c.ReadBytes,
		WriteBytes: c.WriteBytes, Errors: c.Errors, Refused: c.Refused, Bounced: c.Bounced, Merged: c.Merged, Split: c.Split,
		EmulatedFUA: c.EmulatedFUA, EmulatedZeroes: c.EmulatedZeroes, Waited: c.Waited, Held: c.Held,
	}
}

func queueReport(v *vhostblk.QueueView) QueueReport {
	r := QueueReport{
		Index: v.Index, Loop: v.Loop, Running: v.Running, Kicks: v.Kicks, Batches: v.Batches, Requests: v.Requests, Reads: v.Reads,
		Writes: v.Writes, Flushes: v.Flushes, Discards: v.Discards, ReadBytes: v.BytesRead, WriteBytes: v.BytesWritten,
		ReadNanos: v.ReadNanos, WriteNanos: v.WriteNanos, FlushNanos: v.FlushNanos, Errors: v.Errors, Merges: v.Merges,
		Merged: v.Merged, MergesFailed: v.MergesFailed, Publishes: v.Publishes, Notifications: v.Notifications, Held: v.Held,
		PerBatch: sizes(&v.PerBatch), PerPublish: sizes(&v.PerPublish), PerNotification: sizes(&v.PerNotification),
		Stages: make(map[string]LatencyReport, vhostblk.StageCount),
	}
	for s := range vhostblk.StageCount {
		r.Stages[s.String()] = Latency(&v.Stages[s])
	}
	return r
}

// Status is the answer to "status": what is served, by what.
type Status struct {
	PID         int          `json:"pid"`
	UptimeNanos int64        `json:"uptime_ns"`
	Loops       []LoopStatus `json:"loops"`
	Disks       []DiskStatus `json:"disks"`
}

// LoopStatus is one loop.
type LoopStatus struct {
	Name   string `json:"name"`
	Poller string `json:"poller"`
	Why    string `json:"why"`
}

// DiskStatus is one disk.
type DiskStatus struct {
	Name       string         `json:"name"`
	Size       int64          `json:"size"`
	ReadOnly   bool           `json:"read_only"`
	Cache      string         `json:"cache"`
	Engine     string         `json:"engine"`
	Durability string         `json:"durability"`
	Exports    []ExportStatus `json:"exports"`
}

// ExportStatus is one export.
type ExportStatus struct {
	Name     string `json:"name"`
	Sessions uint64 `json:"sessions"` // front-ends that were served
	Queues   int    `json:"queues"`   // offered
	Running  int    `json:"running"`  // of these, started by a guest now
}

func (d *Daemon) status(ctx context.Context) (*Status, error) {
	s := &Status{PID: os.Getpid(), UptimeNanos: int64(time.Since(d.started)), Loops: []LoopStatus{}, Disks: []DiskStatus{}}
	for _, l := range d.loops.All() {
		kind, why := l.Poller()
		s.Loops = append(s.Loops, LoopStatus{l.Name(), kind.String(), why})
	}
	for _, disk := range d.disks {
		i := disk.handle.Info()
		one := DiskStatus{Name: disk.Name(), Size: i.Size, ReadOnly: i.ReadOnly, Cache: disk.config.Cache.String(), Engine: i.Engine,
			Durability: i.Durability, Exports: []ExportStatus{}}
		for _, e := range d.exports {
			if e.disk != disk {
				continue
			}
			stats, err := e.device.Stats(ctx)
			if err != nil {
				return nil, fmt.Errorf("ask %s: %w", e.name, err)
			}
			one.Exports = append(one.Exports, ExportStatus{e.name, e.sessions.Sessions.Load(), e.device.NumQueues(), stats.Running})
		}
		s.Disks = append(s.Disks, one)
	}
	return s, nil
}
