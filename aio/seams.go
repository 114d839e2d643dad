// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"github.com/sluice-blk/sluice/internal/laio"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/uring"
)

// seams stand between the loop and the kernel where a test wants the kernel to answer otherwise. Nil is the kernel.
type seams struct {
	laio        *laio.Kernel    // of the linux-aio engine
	blocking    *blockingKernel // of the threads engine
	newRing     func(entries uint32, o *uring.Options) (*uring.Ring, error)
	enter       uring.EnterFunc
	cqEntries   uint32 // 0: as many as the loop wants
	epollCreate func() (int, error)
	epollPwait2 func(epfd int, events []sys.EpollEvent, nsec int64) (int, error)
	ppoll       func(fds []sys.PollFd, nsec int64) (int, error)
}

func (s *seams) setDefaults() {
	if s.newRing == nil {
		s.newRing = uring.NewBest
	}
	if s.enter == nil {
		s.enter = uring.KernelEnter
	}
	if s.epollCreate == nil {
		s.epollCreate = sys.EpollCreate1
	}
	if s.epollPwait2 == nil {
		s.epollPwait2 = sys.EpollPwait2
	}
	if s.ppoll == nil {
		s.ppoll = sys.Ppoll
	}
}
