// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Opcodes of an [IOCB] (enum in linux/aio_abi.h).
const (
	IOCB_CMD_PREAD   = 0
	IOCB_CMD_PWRITE  = 1
	IOCB_CMD_FSYNC   = 2
	IOCB_CMD_FDSYNC  = 3
	IOCB_CMD_POLL    = 5
	IOCB_CMD_NOOP    = 6 // named in the header, refused by every kernel
	IOCB_CMD_PREADV  = 7
	IOCB_CMD_PWRITEV = 8
)

// Flags of an [IOCB].
const (
	IOCB_FLAG_RESFD  = 1 << 0 // signal the eventfd in Resfd when the request completes
	IOCB_FLAG_IOPRIO = 1 << 1 // Reqprio is a priority as ioprio_set(2) takes it
)

// IOCB is the kernel's struct iocb as little-endian machines lay it out; both our architectures are.
// The kernel copies it during io_submit, writes Key and keeps no reference.
type IOCB struct {
	Data      uint64 // comes back in the event
	Key       uint32 // the kernel's
	RWFlags   uint32 // RWF_*
	LioOpcode uint16
	Reqprio   int16
	Fildes    uint32
	Buf       uint64 // address of the buffer, or of the array of iovecs; the events of a poll
	NBytes    uint64 // bytes of the buffer, or number of iovecs
	Offset    int64
	Reserved2 uint64
	Flags     uint32
	Resfd     uint32
}

// IOEvent is the kernel's struct io_event.
type IOEvent struct {
	Data uint64 // of the IOCB
	Obj  uint64 // address of the IOCB in the submitter
	Res  int64  // bytes moved, or a negated errno
	Res2 int64
}

// AIORing is the head of the completion ring that a context's id is the address of. NR events follow at HeaderLength.
type AIORing struct {
	ID, NR             uint32
	Head               uint32 // moved by whoever takes events
	Tail               uint32 // moved by the kernel
	Magic              uint32
	CompatFeatures     uint32
	IncompatFeatures   uint32
	HeaderLengthOfRing uint32
}

// IoSetup makes a context that can hold at least nr requests (io_setup(2)). The id is the address of a mapping that
// begins with an [AIORing]; it is a pointer here because it is one, to memory outside the Go heap.
func IoSetup(nr uint32) (unsafe.Pointer, error) {
	var ctx unsafe.Pointer
	// SAFETY: the kernel writes one word to ctx during the call: the address of a mapping that the collector ignores.
	_, _, e := syscall.Syscall(unix.SYS_IO_SETUP, uintptr(nr), uintptr(unsafe.Pointer(&ctx)), 0)
	if e != 0 {
		return nil, e
	}
	return ctx, nil
}

// IoDestroy ends a context (io_destroy(2)). It returns when none of its requests is in flight any more.
func IoDestroy(ctx unsafe.Pointer) error {
	_, _, e := syscall.Syscall(unix.SYS_IO_DESTROY, uintptr(ctx), 0, 0)
	if e != 0 {
		return e
	}
	return nil
}

// IoSubmit hands requests over in their order (io_submit(2)) and answers how many the kernel took. The error is about
// the first one, and only when none was taken. Memory that the requests name must be kept alive by the caller.
func IoSubmit(ctx unsafe.Pointer, iocbs []*IOCB) (int, error) {
	// SAFETY: the kernel reads the array and the blocks behind it during the call; the slice keeps both alive.
	n, _, e := syscall.Syscall(unix.SYS_IO_SUBMIT, uintptr(ctx), uintptr(len(iocbs)),
		uintptr(unsafe.Pointer(unsafe.SliceData(iocbs))))
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}

// IoGetevents takes completions (io_getevents(2)): at least minNr, waiting for them without a limit, and at most
// len(events).
func IoGetevents(ctx unsafe.Pointer, minNr int, events []IOEvent) (int, error) {
	// SAFETY: the kernel writes events during the call and keeps no reference.
	n, _, e := syscall.Syscall6(unix.SYS_IO_GETEVENTS, uintptr(ctx), uintptr(minNr), uintptr(len(events)),
		uintptr(unsafe.Pointer(unsafe.SliceData(events))), 0, 0)
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}
