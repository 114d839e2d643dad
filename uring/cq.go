// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/invariant"
	"github.com/sluice-blk/sluice/internal/sys"
)

// CQE is the kernel's struct io_uring_cqe: the outcome of one request.
type CQE struct {
	UserData uint64 // the SQE's
	Res      int32  // what the matching system call would return; -errno if it failed
	Flags    uint32 // IORING_CQE_F_ bits
}

// Err is the errno of a request that failed, nil of one that did not. It allocates nothing.
func (c *CQE) Err() error {
	if c.Res >= 0 {
		return nil
	}
	return syscall.Errno(-c.Res)
}

// More reports that the same SQE will give further CQEs.
func (c *CQE) More() bool { return c.Flags&IORING_CQE_F_MORE != 0 }

// cq is the completion queue: the kernel fills it at tail, we empty it at head.
type cq struct {
	head     *uint32 // stored by us (release) once the entries before are copied; loaded by the kernel (acquire)
	tail     *uint32 // stored by the kernel (release) after the entries before are written; loaded by us (acquire)
	overflow *uint32 // stored by the kernel: completions it could not even keep

	cqes    unsafe.Pointer
	entries uint32
	mask    uint32
	shift   uint32 // 1 where an entry takes two 16-byte places

	next uint32 // our copy of head, which only we store
}

func (q *cq) init(ringMem []byte, p *sys.IOUringParams, shift uint32) {
	*q = cq{
		head:     word(ringMem, p.CQOff.Head),
		tail:     word(ringMem, p.CQOff.Tail),
		overflow: word(ringMem, p.CQOff.Overflow),
		entries:  p.CQEntries,
		mask:     p.CQEntries - 1,
		shift:    shift,
	}
	// SAFETY: the mapping holds entries<<shift places of 16 bytes from here on and is unmapped only by Close, which
	// replaces q.
	q.cqes = unsafe.Pointer(unsafe.SliceData(ringMem[p.CQOff.CQEs:]))
}

// closedCQ is a queue that stays empty.
func closedCQ() cq { return cq{head: new(uint32), tail: new(uint32), overflow: new(uint32)} }

// at is the entry at position pos. It may be read while pos is between head and a tail that was loaded.
func (q *cq) at(pos uint32) *CQE {
	// SAFETY: the place is below entries<<shift, the number of 16-byte places in the mapping.
	return (*CQE)(unsafe.Add(q.cqes, uintptr(pos&q.mask)<<q.shift*unsafe.Sizeof(CQE{})))
}

// Reap copies waiting completions to dst, oldest first, gives their places back to the kernel with one store, and
// returns how many there were. It never enters the kernel: see [Ring.NeedsEnter] for completions that need that. On a
// ring with CQE32 the second half of each is dropped; use [Ring.PeekCQE] and [Ring.PeekExtra] there.
func (r *Ring) Reap(dst []CQE) int {
	q := &r.cq
	// Acquire: pairs with the kernel's release store of the tail, so the entries before it are whole.
	n := min(int(atomic.LoadUint32(q.tail)-q.next), len(dst))
	if n == 0 {
		return 0
	}
	for i := range n {
		dst[i] = *q.at(q.next + uint32(i))
	}
	r.advance(uint32(n))
	return n
}

// PeekCQE is the oldest waiting completion, or nil if there is none. It stays in the queue, and the pointer good, until
// [Ring.Advance].
func (r *Ring) PeekCQE() *CQE {
	if r.CQReady() == 0 {
		return nil
	}
	return r.cq.at(r.cq.next)
}

// PeekExtra is the second half of the completion that PeekCQE shows, on a ring with CQE32; zeros elsewhere.
func (r *Ring) PeekExtra() (extra [2]uint64) {
	if r.cq.shift == 0 || r.CQReady() == 0 {
		return extra
	}
	// SAFETY: on a ring of 32-byte entries the 16 bytes after the first half belong to the same entry.
	return *(*[2]uint64)(unsafe.Add(unsafe.Pointer(r.cq.at(r.cq.next)), unsafe.Sizeof(CQE{})))
}

// Advance gives the places of the n oldest completions back to the kernel. n must not be above [Ring.CQReady].
func (r *Ring) Advance(n uint32) {
	invariant.Assert(n <= r.CQReady(), "uring: advanced past the completions that are there")
	r.advance(n)
}

func (r *Ring) advance(n uint32) {
	r.cq.next += n
	// Release: pairs with the kernel's acquire load of the head. After it the kernel may overwrite what we read.
	atomic.StoreUint32(r.cq.head, r.cq.next)
}

// CQEntries is the size of the completion queue.
func (r *Ring) CQEntries() uint32 { return r.cq.entries }

// CQReady is the number of completions waiting in the queue.
func (r *Ring) CQReady() uint32 { return atomic.LoadUint32(r.cq.tail) - r.cq.next }

// CQOverflowed reports that completions did not fit and wait in the kernel. They come, in order, once there is room and
// a call gets events: any call that submits does so by itself when this is true.
func (r *Ring) CQOverflowed() bool { return atomic.LoadUint32(r.sq.flags)&sqCQOverflow != 0 }

// FlushOverflow moves completions that did not fit into the queue, as many as there is room for. Errors are those of
// [Ring.SubmitAndWait].
func (r *Ring) FlushOverflow() error {
	_, err := r.enter(r.enterFd, 0, 0, r.enterBit|IORING_ENTER_GETEVENTS, nil, 0)
	return err
}

// CQLost counts completions that the kernel had no memory to keep. Anything but 0 means that requests are unaccounted for.
func (r *Ring) CQLost() uint32 { return atomic.LoadUint32(r.cq.overflow) }
