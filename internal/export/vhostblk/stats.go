// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"context"
	"slices"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/hist"
)

// QueueStats counts what a queue did. Each is written on the queue's loop alone.
type QueueStats struct {
	Kicks         uint64 // times that the guest rang
	Batches       uint64 // times that the ring was looked at and held something
	Requests      uint64 // chains taken from the ring
	Reads         uint64
	Writes        uint64
	Flushes       uint64
	Discards      uint64 // and writes of zeroes
	BytesRead     uint64
	BytesWritten  uint64
	ReadNanos     uint64 // of all reads together, from StageRing's beginning to completion
	WriteNanos    uint64
	FlushNanos    uint64
	Errors        uint64 // requests answered with anything but OK
	Merges        uint64 // merged requests sent to the disk
	Merged        uint64 // requests that went out in them
	MergesFailed  uint64 // merged requests that failed, and whose parts were sent again
	Publishes     uint64 // times that the used index was moved
	Notifications uint64 // times that the guest was called
	Held          uint64 // of these, how many waited for more completions

	PerBatch        hist.Sizes // requests taken at a time
	PerPublish      hist.Sizes // requests published at a time
	PerNotification hist.Sizes // requests published since the last call of the guest, at each
}

func (s *QueueStats) add(o *QueueStats) {
	s.Kicks += o.Kicks
	s.Batches += o.Batches
	s.Requests += o.Requests
	s.Reads += o.Reads
	s.Writes += o.Writes
	s.Flushes += o.Flushes
	s.Discards += o.Discards
	s.BytesRead += o.BytesRead
	s.BytesWritten += o.BytesWritten
	s.ReadNanos += o.ReadNanos
	s.WriteNanos += o.WriteNanos
	s.FlushNanos += o.FlushNanos
	s.Errors += o.Errors
	s.Merges += o.Merges
	s.Merged += o.Merged
	s.MergesFailed += o.MergesFailed
	s.Publishes += o.Publishes
	s.Notifications += o.Notifications
	s.Held += o.Held
	s.PerBatch.Merge(&o.PerBatch)
	s.PerPublish.Merge(&o.PerPublish)
	s.PerNotification.Merge(&o.PerNotification)
}

// Stats is the sum over the device's queues since it was made.
type Stats struct {
	QueueStats
	Running int // queues started now
}

// QueueView is what one queue counted since the device was made, over all the times that it ran.
type QueueView struct {
	Index   int
	Loop    string // the name of the loop that it runs on
	Running bool
	QueueStats
	Stages Stages
}

// Stats is the sum over all queues, without the stages. It may be called from any goroutine but a loop's.
func (d *Device) Stats(ctx context.Context) (Stats, error) {
	var s Stats
	for _, on := range d.recordsByLoop() {
		part := new(Stats) // its own, since the call may run after ctx has ended
		err := on.loop.Call(ctx, func() error {
			for _, r := range on.records {
				part.add(&r.QueueStats)
			}
			return nil
		})
		if err != nil {
			return Stats{}, err
		}
		s.add(&part.QueueStats)
		s.Running += on.running
	}
	return s, nil
}

// Views appends what each queue that was ever started counted to into, whose memory is used again. Each loop makes the
// copies of its queues in one piece, which keeps it busy for some microseconds a queue. After an error into is lost. It
// may be called from any goroutine but a loop's.
func (d *Device) Views(ctx context.Context, into []QueueView) ([]QueueView, error) {
	for _, on := range d.recordsByLoop() {
		first := len(into)
		for range on.records {
			into = append(into, QueueView{})
		}
		part := into[first:]
		err := on.loop.Call(ctx, func() error {
			for i, r := range on.records {
				part[i].QueueStats, part[i].Stages = r.QueueStats, r.stages
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		for i, r := range on.records {
			part[i].Index, part[i].Loop, part[i].Running = r.index, on.loop.Name(), on.started[i]
		}
	}
	return into, nil
}

// loopRecords are the records that one loop writes.
type loopRecords struct {
	loop    *aio.Loop
	records []*record
	started []bool // which of them run now
	running int    // how many do
}

// recordsByLoop answers all records that there are, as of one moment.
func (d *Device) recordsByLoop() []loopRecords {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := make([]loopRecords, len(d.opts.Loops))
	for i := range list {
		list[i].loop = d.opts.Loops[i]
	}
	for i, r := range d.records {
		if r == nil {
			continue
		}
		on := &list[d.loopOf(i)]
		on.records = append(on.records, r)
		on.started = append(on.started, d.queues[i] != nil)
		if d.queues[i] != nil {
			on.running++
		}
	}
	return slices.DeleteFunc(list, func(on loopRecords) bool { return len(on.records) == 0 })
}

// running answers the queues started now.
func (d *Device) running() []*queue {
	d.mu.Lock()
	defer d.mu.Unlock()
	var qs []*queue
	for _, q := range d.queues {
		if q != nil {
			qs = append(qs, q)
		}
	}
	return qs
}
