// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/sluice-blk/sluice/internal/sys"
)

// blockingKernel is the seam between the threads and the system calls that they make, so that tests can have the kernel
// answer as they like. The functions are those of package sys; all may block.
type blockingKernel struct {
	preadv     func(fd int, vs []IOVec, offset int64, flags int) (int, error)
	pwritev    func(fd int, vs []IOVec, offset int64, flags int) (int, error)
	fdatasync  func(fd int) error
	fallocate  func(fd int, mode uint32, offset, length int64) error
	blkDiscard func(fd int, offset, length int64) error
	blkZeroout func(fd int, offset, length int64) error
}

var systemBlockingKernel = blockingKernel{
	preadv: sys.Preadv2, pwritev: sys.Pwritev2, fdatasync: sys.Fdatasync,
	fallocate: sys.Fallocate, blkDiscard: sys.BlkDiscard, blkZeroout: sys.BlkZeroout,
}

// threadsEngine hands requests to a bounded pool of goroutines that make blocking system calls.
//
// The loop queues in waiting and hands the whole queue over once a flush; the workers take one request at a time, make
// one system call for it, and give it back with the result in res. Everything else about a request happens on the loop,
// so that nothing of a file or a request is ever touched from two sides.
//
// Workers are made when there is work and no idle worker, up to the bound, and stay until close. The loop wakes or makes
// one of them; each that finds more work than it takes wakes or makes the next. So a burst costs the loop one wake-up.
type threadsEngine struct {
	loop    *Loop
	kernel  *blockingKernel
	max     int
	count   EngineCounters
	waiting requestList // the loop's
	flying  int         // the loop's: handed over and not reaped

	mu      sync.Mutex
	todo    requestList // guarded by mu
	done    requestList // guarded by mu
	idle    *worker     // those that sleep, the last one first, guarded by mu
	workers int         // guarded by mu
	closing bool        // guarded by mu
	ended   sync.WaitGroup
	nDone   atomic.Int32 // length of done, written under mu, for the loop to look at without it
}

// worker is one goroutine of the pool.
//
// It sleeps in the kernel on a word of its own, and not on a sync.Cond: a goroutine that a loop makes ready is put behind
// the loop in the scheduler's queue of that very thread, which then goes to sleep itself, and another thread has to
// notice. Measured with one request at a time that is 45 microseconds of CPU a request.
type worker struct {
	bell    atomic.Uint32 // 1: rung
	next    *worker       // in the list of the idle, guarded by the engine's mu
	scratch [1]IOVec
}

// ring ends the sleep of a worker that was taken off the list of the idle; nil is nobody.
func (w *worker) ring() {
	if w != nil {
		w.bell.Store(1)
		_, _ = sys.FutexWake(&w.bell, 1) // it cannot fail
	}
}

// sleep ends when the bell has been rung.
func (w *worker) sleep() {
	for w.bell.Load() == 0 {
		_ = sys.FutexWait(&w.bell, 0) // EINTR, EAGAIN: look again
	}
	w.bell.Store(0)
}

func newThreadsEngine(l *Loop) (engine, error) {
	e := &threadsEngine{loop: l, kernel: l.opts.seams.blocking, max: l.opts.Threads}
	if e.kernel == nil {
		e.kernel = &systemBlockingKernel
	}
	return e, nil
}

// offload carries out a request on the loop's threads that its own engine has no way for. Must be called on the loop.
func (l *Loop) offload(r *Request) {
	if l.engines[EngineThreads] == nil {
		l.engines[EngineThreads], _ = newThreadsEngine(l) // it needs nothing that could be refused
	}
	e := l.engines[EngineThreads]
	e.enqueue(r)
	if !l.plugged() {
		e.flush()
	}
}

func (e *threadsEngine) kind() EngineKind          { return EngineThreads }
func (e *threadsEngine) attach(*File) error        { return nil }
func (e *threadsEngine) detach(*File)              {}
func (e *threadsEngine) queued() int               { return e.waiting.n }
func (e *threadsEngine) inflight() int             { return e.flying }
func (e *threadsEngine) counters() *EngineCounters { return &e.count }

// enqueue takes a request. What its next step is depends on what its file has told so far, which is the loop's to know.
func (e *threadsEngine) enqueue(r *Request) {
	r.step = nextStep(r)
	e.waiting.push(r)
}

// flush hands everything over under one taking of the lock.
func (e *threadsEngine) flush() {
	n := e.waiting.n
	if n == 0 {
		return
	}
	e.count.Submissions++
	e.count.Requests += uint64(n)
	e.count.Batches.Add(uint64(n))
	now := e.loop.Tick()
	for r := e.waiting.head; r != nil; r = r.next {
		r.times.submitted = now
	}
	e.flying += n
	e.mu.Lock()
	e.todo.append(&e.waiting)
	w := e.summon()
	e.mu.Unlock()
	w.ring()
}

// summon gets one more worker going if there is work that nobody is on the way to. The caller holds the lock, and rings
// for the one that it is given when it does no longer.
func (e *threadsEngine) summon() *worker {
	switch {
	case e.todo.n == 0:
	case e.idle != nil:
		w := e.idle // off the list here and not by itself, so that nobody summons it twice
		e.idle, w.next = w.next, nil
		return w
	case e.workers < e.max:
		e.workers++
		e.ended.Add(1)
		go e.serve()
	}
	return nil
}

// serve is the life of a worker.
func (e *threadsEngine) serve() {
	defer e.ended.Done()
	w := &worker{}
	for r := e.take(w); r != nil; r = e.take(w) {
		e.perform(r, w.scratch[:0])
		e.mu.Lock()
		e.done.push(r)
		first := e.nDone.Add(1) == 1
		e.mu.Unlock()
		if first {
			e.loop.wake()
		}
	}
}

// take gives a worker its next request, or nil when there is none any more.
func (e *threadsEngine) take(w *worker) *Request {
	e.mu.Lock()
	for e.todo.n == 0 {
		if e.closing {
			e.mu.Unlock()
			return nil
		}
		e.idle, w.next = w, e.idle
		e.mu.Unlock()
		w.sleep()
		e.mu.Lock()
	}
	r := e.todo.pop()
	other := e.summon()
	e.mu.Unlock()
	other.ring()
	return r
}

// perform makes the system call for the step of r. A call that a signal cut short is made again. scratch has room for one
// segment.
func (e *threadsEngine) perform(r *Request, scratch []IOVec) {
	for {
		r.res = e.call(r, scratch)
		if r.res != -int64(syscall.EINTR) {
			return
		}
	}
}

func (e *threadsEngine) call(r *Request, scratch []IOVec) int64 {
	fd, offset := r.file.fd, r.Offset+r.moved
	switch r.step {
	case stepRead:
		return count(e.kernel.preadv(fd, advance(scratch, r.Mem, r.moved), offset, 0))
	case stepWrite:
		return count(e.kernel.pwritev(fd, advance(scratch, r.Mem, r.moved), offset, 0))
	case stepWriteDurable:
		return count(e.kernel.pwritev(fd, advance(scratch, r.Mem, r.moved), offset, sys.RWF_DSYNC))
	case stepSync:
		return count(0, e.kernel.fdatasync(fd))
	case stepDiscard:
		return count(0, e.discard(r.file, r))
	}
	return count(0, e.zero(r.file, r))
}

// count turns a system call's result into the form in which asynchronous engines get it.
func count(n int, err error) int64 {
	if err == nil {
		return int64(n)
	}
	if errno, ok := err.(syscall.Errno); ok {
		return -int64(errno)
	}
	return -int64(syscall.EIO)
}

func (e *threadsEngine) discard(f *File, r *Request) error {
	if f.block {
		return e.kernel.blkDiscard(f.fd, r.Offset, r.Length)
	}
	return e.kernel.fallocate(f.fd, fallocMode(r), r.Offset, r.Length)
}

// zero makes a range read as zeros, in the way that the file has for it.
func (e *threadsEngine) zero(f *File, r *Request) error {
	unmap := r.Flags&FlagUnmap != 0
	if f.block && !unmap {
		return e.kernel.blkZeroout(f.fd, r.Offset, r.Length)
	}
	err := e.kernel.fallocate(f.fd, fallocMode(r), r.Offset, r.Length)
	if err != syscall.EOPNOTSUPP {
		return err
	}
	if f.block {
		return e.kernel.blkZeroout(f.fd, r.Offset, r.Length) // the device cannot unmap to zeros
	}
	if unmap {
		return err
	}
	// File systems without ZERO_RANGE (tmpfs) have holes: one reads as zeros, and filling it again keeps the space.
	const keep = sys.FALLOC_FL_KEEP_SIZE
	if err := e.kernel.fallocate(f.fd, sys.FALLOC_FL_PUNCH_HOLE|keep, r.Offset, r.Length); err != nil {
		return err
	}
	return e.kernel.fallocate(f.fd, keep, r.Offset, r.Length)
}

// reap takes back what the workers have done.
func (e *threadsEngine) reap() int {
	if e.flying == 0 || e.nDone.Load() == 0 {
		return 0
	}
	e.mu.Lock()
	took := e.done
	e.done = requestList{}
	e.nDone.Store(0)
	e.mu.Unlock()
	n := took.n
	e.flying -= n
	for took.n > 0 {
		r := took.pop()
		if !e.loop.settle(&e.count, r, r.res) {
			e.enqueue(r)
		}
	}
	return n
}

// close lets the workers end and waits for them, so that none touches memory or a descriptor afterwards. What they were
// doing is done, what they had not begun is not, and neither is told.
func (e *threadsEngine) close() {
	e.mu.Lock()
	e.closing = true
	e.todo = requestList{}
	idle := e.idle
	e.idle = nil
	e.mu.Unlock()
	for idle != nil {
		next := idle.next
		idle.ring()
		idle = next
	}
	e.ended.Wait()
}
