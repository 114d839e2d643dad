// SPDX-License-Identifier: Apache-2.0

package laio

import (
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

// The functions below fill every field of cb for one kind of request and leave none over from its last use. The memory
// must stay until the completion, and the caller keeps it alive: the kernel knows it by address only.

// PrepRead reads into one segment.
func PrepRead(cb *IOCB, fd int, v sys.IOVec, offset int64) {
	transfer(cb, sys.IOCB_CMD_PREAD, fd, address(v.Base), v.Len, offset)
}

// PrepWrite writes one segment.
func PrepWrite(cb *IOCB, fd int, v sys.IOVec, offset int64) {
	transfer(cb, sys.IOCB_CMD_PWRITE, fd, address(v.Base), v.Len, offset)
}

// PrepReadv reads into up to [sys.IOV_MAX] segments. The kernel copies the array itself during Submit.
func PrepReadv(cb *IOCB, fd int, vs []sys.IOVec, offset int64) {
	transfer(cb, sys.IOCB_CMD_PREADV, fd, address(unsafe.SliceData(vs)), uint64(len(vs)), offset)
}

// PrepWritev writes up to [sys.IOV_MAX] segments. The kernel copies the array itself during Submit.
func PrepWritev(cb *IOCB, fd int, vs []sys.IOVec, offset int64) {
	transfer(cb, sys.IOCB_CMD_PWRITEV, fd, address(unsafe.SliceData(vs)), uint64(len(vs)), offset)
}

// PrepFdsync makes what was written durable, as fdatasync(2) does (Linux 4.18; EINVAL where the file has no fsync).
func PrepFdsync(cb *IOCB, fd int) {
	transfer(cb, sys.IOCB_CMD_FDSYNC, fd, 0, 0, 0)
}

// PrepPoll waits once until one of the poll(2) events holds (Linux 4.19); the result is the events that do.
func PrepPoll(cb *IOCB, fd int, events uint16) {
	transfer(cb, sys.IOCB_CMD_POLL, fd, uint64(events), 0, 0)
}

// Tag sets what the completion will carry.
func Tag(cb *IOCB, data uint64) { cb.Data = data }

// Signal has the completion add one to an eventfd. The kernel does that without ever waiting, whether the eventfd is
// non-blocking or not and however full its counter is.
func Signal(cb *IOCB, eventfd int) {
	cb.Flags |= sys.IOCB_FLAG_RESFD
	cb.Resfd = uint32(eventfd)
}

// Durable makes a write durable before it completes (RWF_DSYNC; EOPNOTSUPP where the kernel cannot).
func Durable(cb *IOCB) { cb.RWFlags |= sys.RWF_DSYNC }

func transfer(cb *IOCB, opcode uint16, fd int, buf, nbytes uint64, offset int64) {
	*cb = IOCB{LioOpcode: opcode, Fildes: uint32(fd), Buf: buf, NBytes: nbytes, Offset: offset}
}

func address[T any](p *T) uint64 {
	// SAFETY: the number is for the kernel; whoever prepares the request keeps the memory alive, see above.
	return uint64(uintptr(unsafe.Pointer(p)))
}
