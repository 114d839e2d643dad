// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"syscall"
	"unsafe"
)

// PrepSend prepares send(2); MSG_ bits in flags.
func (s *SQE) PrepSend(fd int, b []byte, flags uint32) {
	s.prep(IORING_OP_SEND, fd, 0, addressOf(b), uint32(len(b)), flags)
}

// PrepRecv prepares recv(2); MSG_ bits in flags.
func (s *SQE) PrepRecv(fd int, b []byte, flags uint32) {
	s.prep(IORING_OP_RECV, fd, 0, addressOf(b), uint32(len(b)), flags)
}

// PrepSendmsg prepares sendmsg(2); MSG_ bits in flags. What msg names must stay until the completion.
func (s *SQE) PrepSendmsg(fd int, msg *syscall.Msghdr, flags uint32) {
	s.prep(IORING_OP_SENDMSG, fd, 0, address(unsafe.Pointer(msg)), 1, flags)
}

// PrepRecvmsg prepares recvmsg(2); MSG_ bits in flags. msg and what it names must stay until the completion.
func (s *SQE) PrepRecvmsg(fd int, msg *syscall.Msghdr, flags uint32) {
	s.prep(IORING_OP_RECVMSG, fd, 0, address(unsafe.Pointer(msg)), 1, flags)
}

// PrepSendZC prepares a send(2) that takes the bytes from b while the network needs them (Linux 6.0). It gives two CQEs:
// the result, with [IORING_CQE_F_MORE], and one with [IORING_CQE_F_NOTIF] when b may be used again. MSG_ bits in flags,
// IORING_RECVSEND_ and IORING_SEND_ZC_ bits in zcFlags.
func (s *SQE) PrepSendZC(fd int, b []byte, flags uint32, zcFlags uint16) {
	s.prep(IORING_OP_SEND_ZC, fd, 0, addressOf(b), uint32(len(b)), flags)
	s.IoPrio = zcFlags
}

// PrepAccept prepares accept4(2); SOCK_ bits in flags. The result is the descriptor. addr and addrLen may be nil. With
// [IORING_ACCEPT_MULTISHOT] in the SQE's IoPrio it goes on, a CQE for each connection (Linux 5.19); addr is nil then.
func (s *SQE) PrepAccept(fd int, addr *syscall.RawSockaddrAny, addrLen *uint32, flags uint32) {
	s.prep(IORING_OP_ACCEPT, fd, address(unsafe.Pointer(addrLen)), address(unsafe.Pointer(addr)), 0, flags)
}

// PrepShutdown prepares shutdown(2) (Linux 5.11); a SHUT_ value in how.
func (s *SQE) PrepShutdown(fd, how int) { s.prep(IORING_OP_SHUTDOWN, fd, 0, 0, uint32(how), 0) }
