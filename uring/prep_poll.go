// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import "unsafe"

// PrepPollAdd prepares a wait for events of fd (POLL bits). The result is the events that came.
//
// With pollFlags 0 it completes once. With [IORING_POLL_ADD_MULTI] it gives a CQE at each wake-up of the descriptor as
// long as CQEs carry [IORING_CQE_F_MORE] (Linux 5.13): that is edge-triggered, nothing is told again that was not
// consumed.
func (s *SQE) PrepPollAdd(fd int, events, pollFlags uint32) {
	s.prep(IORING_OP_POLL_ADD, fd, 0, 0, pollFlags, events)
}

// PrepPollRemove prepares the end of the poll whose user data is userData. That poll completes with ECANCELED, this
// request with 0, ENOENT (no such poll) or EALREADY (its event is on its way).
func (s *SQE) PrepPollRemove(userData uint64) {
	s.prep(IORING_OP_POLL_REMOVE, -1, 0, userData, 0, 0)
}

// PrepPollUpdate prepares a change of the poll whose user data is userData (Linux 5.13): its events with
// [IORING_POLL_UPDATE_EVENTS], its user data to newUserData with [IORING_POLL_UPDATE_USER_DATA]; add
// [IORING_POLL_ADD_MULTI] to keep a multishot poll one. The results are those of PrepPollRemove.
func (s *SQE) PrepPollUpdate(userData, newUserData uint64, events, pollFlags uint32) {
	s.prep(IORING_OP_POLL_REMOVE, -1, newUserData, userData, pollFlags, events)
}

// PrepTimeout prepares a request that completes with ETIME when *ts has passed, or with 0 when count further requests
// have completed before (count 0: time alone). IORING_TIMEOUT_ bits in flags; with [IORING_TIMEOUT_ABS] *ts is a time of
// CLOCK_MONOTONIC. With [IORING_TIMEOUT_MULTISHOT] count is the number of times it fires, 0 without end (Linux 6.4). *ts
// must stay until the submission.
func (s *SQE) PrepTimeout(ts *Timespec, count, flags uint32) {
	s.prep(IORING_OP_TIMEOUT, -1, uint64(count), address(unsafe.Pointer(ts)), 1, flags)
}

// PrepTimeoutRemove prepares the end of the timeout whose user data is userData. That one completes with ECANCELED, this
// one with 0, ENOENT or EALREADY or EBUSY (too late).
func (s *SQE) PrepTimeoutRemove(userData uint64) {
	s.prep(IORING_OP_TIMEOUT_REMOVE, -1, 0, userData, 0, 0)
}

// PrepTimeoutUpdate prepares a new time for the timeout whose user data is userData (Linux 5.11); flags as in
// PrepTimeout. *ts must stay until the submission.
func (s *SQE) PrepTimeoutUpdate(userData uint64, ts *Timespec, flags uint32) {
	s.prep(IORING_OP_TIMEOUT_REMOVE, -1, address(unsafe.Pointer(ts)), userData, 0, flags|IORING_TIMEOUT_UPDATE)
}

// PrepLinkTimeout prepares a limit for the entry before it, which must carry [IOSQE_IO_LINK]: when *ts has passed that
// one is cancelled (ECANCELED or EINTR) and this completes with ETIME; otherwise this completes with ECANCELED. *ts must
// stay until the submission.
func (s *SQE) PrepLinkTimeout(ts *Timespec, flags uint32) {
	s.prep(IORING_OP_LINK_TIMEOUT, -1, 0, address(unsafe.Pointer(ts)), 1, flags)
}

// PrepCancel prepares the cancellation of the request with user data userData; with [IORING_ASYNC_CANCEL_ALL] of all of
// them, with [IORING_ASYNC_CANCEL_ANY] of every request of the ring (both Linux 5.19). The result is 0 (the number of
// them, with those flags), ENOENT, or EALREADY (running, may still be cancelled). The cancelled request has its own CQE.
func (s *SQE) PrepCancel(userData uint64, cancelFlags uint32) {
	s.prep(IORING_OP_ASYNC_CANCEL, -1, 0, userData, 0, cancelFlags)
}

// PrepCancelFd prepares the cancellation of a request on fd (Linux 5.19); flags and results as in PrepCancel, and
// [IORING_ASYNC_CANCEL_FD_FIXED] where fd is the index of a registered file.
func (s *SQE) PrepCancelFd(fd int, cancelFlags uint32) {
	s.prep(IORING_OP_ASYNC_CANCEL, fd, 0, 0, 0, cancelFlags|IORING_ASYNC_CANCEL_FD)
}
