// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"context"
	"errors"

	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/trace"
)

// SetTrace has every queue, also one that starts later, note its requests in the buffer of its loop; buffers has one for
// each of the device's loops, nil ends it. When it returns no queue touches a buffer of before. name is what the trace
// calls the disk, export the way to it. It may be called from any goroutine but a loop's.
func (d *Device) SetTrace(ctx context.Context, name, export string, buffers []*trace.Buffer) error {
	d.mu.Lock()
	d.traces, d.traceName, d.traceExport = buffers, name, export
	for _, q := range d.queues {
		if q != nil {
			d.postTrace(q)
		}
	}
	d.mu.Unlock()
	var errs []error
	for _, l := range d.opts.Loops {
		errs = append(errs, l.Call(ctx, func() error { return nil })) // after what was posted
	}
	return errors.Join(errs...)
}

// postTrace has the queue trace, or stop it, as the device says now. The caller holds the lock, so that the last word is
// the last one posted.
func (d *Device) postTrace(q *queue) {
	var buffer *trace.Buffer
	at := d.loopOf(q.index)
	if d.traces != nil {
		buffer = d.traces[at]
	}
	source := &trace.Queue{Disk: d.traceName, Export: d.traceExport, Index: q.index, Loop: q.loop.Name()}
	q.loop.Post(func() { q.trace, q.source = buffer, source })
}

// note puts the requests of a list that were published together into the trace.
func (q *queue) note(first *slot, completed, published int64) {
	for s := first; s != nil; s = s.next {
		e := q.trace.Add()
		*e = trace.Event{
			Queue: q.source, Found: s.found, Popped: s.popped, Completed: max(completed, s.popped), Published: published,
			Offset: s.offset, Length: s.length, Kind: kindOf(s.kind), Status: uint8(s.code),
		}
		if queued, submitted := s.req.Times(); submitted >= s.popped {
			e.Queued, e.Submitted, e.Completed = queued, submitted, max(completed, submitted)
		}
	}
}

func kindOf(t virtioblk.RequestType) trace.Kind {
	switch t {
	case virtioblk.TypeIn:
		return trace.KindRead
	case virtioblk.TypeOut:
		return trace.KindWrite
	case virtioblk.TypeFlush:
		return trace.KindFlush
	case virtioblk.TypeDiscard, virtioblk.TypeWriteZeroes:
		return trace.KindDiscard
	}
	return trace.KindOther
}
