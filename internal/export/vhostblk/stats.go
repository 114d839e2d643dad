// SPDX-License-Identifier: Apache-2.0

package vhostblk

import "context"

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
	Errors        uint64 // requests answered with anything but OK
	Merges        uint64 // merged requests sent to the disk
	Merged        uint64 // requests that went out in them
	MergesFailed  uint64 // merged requests that failed, and whose parts were sent again
	Publishes     uint64 // times that the used index was moved
	Notifications uint64 // times that the guest was called
	Held          uint64 // of these, how many waited for more completions
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
	s.Errors += o.Errors
	s.Merges += o.Merges
	s.Merged += o.Merged
	s.MergesFailed += o.MergesFailed
	s.Publishes += o.Publishes
	s.Notifications += o.Notifications
	s.Held += o.Held
}

// Stats is the sum over the device's queues since it was made.
type Stats struct {
	QueueStats
	Running int // queues started now
}

// Stats asks each running queue on its loop. It may be called from any goroutine but a loop's.
func (d *Device) Stats(ctx context.Context) (Stats, error) {
	running, gone := d.running()
	s := Stats{QueueStats: gone, Running: len(running)}
	for _, q := range running {
		err := q.loop.Call(ctx, func() error {
			s.add(&q.stats)
			return nil
		})
		if err != nil {
			return Stats{}, err
		}
	}
	return s, nil
}

// running answers the queues started now and what those that stopped had counted, as of one moment.
func (d *Device) running() ([]*queue, QueueStats) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var qs []*queue
	for _, q := range d.queues {
		if q != nil {
			qs = append(qs, q)
		}
	}
	return qs, d.gone
}
