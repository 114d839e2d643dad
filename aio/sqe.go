// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/uring"
)

// CQEHandler hears the completion of an entry that AddSQE added.
type CQEHandler interface {
	// HandleCQE is called on the loop, never inside AddSQE. An entry that gives several completions (cqe.More) calls it
	// for each.
	HandleCQE(cqe uring.CQE)
}

// userCQE is a completion that waits for its turn.
type userCQE struct {
	h   CQEHandler
	cqe uring.CQE
}

// AddSQE puts an entry of the caller's own into the loop's ring: prep fills it in, with one of its Prep methods and
// flags, and h hears of its completion. It leaves with the rest of the turn. The loop owns UserData: it is set when prep
// is called, for a later cancellation to name, and set again afterwards. IOSQE_CQE_SKIP_SUCCESS is taken away, since
// every entry is accounted for.
//
// What the entry points to must stay until its completion. When the loop ends, entries in flight are cancelled, and h
// hears of that.
//
// Errors: [ErrNotSupported] on a loop whose poller is not io_uring, with the reason; EAGAIN when the queue is full and
// the kernel takes nothing now. Either way nothing was added. Must be called on the loop, or before it runs.
func (l *Loop) AddSQE(prep func(*uring.SQE), h CQEHandler) error {
	l.assertOnLoop()
	p, ok := l.poller.(*uringPoller)
	if !ok {
		return fmt.Errorf("add an io_uring entry: %w (the loop's poller is %s: %s)", ErrNotSupported, l.poller.kind(), l.reason)
	}
	e := p.sqe()
	if e == nil {
		return syscall.EAGAIN
	}
	s, data := p.slots.take(slotUser)
	s.user = h
	p.users++
	e.UserData = data
	prep(e)
	e.UserData = data
	e.Flags &^= uring.IOSQE_CQE_SKIP_SUCCESS
	if !l.plugged() {
		l.note(p.submit())
	}
	return nil
}

// runCQEs tells the completions of users' entries.
func (l *Loop) runCQEs() {
	for i := 0; i < len(l.cqes); i++ {
		c := l.cqes[i]
		l.cqes[i].h = nil
		c.h.HandleCQE(c.cqe)
	}
	l.cqes = l.cqes[:0]
}

// cancelUsers asks the kernel to end what AddSQE added.
func (p *uringPoller) cancelUsers() {
	for b, block := range p.slots.blocks {
		for i := range block {
			if block[i].kind != slotUser {
				continue
			}
			e := p.sqe()
			if e == nil {
				return
			}
			e.PrepCancel(uint64(block[i].gen)<<32|uint64(b*slotBlock+i), 0)
			e.UserData = nobody
		}
	}
}
