// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/uring"
)

// transferMax is the most that one entry of one segment asks for. An entry counts in 32 bits and the kernel moves less
// than 2 GiB at a time; what is beyond is continued as after any short transfer.
const transferMax = 1 << 30

// uringEngine queues on the loop's own ring. An entry is written into the submission queue when the request comes, and
// leaves with the turn's wait: the submission costs no call of its own.
//
// The kernel may keep more requests in flight than there are submission entries; limit bounds them, so that all of them
// can complete at once and still leave a quarter of the completion queue to watches and users' entries. What is beyond
// waits in order.
type uringEngine struct {
	l       *Loop
	p       *uringPoller
	limit   int
	flying  int
	waiting requestList
	leaving []*Request // written to the submission queue since the kernel was last entered
	count   EngineCounters
	one     [1]IOVec // a segment that a short transfer ended in: what is left of it
}

func newUringEngine(l *Loop) (engine, error) {
	p, ok := l.poller.(*uringPoller)
	if !ok {
		return nil, fmt.Errorf("set up engine io_uring: %w (the loop's poller is %s: %s)", ErrNotSupported, l.poller.kind(), l.reason)
	}
	n := int(p.ring.CQEntries())
	e := &uringEngine{l: l, p: p, limit: n - n/4, leaving: make([]*Request, 0, p.ring.SQEntries())}
	p.engine = e
	return e, nil
}

func (e *uringEngine) kind() EngineKind          { return EngineIOUring }
func (e *uringEngine) attach(*File) error        { return nil }
func (e *uringEngine) detach(*File)              {}
func (e *uringEngine) queued() int               { return e.waiting.n }
func (e *uringEngine) inflight() int             { return e.flying }
func (e *uringEngine) counters() *EngineCounters { return &e.count }

// reap has nothing to do: the poller takes all completions of the ring and gives ours to complete.
func (e *uringEngine) reap() int { return 0 }

// close leaves the ring to the poller.
func (e *uringEngine) close() { e.p.engine = nil }

func (e *uringEngine) enqueue(r *Request) {
	if e.waiting.n > 0 || !e.start(r) {
		e.waiting.push(r)
	}
}

// flush fills the submission queue. Inside a turn or a section the entries stay there: the wait, or the section's end,
// hands them over.
func (e *uringEngine) flush() {
	for r := e.waiting.pop(); r != nil; r = e.waiting.pop() {
		if !e.start(r) {
			e.waiting.pushFront(r)
			break
		}
	}
	if !e.l.plugged() {
		e.l.note(e.p.submit())
	}
}

// start writes the entry for the next step of r. It answers false when there is no room.
func (e *uringEngine) start(r *Request) bool {
	if r.file.block && r.stage == stageFirst && (r.Op == OpDiscard || r.Op == OpWriteZeroes) {
		e.l.offload(r) // an ioctl, for which there is no entry
		return true
	}
	if e.flying >= e.limit {
		e.count.Again++
		return false
	}
	sqe := e.p.sqe()
	if sqe == nil {
		e.count.Again++
		return false
	}
	e.prepare(sqe, r)
	s, data := e.p.slots.take(slotRequest)
	s.request = r
	sqe.UserData = data
	e.flying++
	e.p.fresh++
	e.leaving = append(e.leaving, r)
	e.count.Requests++
	return true
}

func (e *uringEngine) prepare(sqe *uring.SQE, r *Request) {
	fd, off := r.file.fd, uint64(r.Offset)
	switch nextStep(r) {
	case stepRead:
		v := advance(e.one[:0], r.Mem, r.moved)
		if off += uint64(r.moved); len(v) == 1 {
			e.prepRead(sqe, r.file, bounded(v[0]), off)
		} else {
			sqe.PrepReadv(fd, v, off, 0)
		}
	case stepWrite:
		e.prepareWrite(sqe, r, 0)
	case stepWriteDurable:
		e.prepareWrite(sqe, r, uring.RWF_DSYNC)
	case stepSync:
		sqe.PrepFsync(fd, uring.IORING_FSYNC_DATASYNC)
	default:
		sqe.PrepFallocate(fd, fallocMode(r), off, uint64(r.Length))
	}
}

// prepareWrite takes one segment without a vector, which costs the kernel a fifth less. That entry, too, takes the flags
// of preadv2(2).
func (e *uringEngine) prepareWrite(sqe *uring.SQE, r *Request, rwFlags uint32) {
	v := advance(e.one[:0], r.Mem, r.moved)
	off := uint64(r.Offset + r.moved)
	if len(v) != 1 {
		sqe.PrepWritev(r.file.fd, v, off, rwFlags)
		return
	}
	e.prepWrite(sqe, r.file, bounded(v[0]), off)
	sqe.OpFlags = rwFlags
}

func bounded(v IOVec) IOVec {
	v.Len = min(v.Len, transferMax)
	return v
}

// handOver notes what the kernel is about to get. It may take only a part of it now, for want of resources; the rest counts
// as handed over all the same.
func (e *uringEngine) handOver() {
	now := e.l.Tick()
	for _, r := range e.leaving {
		r.times.submitted = now
	}
	clear(e.leaving)
	e.leaving = e.leaving[:0]
}

// complete takes what the kernel answered. The poller calls it while it takes completions.
func (e *uringEngine) complete(r *Request, res int64) {
	e.flying--
	if res == -int64(syscall.EOPNOTSUPP) && r.Op == OpWriteZeroes && r.stage == stageFirst {
		e.l.offload(r) // the threads know other ways to zeros
		return
	}
	if !e.l.settle(&e.count, r, res) {
		e.waiting.push(r)
	}
}
