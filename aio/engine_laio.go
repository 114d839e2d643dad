// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"fmt"
	"syscall"
	"time"

	"github.com/sluice-blk/sluice/internal/laio"
	"github.com/sluice-blk/sluice/internal/sys"
)

const (
	// laioReapMax is how many completions are taken from the ring at a time; the rest follows at once.
	laioReapMax = 64
	// laioRetryMin and laioRetryMax bound the pause before a submission that met EAGAIN with nothing in flight is tried
	// again: no completion will tell when there is room, and asking all the time would burn the CPU. It doubles.
	laioRetryMin = time.Millisecond
	laioRetryMax = 64 * time.Millisecond
	// laioLook is how often the ring is looked at while a request is in flight that will not signal. Requests of files in
	// memory are done within their submission, so that this is for a kernel that has learned to do otherwise.
	laioLook = time.Millisecond
)

// laioCell is what belongs to one iocb while the kernel or the batch has it.
type laioCell struct {
	r         *Request
	rest      [1]IOVec // the segment that a continued transfer begins with
	submitted int64    // when the kernel took it
}

// laioEngine queues requests for io_submit: one context a loop, shared by all its files.
//
// A request waits in waiting until a cell is free, then in the batch with its iocb prepared, then it is in flight. A
// submission takes the whole batch; what the kernel leaves stays in it, in order, and what waits comes behind it.
type laioEngine struct {
	loop  *Loop
	ctx   *laio.Context
	count EngineCounters

	waiting requestList
	batch   []*laio.IOCB // prepared and not taken by the kernel; a window that moves over store
	store   []*laio.IOCB
	flying  int
	silent  int // of flying, those that signal nobody when they complete

	iocbs []laio.IOCB // as many as the context holds; the index is the cell's and the tag's
	cells []laioCell
	free  []uint32

	// blocked is set when the kernel had no room: a completion or the timer ends it, and until then nothing is tried.
	blocked bool
	retry   *Timer
	pause   time.Duration

	events [laioReapMax]laio.Event
	efd    int
	watch  *Watch
}

func newLaioEngine(l *Loop) (engine, error) {
	n := l.opts.AIOEvents
	ctx, err := laio.New(n, l.opts.seams.laio)
	if err != nil {
		return nil, err
	}
	e := &laioEngine{
		loop: l, ctx: ctx, efd: -1, pause: laioRetryMin,
		iocbs: make([]laio.IOCB, n), cells: make([]laioCell, n), free: make([]uint32, n),
		store: make([]*laio.IOCB, n),
	}
	e.batch = e.store[:0]
	for i := range e.free {
		e.free[i] = uint32(n - 1 - i)
	}
	if err := e.listen(); err != nil {
		e.close()
		return nil, fmt.Errorf("set up the eventfd of Linux AIO: %w", err)
	}
	return e, nil
}

// listen has the loop wake when something completes.
func (e *laioEngine) listen() (err error) {
	if e.efd, err = sys.Eventfd(0, sys.EFD_NONBLOCK|sys.EFD_CLOEXEC); err != nil {
		return err
	}
	e.watch, err = e.loop.Watch(e.efd, EventRead, e)
	return err
}

func (e *laioEngine) kind() EngineKind          { return EngineLinuxAIO }
func (e *laioEngine) attach(*File) error        { return nil }
func (e *laioEngine) detach(*File)              {}
func (e *laioEngine) queued() int               { return e.waiting.n + len(e.batch) }
func (e *laioEngine) inflight() int             { return e.flying }
func (e *laioEngine) counters() *EngineCounters { return &e.count }

// enqueue takes a request. The one that takes the last free cell sends the batch off: nothing could join it, and the
// kernel may as well begin.
func (e *laioEngine) enqueue(r *Request) {
	if !asynchronousInAIO(r) {
		e.loop.offload(r)
		return
	}
	if e.waiting.n > 0 || len(e.free) == 0 {
		e.waiting.push(r)
		return
	}
	e.prepare(r)
	if len(e.free) == 0 {
		e.flush()
	}
}

// asynchronousInAIO tells whether the next step of r has an opcode that its file takes.
func asynchronousInAIO(r *Request) bool {
	switch {
	case r.Op == OpDiscard, r.Op == OpWriteZeroes:
		return false
	case r.Op == OpFlush, r.stage == stageSync:
		return !r.file.noFDSYNC
	}
	return true
}

// prepare puts r into the batch. A cell is free.
func (e *laioEngine) prepare(r *Request) {
	i := e.free[len(e.free)-1]
	e.free = e.free[:len(e.free)-1]
	e.cells[i].r = r
	cb := &e.iocbs[i]
	e.describe(cb, &e.cells[i])
	laio.Tag(cb, uint64(i))
	if !r.file.inMemory || cb.LioOpcode == sys.IOCB_CMD_FDSYNC {
		laio.Signal(cb, e.efd)
	}
	if len(e.batch) == cap(e.batch) || len(e.batch) == 0 {
		// The window has come to the end of its store; what is left of it moves to the beginning.
		e.batch = e.store[:copy(e.store, e.batch)]
	}
	e.batch = append(e.batch, cb)
}

// describe fills in the iocb for the next step of the cell's request.
func (e *laioEngine) describe(cb *laio.IOCB, c *laioCell) {
	r := c.r
	fd, offset := r.file.fd, r.Offset+r.moved
	next := nextStep(r)
	if next == stepSync {
		laio.PrepFdsync(cb, fd)
		return
	}
	vs := advance(c.rest[:0], r.Mem, r.moved)
	switch {
	case next == stepRead && len(vs) == 1:
		laio.PrepRead(cb, fd, vs[0], offset)
	case next == stepRead:
		laio.PrepReadv(cb, fd, vs, offset)
	case len(vs) == 1:
		laio.PrepWrite(cb, fd, vs[0], offset)
	default:
		laio.PrepWritev(cb, fd, vs, offset)
	}
	if next == stepWriteDurable {
		laio.Durable(cb)
	}
}

// flush submits what the kernel takes. What was done within the submission is taken at once: a file in memory spends no
// eventfd on it, which would cost each request a signal and the loop a turn.
func (e *laioEngine) flush() {
	if e.blocked {
		return
	}
	e.submit()
	for rounds := 0; e.silent > 0 && e.reap() > 0 && e.queued() > 0 && rounds < roundsMax; rounds++ {
		e.submit() // what had no room, and what has to be continued
	}
	e.lookAgain()
}

// lookAgain has the loop look at the ring for as long as something is in flight that will not signal, and try again what
// is queued with nothing in flight that could tell of room.
func (e *laioEngine) lookAgain() {
	if e.silent > 0 || e.flying == 0 && e.queued() > 0 && !e.blocked {
		e.startRetry(laioLook)
	}
}

// submit goes on until the batch is empty or the kernel takes no more. Every round takes a request off the batch, ends
// the loop, or is one of a bounded number that a signal cut short.
func (e *laioEngine) submit() {
	for interrupted := 0; e.fill(); {
		now := e.loop.Tick()
		n, err := e.ctx.Submit(e.batch)
		switch {
		case n > 0:
			e.accepted(n, now)
		case err == syscall.EINTR && interrupted < maxTries:
			interrupted++
		case err == nil, err == syscall.EAGAIN, err == syscall.EINTR:
			e.wait()
			return
		default:
			e.refused(err)
		}
	}
}

// fill moves what waits into the batch as long as there are cells. It tells whether there is anything to submit.
func (e *laioEngine) fill() bool {
	for e.waiting.n > 0 && len(e.free) > 0 {
		e.prepare(e.waiting.pop())
	}
	return len(e.batch) > 0
}

// accepted books the first n of the batch, which the kernel took at the time now.
func (e *laioEngine) accepted(n int, now int64) {
	e.count.Submissions++
	e.count.Requests += uint64(n)
	e.count.Batches.Add(uint64(n))
	e.flying += n
	for _, cb := range e.batch[:n] {
		e.cells[cb.Data].submitted = now
		if silent(cb) {
			e.silent++
		}
	}
	e.batch = e.batch[n:]
	e.pause = laioRetryMin
}

func silent(cb *laio.IOCB) bool { return cb.Flags&sys.IOCB_FLAG_RESFD == 0 }

// refused completes the first request of the batch with the errno that the kernel has for it; the others are innocent.
func (e *laioEngine) refused(err error) {
	i := uint32(e.batch[0].Data)
	e.batch = e.batch[1:]
	res := -int64(syscall.EIO)
	if errno, ok := err.(syscall.Errno); ok {
		res = -int64(errno)
	}
	e.outcome(i, res)
}

// wait notes that the kernel had no room. What is in flight makes room when it completes; with nothing in flight only
// time helps, because the resources are somebody else's.
func (e *laioEngine) wait() {
	e.count.Again++
	e.blocked = true
	if e.flying > 0 {
		return
	}
	e.startRetry(e.pause)
	e.pause = min(2*e.pause, laioRetryMax)
}

func (e *laioEngine) startRetry(d time.Duration) {
	if e.retry == nil {
		e.retry = e.loop.Timer(d, e)
	} else {
		e.retry.Reset(d)
	}
}

// HandleTimer tries again, at the end of the turn. The turn has looked at the ring.
func (e *laioEngine) HandleTimer(*Timer) {
	e.blocked = false
	e.lookAgain()
}

// HandleReady empties the eventfd that woke the loop, and looks once more: what completed since the turn began has
// signalled too, and the loop would sleep over it.
func (e *laioEngine) HandleReady(*Watch, Events) {
	_, _ = sys.EventfdRead(e.efd) // EAGAIN: emptied before
	e.reap()
}

// reap takes completions from the mapped ring.
func (e *laioEngine) reap() int {
	total := 0
	for e.flying > 0 && e.ctx.Ready() {
		n := e.ctx.Reap(e.events[:])
		if n == 0 {
			break
		}
		total += n
		e.flying -= n
		for i := range e.events[:n] {
			if silent(&e.iocbs[e.events[i].Data]) {
				e.silent--
			}
			e.outcome(uint32(e.events[i].Data), e.events[i].Res)
		}
	}
	if total > 0 {
		e.blocked = false
	}
	return total
}

// outcome frees cell i and passes on what the kernel answered for its request.
func (e *laioEngine) outcome(i uint32, res int64) {
	r := e.cells[i].r
	r.times.submitted = e.cells[i].submitted
	e.cells[i].r = nil
	e.free = append(e.free, i)
	if res == -int64(syscall.EINVAL) && (r.Op == OpFlush || r.stage == stageSync) {
		// Told by the file once, remembered for all that follow: it has no asynchronous fdatasync.
		r.file.noFDSYNC = true
		e.count.Resubmits++
		e.loop.offload(r)
		return
	}
	if !e.loop.settle(&e.count, r, res) {
		e.again(r)
	}
}

// again queues what has to go to the kernel once more, before what came later.
func (e *laioEngine) again(r *Request) {
	if asynchronousInAIO(r) {
		e.waiting.pushFront(r)
		return
	}
	e.loop.offload(r)
}

// close gives the context back, and so its share of fs.aio-max-nr.
func (e *laioEngine) close() {
	if e.retry != nil {
		e.retry.Stop()
	}
	_ = e.ctx.Close() // fails only for a context that does not exist
	if e.watch != nil {
		e.watch.Close()
	}
	if e.efd >= 0 {
		_ = sys.Close(e.efd)
		e.efd = -1
	}
}
