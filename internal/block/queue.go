// SPDX-License-Identifier: Apache-2.0

package block

import (
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/sluice-blk/sluice/aio"
)

// HandleQueue is one loop's face of a handle. All its methods must be called on that loop.
type HandleQueue struct {
	h     *Handle
	loop  *aio.Loop
	below Queue

	// What Submit asks each time, taken from Info once.
	size        int64
	alignMask   uint64
	spaceMask   int64 // the same for what is done without data
	memMask     uint64
	segMask     uint64 // of the lengths of segments
	maxTransfer int64
	maxSegments int
	readOnly    bool
	volatile    bool // the node has a write cache
	nativeFUA   bool
	writeCache  bool // completed writes may be volatile

	gate     int      // how many drains hold the door shut
	door     waitList // requests that came since
	inflight int      // admitted and not yet answered
	drainers []*sync.WaitGroup
	closed   bool

	// untracked counts writes in flight that are not in the handle's table. It is written by this loop alone, and read
	// under the table's mutex by a loop that wants to write a part of a block: see blockTable.
	untracked atomic.Int32

	steps      stepPool
	stepWaiter waitList // requests that need a step, when all are in use

	count Counters
}

func (q *HandleQueue) init() error {
	i := &q.h.info
	q.size = i.Size
	q.alignMask, q.memMask = uint64(i.Align)-1, uint64(i.MemAlign)-1
	q.spaceMask = max(int64(q.alignMask), i.SpaceAlign-1)
	// With whole lengths of the larger one, a request can be cut anywhere that a segment or a limit ends.
	q.segMask = max(q.alignMask, q.memMask)
	q.maxTransfer = max(limit(i.MaxTransfer)&^int64(q.segMask), int64(q.segMask)+1)
	q.maxSegments = int(min(limit(int64(i.MaxSegments)), 1<<30))
	q.readOnly = i.ReadOnly || q.h.o.ReadOnly
	q.volatile = i.WriteCache
	q.nativeFUA = i.FUA == Native
	q.writeCache = q.h.cacheWhen(q.h.o.Cache != CacheWritethrough)
	return q.steps.init(q)
}

// Loop is the loop that the queue belongs to.
func (q *HandleQueue) Loop() *aio.Loop { return q.loop }

// Counters are the queue's own, live. Must be read on the loop.
func (q *HandleQueue) Counters() *Counters { return &q.count }

// SetWriteCache switches the write cache of this queue, as a guest does; it begins as the handle's options say. With it
// off each write, and each write of zeroes, is durable when it completes: by FUA where the node has it, else by a flush
// after the write. The switch holds for what is submitted after it; it does not flush what was written before (submit a
// flush for that). A node that has no write cache, and one that can make nothing durable, are not changed by it.
//
// It is the queue's and not the handle's, since a disk may have several users: one that cannot flush must not lose its
// durable writes because another one can.
func (q *HandleQueue) SetWriteCache(on bool) { q.writeCache = q.h.cacheWhen(on) }

// WriteCache tells whether completed writes may be volatile.
func (q *HandleQueue) WriteCache() bool { return q.writeCache }

// InFlight is how many requests were submitted and have not completed; those at the door of a drained handle are not
// counted.
func (q *HandleQueue) InFlight() int { return q.inflight }

// Submit takes a request. Any range of bytes within the size is served. The request completes through r.Done, later
// and never inside Submit, also when it is refused. Must be called on the loop.
func (q *HandleQueue) Submit(r *Request) {
	if q.gate > 0 || q.door.len() > 0 {
		q.count.Held++
		q.door.push(r)
		return
	}
	q.admit(r)
}

// Close closes the queue. It answers ErrBusy, and does nothing, while requests are in flight or wait at the door. A
// second Close does no harm. Must be called on the loop.
func (q *HandleQueue) Close() error {
	if q.closed {
		return nil
	}
	if n := q.inflight + q.door.len(); n > 0 {
		return fmt.Errorf("close a queue of %s: %d requests are in flight: %w (wait for them first)", q.h.info.Name, n, ErrBusy)
	}
	q.closed = true
	q.h.forget(q)
	q.freeMemory()
	return q.below.Close()
}

func (q *HandleQueue) freeMemory() { q.steps.release() }

// admit lets a request in: from here on a drain waits for it.
func (q *HandleQueue) admit(r *Request) {
	q.inflight++
	switch r.Op {
	case OpRead, OpWrite:
		q.transfer(r)
	case OpFlush:
		q.flush(r)
	case OpDiscard, OpWriteZeroes:
		q.space(r)
	default:
		q.refuse(r, ErrMalformed)
	}
}

// transfer is the way of reads and writes: the checks, then straight on when the node can take the request as it is.
func (q *HandleQueue) transfer(r *Request) {
	write := r.Op == OpWrite
	if write && q.readOnly {
		q.refuse(r, ErrReadOnly)
		return
	}
	if !q.inRange(r) {
		q.refuse(r, ErrRange)
		return
	}
	aligned, sound := q.inspect(r)
	if !sound {
		q.refuse(r, ErrMalformed)
		return
	}
	q.count.admitted(r)
	if r.Length == 0 {
		q.answer(r, nil)
		return
	}
	direct := aligned && r.Length <= q.maxTransfer && len(r.Mem) <= q.maxSegments
	if !write {
		r.Flags &^= FlagFUA
		q.pass(r, direct)
		return
	}
	if q.wantsFUA(r) {
		r.Flags |= FlagFUA
		direct = direct && q.nativeFUA
	} else {
		r.Flags &^= FlagFUA
	}
	if q.alignMask == 0 {
		q.pass(r, direct)
		return
	}
	if direct && q.enterUntracked() {
		if !q.hand(r, (*untrackedWrite)(q)) {
			q.leaveUntracked()
		}
		return
	}
	q.step(r)
}

// wantsFUA tells whether a write must be durable when it completes, and is not so by itself.
func (q *HandleQueue) wantsFUA(r *Request) bool {
	return q.volatile && (r.Flags&FlagFUA != 0 || !q.writeCache)
}

// inRange keeps clear of the overflow that offset+length may be.
func (q *HandleQueue) inRange(r *Request) bool {
	return r.Offset >= 0 && r.Length >= 0 && r.Length <= q.size && r.Offset <= q.size-r.Length
}

// inspect adds up the segments and looks at what the node asks of addresses and lengths.
func (q *HandleQueue) inspect(r *Request) (aligned, sound bool) {
	rest := uint64(r.Length)
	odd := (uint64(r.Offset) | rest) & q.alignMask
	for i := range r.Mem {
		v := &r.Mem[i]
		if v.Len > rest {
			return false, false
		}
		rest -= v.Len
		// SAFETY: the address is looked at as a number, for its low bits, and never turned back into a pointer.
		odd |= v.Len&q.segMask | uint64(uintptr(unsafe.Pointer(v.Base)))&q.memMask
	}
	return odd == 0, rest == 0
}

// pass hands the request on as it is, or step by step.
func (q *HandleQueue) pass(r *Request, direct bool) {
	if direct {
		q.hand(r, (*plainRequest)(q))
		return
	}
	q.step(r)
}

func (q *HandleQueue) flush(r *Request) {
	q.count.Flushes++
	switch {
	case q.h.info.Flush == None && q.volatile:
		q.answer(r, ErrNotSupported)
	case q.h.info.Flush == None:
		q.answer(r, nil) // each write was durable when it completed
	default:
		q.hand(r, (*plainRequest)(q))
	}
}

// space is the way of discards and writes of zeroes, which are rare and go step by step.
func (q *HandleQueue) space(r *Request) {
	switch {
	case q.readOnly:
		q.refuse(r, ErrReadOnly)
		return
	case !q.inRange(r):
		q.refuse(r, ErrRange)
		return
	}
	q.count.admitted(r)
	if r.Op == OpWriteZeroes && q.wantsFUA(r) {
		r.Flags |= FlagFUA
	} else {
		r.Flags &^= FlagFUA
	}
	if q.h.o.IgnoreDiscard {
		r.Flags &^= FlagUnmap
	}
	switch {
	case r.Length == 0, r.Op == OpDiscard && q.h.o.IgnoreDiscard:
		q.answer(r, nil)
	case r.Op == OpDiscard && (q.h.info.Discard == None || q.h.noDiscard.Load()):
		q.answer(r, ErrNotSupported)
	default:
		q.step(r)
	}
}

// hand gives the request to the node, to come back by way of c. It answers false when that cannot be.
func (q *HandleQueue) hand(r *Request, c Completer) bool {
	if !r.Intercept(c) {
		q.tooDeep(r)
		return false
	}
	q.below.Submit(r)
	return true
}

// tooDeep fails a request that cannot be intercepted, and so cannot be seen on its way back.
func (q *HandleQueue) tooDeep(r *Request) {
	q.inflight--
	q.count.Errors++
	q.loop.CompleteLater(r, ErrTooDeep)
}

func (q *HandleQueue) refuse(r *Request, err error) {
	q.count.Refused++
	q.answer(r, err)
}

// answer completes a request that the node need not see.
func (q *HandleQueue) answer(r *Request, err error) {
	if !r.Intercept((*plainRequest)(q)) {
		q.tooDeep(r)
		return
	}
	q.loop.CompleteLater(r, err)
}

// plainRequest and untrackedWrite are the queue as the completer of a request that went straight to the node; the type
// remembers how the request was counted, so that nothing needs to be stored.
type (
	plainRequest   HandleQueue
	untrackedWrite HandleQueue
)

// Complete counts the request out.
func (c *plainRequest) Complete(r *Request, err error) {
	q := (*HandleQueue)(c)
	if err != nil {
		q.count.Errors++
	}
	r.Finish(err)
	q.leave()
}

// Complete counts the write out, and out of those that a partial write of a block has to wait for.
func (c *untrackedWrite) Complete(r *Request, err error) {
	q := (*HandleQueue)(c)
	q.leaveUntracked()
	(*plainRequest)(q).Complete(r, err)
}

// waitList is a first-in, first-out list of requests. It keeps its memory, so that in the long run it allocates nothing.
type waitList struct {
	ring []*Request
	head int
	n    int
}

func (w *waitList) len() int { return w.n }

func (w *waitList) push(r *Request) {
	if w.n == len(w.ring) {
		bigger := make([]*Request, max(16, 2*w.n))
		for i := range w.n {
			bigger[i] = w.ring[(w.head+i)%len(w.ring)]
		}
		w.ring, w.head = bigger, 0
	}
	w.ring[(w.head+w.n)%len(w.ring)] = r
	w.n++
}

func (w *waitList) pop() *Request {
	r := w.ring[w.head]
	w.ring[w.head] = nil
	w.head = (w.head + 1) % len(w.ring)
	w.n--
	return r
}
