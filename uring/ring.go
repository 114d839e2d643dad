// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"errors"
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

// Ring is one io_uring: a submission queue and a completion queue, shared with the kernel. It is made by [New] or
// [NewBest].
//
// Its methods must be called by one goroutine at a time; with SINGLE_ISSUER, on one thread (see the package comment).
type Ring struct {
	sq sq
	cq cq

	enter    EnterFunc
	enterFd  int    // what enter is given: the descriptor, or its slot once RegisterRingFD has run
	enterBit uint32 // IORING_ENTER_REGISTERED_RING once RegisterRingFD has run
	extArg   bool   // io_uring_enter takes a time-out

	// The argument of a wait with a time-out. It lives here because the kernel reads it during the call and a Go
	// stack may move.
	arg sys.IOUringGeteventsArg
	ts  Timespec

	fd       int
	flags    SetupFlags
	features Features
	ringMem  []byte // both queues' indices, flags and CQEs: one mapping (FeatSingleMmap)
	sqeMem   []byte
	closed   bool
	ringTid  int // the thread whose table holds the registered ring descriptor; 0 is none
}

// New makes a ring of entries submission entries (rounded up to a power of two) as o asks; nil is the zero [Options].
// A flag that the kernel lacks fails with EINVAL; [NewBest] does without it. Errors wrap the errno and name a remedy.
//
// May be called from any goroutine; with SingleIssuer and without RDisabled, from the one that will use the ring.
func New(entries uint32, o *Options) (*Ring, error) {
	if o == nil {
		o = &Options{}
	}
	return newRing(entries, o, o.flags())
}

// NewBest makes a ring as o asks (nil is the zero [Options]), with whatever of SINGLE_ISSUER, DEFER_TASKRUN,
// COOP_TASKRUN, TASKRUN_FLAG, NO_SQARRAY and SUBMIT_ALL the running kernel has on top. What it got is [Ring.Flags].
// Only EINVAL, the kernel's answer to a flag it does not know, makes it ask for less.
//
// The calling goroutine must be locked to its thread and the only one to use the ring, unless o.RDisabled says that
// another will [Ring.Enable] it.
func NewBest(entries uint32, o *Options) (*Ring, error) {
	if o == nil {
		o = &Options{}
	}
	var err error
	for _, more := range bestFlags {
		var r *Ring
		r, err = newRing(entries, o, o.flags()|more)
		if err == nil || !errors.Is(err, syscall.EINVAL) {
			return r, err
		}
	}
	return nil, err
}

func newRing(entries uint32, o *Options, flags SetupFlags) (*Ring, error) {
	p := sys.IOUringParams{
		CQEntries:    o.CQEntries,
		Flags:        uint32(flags),
		SQThreadCPU:  o.SQPollCPU,
		SQThreadIdle: uint32(o.SQPollIdle / time.Millisecond),
	}
	if o.AttachWQ != nil {
		p.WQFd = uint32(o.AttachWQ.fd)
	}
	fd, err := sys.IOUringSetup(entries, &p)
	if err != nil {
		return nil, setupError(err, entries, flags)
	}
	r := &Ring{fd: fd, enterFd: fd, flags: flags, features: Features(p.Features), enter: o.Enter}
	if r.enter == nil {
		r.enter = KernelEnter
	}
	r.extArg = r.features&FeatExtArg != 0
	if err := r.mapQueues(&p); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

// mapQueues maps the two areas of a fresh ring and points the queues at them.
func (r *Ring) mapQueues(p *sys.IOUringParams) error {
	if r.features&FeatSingleMmap == 0 {
		return fmt.Errorf("map io_uring: %w (the kernel is older than 5.4)", syscall.ENOSYS)
	}
	sqeSize, cqeSize := uint32(1), uint32(1)
	if r.flags&SetupSQE128 != 0 {
		sqeSize = 2
	}
	if r.flags&SetupCQE32 != 0 {
		cqeSize = 2
	}
	size := int(p.CQOff.CQEs + p.CQEntries*cqeSize*uint32(unsafe.Sizeof(CQE{})))
	if r.flags&SetupNoSQArray == 0 {
		size = max(size, int(p.SQOff.Array+p.SQEntries*4))
	}
	var err error
	if r.ringMem, err = mapRing(r.fd, sys.IORING_OFF_SQ_RING, size); err != nil {
		return err
	}
	size = int(p.SQEntries * sqeSize * uint32(unsafe.Sizeof(SQE{})))
	if r.sqeMem, err = mapRing(r.fd, sys.IORING_OFF_SQES, size); err != nil {
		return err
	}
	r.sq.init(r.ringMem, r.sqeMem, p, sqeSize-1)
	r.cq.init(r.ringMem, p, cqeSize-1)
	return nil
}

func mapRing(fd int, offset int64, size int) ([]byte, error) {
	b, err := sys.Mmap(fd, offset, size, sys.PROT_READ|sys.PROT_WRITE, sys.MAP_SHARED|sys.MAP_POPULATE)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes of io_uring at %#x: %w (raise the memlock limit, ulimit -l, if it is ENOMEM or EAGAIN)", size, offset, err)
	}
	return b, nil
}

// word is the 32-bit word at offset off of a mapped ring.
func word(mem []byte, off uint32) *uint32 {
	// SAFETY: the kernel gave off as the place of an aligned 32-bit word inside the mapping; the slice expression checks
	// that it is inside.
	return (*uint32)(unsafe.Pointer(unsafe.SliceData(mem[off : off+4])))
}

// Fd is the ring's descriptor. It polls readable when completions are there, so a foreign loop can wait for it. It
// belongs to the ring.
func (r *Ring) Fd() int { return r.fd }

// Flags are the set-up flags that the ring was made with.
func (r *Ring) Flags() SetupFlags { return r.flags }

// Features are what the kernel said about itself at set-up.
func (r *Ring) Features() Features { return r.features }

// Close gives the ring back: its slot among the thread's registered rings (if called on that thread), its mappings, its
// descriptor. The kernel cancels what is in flight, but Close does not wait for it; see the memory rule in the package
// comment. SQEs and CQEs of the ring must not be touched afterwards. A second Close does nothing.
func (r *Ring) Close() error {
	if r.closed {
		return nil
	}
	// A thread's table of rings holds a reference of its own; on another thread the same slot is another ring's.
	if r.ringTid != 0 && r.ringTid == sys.Gettid() {
		_ = r.unregisterRingFD() // the kernel frees the slot when the thread ends
	}
	r.closed = true
	var errs []error
	for _, mem := range [][]byte{r.sqeMem, r.ringMem} {
		if mem == nil {
			continue
		}
		if err := sys.Munmap(mem); err != nil {
			errs = append(errs, fmt.Errorf("unmap io_uring: %w", err))
		}
	}
	if err := sys.IOUringClose(r.fd); err != nil {
		errs = append(errs, fmt.Errorf("close io_uring: %w", err))
	}
	r.sqeMem, r.ringMem, r.fd, r.enterFd, r.extArg = nil, nil, -1, -1, true
	r.sq, r.cq = closedSQ(), closedCQ()
	return errors.Join(errs...)
}

// KernelEnter is io_uring_enter(2) itself, for an [EnterFunc] to call.
func KernelEnter(fd int, toSubmit, minComplete, flags uint32, arg unsafe.Pointer, argSize uintptr) (int, error) {
	return sys.IOUringEnter(fd, toSubmit, minComplete, flags, arg, argSize)
}
