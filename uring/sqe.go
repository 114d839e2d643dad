// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"time"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

// SQE is the kernel's struct io_uring_sqe: one request. The Prep methods fill in all of it; what a field means depends
// on the operation (io_uring_enter(2)).
type SQE struct {
	Opcode      uint8
	Flags       uint8  // IOSQE_ bits
	IoPrio      uint16 // priority, or flags of socket operations
	Fd          int32  // descriptor, or index of a registered file with IOSQE_FIXED_FILE
	Off         uint64 // offset, second address, or cmd_op in the lower half
	Addr        uint64 // address of the buffer or vector
	Len         uint32 // bytes, or segments
	OpFlags     uint32 // rw_flags, fsync_flags, poll32_events, timeout_flags, cancel_flags, ...
	UserData    uint64 // comes back in the CQE
	BufIndex    uint16 // registered buffer, or buffer group
	Personality uint16
	SpliceFdIn  int32  // also file_index
	Addr3       uint64 // the command area begins here
	Pad2        uint64
}

// IOVec is the kernel's struct iovec: Len bytes at Base. [IOVecOf] makes one, its method Bytes gives the slice back.
type IOVec = sys.IOVec

// IOVecOf describes the bytes of b.
func IOVecOf(b []byte) IOVec { return sys.IOVecOf(b) }

// Timespec is the kernel's struct __kernel_timespec.
type Timespec struct {
	Sec  int64
	Nsec int64
}

// TimespecOf is d as seconds and nanoseconds.
func TimespecOf(d time.Duration) Timespec {
	return Timespec{Sec: int64(d / time.Second), Nsec: int64(d % time.Second)}
}

// AddFlags sets IOSQE_ bits on top of those that are set.
func (s *SQE) AddFlags(flags uint8) { s.Flags |= flags }

// SelectBuffer has the kernel pick the buffer from group, instead of the one that was prepared.
func (s *SQE) SelectBuffer(group uint16) {
	s.Flags |= IOSQE_BUFFER_SELECT
	s.BufIndex = group
}

// prep overwrites the entry. The kernel clears nothing, so every field that an operation does not use must be written.
func (s *SQE) prep(op uint8, fd int, off, addr uint64, n, opFlags uint32) {
	*s = SQE{Opcode: op, Fd: int32(fd), Off: off, Addr: addr, Len: n, OpFlags: opFlags}
}

// sink makes escape analysis believe that a pointer given to address outlives the call.
var sink struct {
	open bool // never
	p    unsafe.Pointer
}

// address is p as the kernel sees it. What p points to cannot be on a Go stack: the assignment that never runs makes the
// compiler put it on the heap. It does not keep it alive.
func address(p unsafe.Pointer) uint64 {
	if sink.open {
		sink.p = p
	}
	return uint64(uintptr(p))
}

// addressOf is the address of the first byte of b; 0 of a nil slice.
func addressOf(b []byte) uint64 { return address(unsafe.Pointer(unsafe.SliceData(b))) }
