// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

// PrepMsgRing prepares a message to another ring (Linux 5.18): a CQE with user data userData and result res appears
// there. ringFd is that ring's [Ring.Fd]. The result of this request is 0 or why it could not be delivered.
func (s *SQE) PrepMsgRing(ringFd int, userData uint64, res int32) {
	s.prep(IORING_OP_MSG_RING, ringFd, userData, IORING_MSG_DATA, uint32(res), 0)
}

// PrepURingCmd prepares a command of the file's driver (Linux 5.19): cmdOp and the bytes of [Ring.Cmd], which are zero
// after this call, are between the caller and that driver. IORING_URING_CMD_ bits in cmdFlags.
func (s *SQE) PrepURingCmd(fd int, cmdOp, cmdFlags uint32) {
	s.prep(IORING_OP_URING_CMD, fd, uint64(cmdOp), 0, 0, cmdFlags)
}
