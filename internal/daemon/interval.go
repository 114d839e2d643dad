// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"reflect"

	"github.com/sluice-blk/sluice/internal/export/vhostblk"
	"github.com/sluice-blk/sluice/internal/hist"
)

// Since is the report of the time between old and r: each figure is what was added. Loops, disks and queues that old does
// not know are as they are. UptimeNanos becomes the length of that time. r and old stay as they were.
func (r *Report) Since(old *Report) *Report {
	d := *r
	d.UptimeNanos -= old.UptimeNanos
	d.Loops = append([]LoopReport(nil), r.Loops...)
	for i := range d.Loops {
		if i < len(old.Loops) {
			d.Loops[i].subtract(&old.Loops[i])
		}
	}
	d.Disks = append([]DiskReport(nil), r.Disks...)
	for i := range d.Disks {
		disk := &d.Disks[i]
		disk.Exports = append([]ExportReport(nil), disk.Exports...)
		if before := find(old.Disks, func(o *DiskReport) bool { return o.Name == disk.Name }); before != nil {
			disk.subtract(before)
		}
	}
	return &d
}

func find[T any](list []T, is func(*T) bool) *T {
	for i := range list {
		if is(&list[i]) {
			return &list[i]
		}
	}
	return nil
}

func (l *LoopReport) subtract(old *LoopReport) {
	subtractCounters(l, old)
	l.Engines = append([]EngineReport(nil), l.Engines...)
	for i := range l.Engines {
		e := &l.Engines[i]
		if before := find(old.Engines, func(o *EngineReport) bool { return o.Name == e.Name }); before != nil {
			subtractCounters(e, before)
			e.PerSubmission = e.PerSubmission.since(before.PerSubmission)
		}
	}
}

func (d *DiskReport) subtract(old *DiskReport) {
	subtractCounters(&d.Block, &old.Block)
	if d.Image != nil && old.Image != nil {
		image := *d.Image
		subtractCounters(&image, old.Image)
		d.Image = &image
	}
	for i := range d.Exports {
		e := &d.Exports[i]
		before := find(old.Exports, func(o *ExportReport) bool { return o.Name == e.Name })
		if before == nil {
			continue
		}
		subtractCounters(e, before)
		e.Queues = append([]QueueReport(nil), e.Queues...)
		for k := range e.Queues {
			q := &e.Queues[k]
			if past := find(before.Queues, func(o *QueueReport) bool { return o.Index == q.Index }); past != nil {
				q.subtract(past)
			}
		}
	}
}

func (q *QueueReport) subtract(old *QueueReport) {
	subtractCounters(q, old)
	q.PerBatch = q.PerBatch.since(old.PerBatch)
	q.PerPublish = q.PerPublish.since(old.PerPublish)
	q.PerNotification = q.PerNotification.since(old.PerNotification)
	stages := make(map[string]LatencyReport, vhostblk.StageCount)
	for name, now := range q.Stages {
		before := old.Stages[name]
		h, past := now.Hist(), before.Hist()
		h = h.Since(&past)
		stages[name] = Latency(&h)
	}
	q.Stages = stages
}

// subtractCounters takes the counters of the struct that old points to off those that v points to. Counters are the fields
// of type uint64.
func subtractCounters[T any](v, old *T) {
	a, b := reflect.ValueOf(v).Elem(), reflect.ValueOf(old).Elem()
	for i := range a.NumField() {
		if a.Field(i).Kind() == reflect.Uint64 {
			a.Field(i).SetUint(a.Field(i).Uint() - b.Field(i).Uint())
		}
	}
}

func (s *SizesReport) since(old *SizesReport) *SizesReport {
	if s == nil || old == nil {
		return s
	}
	d := &SizesReport{Count: s.Count - old.Count, Sum: s.Sum - old.Sum, Buckets: hist.Buckets{}}
	if d.Count > 0 {
		d.Mean = float64(d.Sum) / float64(d.Count)
	}
	for _, b := range s.Buckets {
		if past := find(old.Buckets, func(o *hist.Bucket) bool { return o.Low == b.Low }); past != nil {
			b.Count -= past.Count
		}
		if b.Count > 0 {
			d.Buckets = append(d.Buckets, b)
		}
	}
	return d
}
