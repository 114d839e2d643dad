// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Offsets of a ring's three areas for [Mmap].
const (
	IORING_OFF_SQ_RING = 0
	IORING_OFF_CQ_RING = 0x8000000
	IORING_OFF_SQES    = 0x10000000
)

// Opcodes of [IOUringRegister].
const (
	IORING_REGISTER_BUFFERS          = 0
	IORING_UNREGISTER_BUFFERS        = 1
	IORING_REGISTER_FILES            = 2
	IORING_UNREGISTER_FILES          = 3
	IORING_REGISTER_EVENTFD          = 4
	IORING_UNREGISTER_EVENTFD        = 5
	IORING_REGISTER_FILES_UPDATE     = 6
	IORING_REGISTER_EVENTFD_ASYNC    = 7
	IORING_REGISTER_PROBE            = 8
	IORING_REGISTER_RESTRICTIONS     = 11
	IORING_REGISTER_ENABLE_RINGS     = 12
	IORING_REGISTER_BUFFERS_UPDATE   = 16
	IORING_REGISTER_IOWQ_MAX_WORKERS = 19
	IORING_REGISTER_RING_FDS         = 20
	IORING_UNREGISTER_RING_FDS       = 21
)

// IOSQRingOffsets is the kernel's struct io_sqring_offsets: byte offsets into the mapped ring.
type IOSQRingOffsets struct {
	Head, Tail, RingMask, RingEntries, Flags, Dropped, Array uint32
	Resv1                                                    uint32
	UserAddr                                                 uint64
}

// IOCQRingOffsets is the kernel's struct io_cqring_offsets: byte offsets into the mapped ring.
type IOCQRingOffsets struct {
	Head, Tail, RingMask, RingEntries, Overflow, CQEs, Flags uint32
	Resv1                                                    uint32
	UserAddr                                                 uint64
}

// IOUringParams is the kernel's struct io_uring_params.
type IOUringParams struct {
	SQEntries, CQEntries, Flags, SQThreadCPU, SQThreadIdle, Features, WQFd uint32
	Resv                                                                   [3]uint32
	SQOff                                                                  IOSQRingOffsets
	CQOff                                                                  IOCQRingOffsets
}

// IOUringGeteventsArg is the kernel's struct io_uring_getevents_arg, the argument of [IOUringEnter] with
// IORING_ENTER_EXT_ARG. TS is the address of a struct __kernel_timespec, or 0.
type IOUringGeteventsArg struct {
	Sigmask     uint64
	SigmaskSz   uint32
	MinWaitUsec uint32
	TS          uint64
}

// IOUringRsrcUpdate is the kernel's struct io_uring_rsrc_update.
type IOUringRsrcUpdate struct {
	Offset uint32
	Resv   uint32
	Data   uint64
}

// IOUringRsrcUpdate2 is the kernel's struct io_uring_rsrc_update2.
type IOUringRsrcUpdate2 struct {
	Offset uint32
	Resv   uint32
	Data   uint64
	Tags   uint64
	NR     uint32
	Resv2  uint32
}

// IOUringSetup makes a ring and fills in p (io_uring_setup(2)). The descriptor is close-on-exec.
func IOUringSetup(entries uint32, p *IOUringParams) (int, error) {
	// SAFETY: the kernel reads and writes *p during the call and keeps no reference.
	fd, _, e := syscall.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(p)), 0)
	if e != 0 {
		return -1, e
	}
	return int(fd), nil
}

// IOUringEnter submits and waits (io_uring_enter(2)). arg must point into the Go heap or outside Go altogether.
//
// The call goes through the scheduler's door even when it does not wait: a submission may sleep in the block layer, and
// a thread that sleeps unknown to the scheduler holds up the garbage collector.
func IOUringEnter(fd int, toSubmit, minComplete, flags uint32, arg unsafe.Pointer, argSize uintptr) (int, error) {
	// SAFETY: the kernel uses arg during the call only; the conversion in the argument list keeps it alive.
	n, _, e := syscall.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(fd), uintptr(toSubmit), uintptr(minComplete),
		uintptr(flags), uintptr(arg), argSize)
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}

// IOUringRegister registers or unregisters with a ring (io_uring_register(2)). arg is what the opcode says; memory that
// its fields name must be kept alive by the caller during the call.
func IOUringRegister(fd int, opcode uint32, arg unsafe.Pointer, nrArgs uint32) (int, error) {
	// SAFETY: as for IOUringEnter.
	n, _, e := syscall.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(fd), uintptr(opcode), uintptr(arg), uintptr(nrArgs), 0, 0)
	runtime.KeepAlive(arg)
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}

// IOUringClose closes a ring's descriptor.
func IOUringClose(fd int) error { return unix.Close(fd) }

// PpollIn waits until fd is readable: forever when nsec is negative. It reports whether it is; a wait that ran out is
// false without an error, one that a signal cut short is EINTR.
func PpollIn(fd int, nsec int64) (bool, error) {
	fds := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	var ts *unix.Timespec
	if nsec >= 0 {
		t := unix.NsecToTimespec(nsec)
		ts = &t
	}
	n, err := unix.Ppoll(fds[:], ts, nil)
	return n > 0, err
}

// Gettid is the kernel's id of the calling thread. It means something only to a goroutine locked to its thread.
func Gettid() int { return unix.Gettid() }
