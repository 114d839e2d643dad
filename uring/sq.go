// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

// sq is the submission queue: a ring of SQEs that we fill at tail and the kernel empties at head.
//
// Three positions, free-running counters all: head (the kernel's, shared) <= published (what the kernel has been shown,
// equal to the shared tail) <= next (where GetSQE goes on). What lies between head and next is ours to lose, so the
// kernel's head alone decides what is still to be submitted, never the count that a call returned.
type sq struct {
	head  *uint32 // stored by the kernel (release) once it has read the entries before; loaded by us (acquire)
	tail  *uint32 // stored by us (release) after the entries before are written; loaded by the kernel (acquire)
	flags *uint32 // stored by the kernel: NEED_WAKEUP, CQ_OVERFLOW, TASKRUN

	sqes    unsafe.Pointer
	entries uint32
	mask    uint32
	shift   uint32 // 1 where an entry takes two 64-byte places

	next      uint32
	published uint32
	headSeen  uint32 // some earlier value of head: enough to know that there is room, mostly
}

func (q *sq) init(ringMem, sqeMem []byte, p *sys.IOUringParams, shift uint32) {
	*q = sq{
		head:    word(ringMem, p.SQOff.Head),
		tail:    word(ringMem, p.SQOff.Tail),
		flags:   word(ringMem, p.SQOff.Flags),
		entries: p.SQEntries,
		mask:    p.SQEntries - 1,
		shift:   shift,
	}
	// SAFETY: sqeMem holds entries<<shift places of 64 bytes and is unmapped only by Close, which replaces q.
	q.sqes = unsafe.Pointer(unsafe.SliceData(sqeMem))
	if SetupFlags(p.Flags)&SetupNoSQArray == 0 {
		// The indirection array would allow entries to be submitted out of order. We never do: place i holds entry i.
		for i := range p.SQEntries {
			*word(ringMem, p.SQOff.Array+4*i) = i
		}
	}
}

// closedSQ is a queue that is always full and never asks for anything.
func closedSQ() sq { return sq{head: new(uint32), tail: new(uint32), flags: new(uint32)} }

// GetSQE takes the next free submission entry, or returns nil when the queue is full: Submit, then try again. The entry
// holds remains of an earlier request until a Prep method has overwritten it, which must happen before the next call
// that submits. The pointer is good until that call.
func (r *Ring) GetSQE() *SQE {
	q := &r.sq
	if q.next-q.headSeen >= q.entries {
		q.headSeen = atomic.LoadUint32(q.head)
		if q.next-q.headSeen >= q.entries {
			return nil
		}
	}
	place := uintptr(q.next&q.mask) << q.shift
	q.next++
	// SAFETY: place < entries<<shift, the number of 64-byte places in the mapping; the kernel does not read this one
	// before the tail is stored.
	sqe := (*SQE)(unsafe.Add(q.sqes, place*unsafe.Sizeof(SQE{})))
	if q.shift != 0 {
		// SAFETY: on a ring of 128-byte entries the next place is the second half of this one. Prep methods do not know
		// of it, so it is cleared here.
		*(*SQE)(unsafe.Add(unsafe.Pointer(sqe), unsafe.Sizeof(SQE{}))) = SQE{}
	}
	return sqe
}

// Cmd is the command area of an entry of this ring, for commands such as those of [SQE.PrepURingCmd]: 80 bytes on a ring
// with SQE128, else 16. It is all zeros after GetSQE and Prep, and is written before the submission.
func (r *Ring) Cmd(s *SQE) []byte {
	n := unsafe.Sizeof(SQE{}) - unsafe.Offsetof(s.Addr3) + uintptr(r.sq.shift)*unsafe.Sizeof(SQE{})
	// SAFETY: the area begins at Addr3 and reaches to the end of the entry, which is 64<<shift bytes long.
	return unsafe.Slice((*byte)(unsafe.Pointer(&s.Addr3)), n)
}

// SQEntries is the size of the submission queue.
func (r *Ring) SQEntries() uint32 { return r.sq.entries }

// SQPending is the number of entries taken by GetSQE that the kernel has not taken yet: not submitted, or left over
// when it took only part of a batch.
func (r *Ring) SQPending() uint32 { return r.sq.next - atomic.LoadUint32(r.sq.head) }

// SQSpace is the number of entries that GetSQE can still give.
func (r *Ring) SQSpace() uint32 {
	if r.closed {
		return 0
	}
	return r.sq.entries - r.SQPending()
}

// NeedsEnter reports that the kernel has something for us that shows only after a call that gets events: completion work
// put off (TASKRUN, on rings with TaskrunFlag), or completions that did not fit (CQ_OVERFLOW). It is one load, made for
// loops that poll in user space.
func (r *Ring) NeedsEnter() bool {
	return atomic.LoadUint32(r.sq.flags)&(sqTaskrun|sqCQOverflow) != 0
}

// Submit hands the queued entries to the kernel and does not wait. It returns the number that the kernel took, which may
// be less than were queued: the rest stays queued, in order, and goes out with the next call. Without anything to hand
// over it makes no system call, except to fetch what [Ring.NeedsEnter] reports.
//
// Errors are those of [Ring.SubmitAndWait].
func (r *Ring) Submit() (int, error) { return r.submit(0, false, -1) }

// SubmitAndGetEvents is Submit that always enters the kernel and also runs completion work that was put off and
// fetches completions that did not fit. It does not wait for any.
func (r *Ring) SubmitAndGetEvents() (int, error) { return r.submit(0, true, -1) }

// SubmitAndWait hands the queued entries to the kernel and waits until n completions are in the queue (including those
// that were there before) or timeout has passed, in one system call. A negative timeout is none; with timeout 0 it is
// SubmitAndGetEvents, with n 0 it is Submit. It returns the number of entries that the kernel took.
//
// It may return early, with fewer than n completions: look at the queue, not at the result. It does not wait when the
// kernel took only part of the batch, and when it took any, an error of the wait is not told. On kernels without
// FeatExtArg (5.10) a wait with a timeout ends at the first completion, whatever n.
//
// Errors are bare errnos, and nothing is lost or taken twice by any of them:
//
//   - EINTR: a signal cut the wait short; wait again. The Go runtime sends its threads signals.
//   - ETIME: the time has passed.
//   - EAGAIN: the kernel has no memory for a request now; reap or wait, then submit again.
//   - EBUSY: completions that did not fit must be reaped first (or, on newer kernels, work that waits must be run).
//   - EBADR: the kernel had no memory to keep a completion; [Ring.CQLost] counts them.
//   - EBADFD: the ring is disabled still.
//   - EEXIST: the ring has SINGLE_ISSUER and belongs to another thread.
//   - EBADF: the ring is closed.
func (r *Ring) SubmitAndWait(n uint32, timeout time.Duration) (int, error) {
	switch {
	case n == 0:
		return r.submit(0, false, -1)
	case timeout == 0:
		return r.submit(0, true, -1)
	case timeout > 0 && !r.extArg:
		return r.submitThenPoll(n, timeout)
	case r.CQReady() >= n && r.SQPending() == 0 && !r.NeedsEnter():
		return 0, nil
	}
	return r.submit(n, true, timeout)
}

// WaitSQ waits until the submission queue has room. It is for rings with SQPoll, where the kernel takes entries in its
// own time, and may show their completions before it gives their places back; on others room comes with Submit, and
// WaitSQ does nothing. It may return early with EINTR.
func (r *Ring) WaitSQ() error {
	if r.flags&SetupSQPoll == 0 || r.SQSpace() > 0 {
		return nil
	}
	_, err := r.enter(r.enterFd, 0, 0, r.enterBit|IORING_ENTER_SQ_WAIT, nil, 0)
	return err
}

// submit is the one place that enters the kernel on the data plane.
func (r *Ring) submit(wait uint32, getEvents bool, timeout time.Duration) (int, error) {
	n := r.publish()
	// Pairs with the kernel's update of the flags before it sleeps or counts an overflow. For NEED_WAKEUP our store of
	// the tail must come before this load; atomics in Go are sequentially consistent, so it does.
	word := atomic.LoadUint32(r.sq.flags)
	flags, call := r.enterBit, n != 0
	if r.flags&SetupSQPoll != 0 {
		if call = word&sqNeedWakeup != 0; call {
			flags |= IORING_ENTER_SQ_WAKEUP
		}
	}
	if getEvents || word&(sqCQOverflow|sqTaskrun) != 0 {
		flags |= IORING_ENTER_GETEVENTS
		call = true
	}
	if !call {
		return int(n), nil
	}
	if wait == 0 || timeout < 0 {
		return r.enter(r.enterFd, n, wait, flags, nil, 0)
	}
	r.ts = TimespecOf(timeout)
	// SAFETY: r is on the heap, where objects do not move, and is alive during the call.
	r.arg.TS = uint64(uintptr(unsafe.Pointer(&r.ts)))
	return r.enter(r.enterFd, n, wait, flags|IORING_ENTER_EXT_ARG, unsafe.Pointer(&r.arg), unsafe.Sizeof(r.arg))
}

// publish shows the kernel all entries prepared so far and returns how many the coming call shall submit.
func (r *Ring) publish() uint32 {
	q := &r.sq
	fresh := q.next - q.published
	if fresh != 0 {
		// Release: pairs with the kernel's acquire load of the tail. After it the entries are the kernel's.
		atomic.StoreUint32(q.tail, q.next)
		q.published = q.next
	}
	if r.flags&SetupSQPoll != 0 {
		return fresh // the kernel's thread takes them; the head tells nothing of this call
	}
	return r.SQPending()
}

// submitThenPoll waits with a timeout where io_uring_enter cannot: by polling the ring's descriptor. A TIMEOUT request
// would do as well but take a place in both queues, and have to be told apart and cleaned up after each wait.
func (r *Ring) submitThenPoll(n uint32, timeout time.Duration) (int, error) {
	done, err := r.Submit()
	if err != nil || r.CQReady() >= n || r.flags&SetupSQPoll == 0 && r.SQPending() != 0 {
		return done, err
	}
	ready, err := sys.PpollIn(r.fd, int64(timeout))
	switch {
	case done > 0:
		return done, nil // as the kernel does
	case err != nil:
		return 0, err
	case !ready:
		return 0, syscall.ETIME
	}
	return 0, nil
}
