// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"fmt"
	"syscall"
	"time"
)

// Fd is a descriptor that is readable when the loop has something to do, for a foreign loop (poll(2), glib, Go's netpoller)
// that does the waiting. It belongs to the loop. The foreign loop then goes round like this, in place of Run:
//
//	timeout, err := l.Prepare()
//	... wait until Fd is readable, at most for timeout ...
//	err = l.Dispatch()
//
// All three, and everything else of the loop that is not free for any goroutine, must be called by one goroutine at a
// time. It should be locked to its thread: when a thread ends, the kernel cancels what that thread has in flight on an
// io_uring. Faults on memory are that goroutine's to arm against (see [runtime/debug.SetPanicOnFault]). Close ends the loop.
//
// Call it before the first request; an io_uring that was made for Run is replaced by one that any thread may use. With
// poller poll the error is [ErrNotSupported]: there is no such descriptor.
func (l *Loop) Fd() (int, error) {
	if l.running.Load() || l.closed {
		return -1, fmt.Errorf("descriptor of %s: %w (Run drives the loop, or did)", l.opts.Name, syscall.EBUSY)
	}
	return l.poller.fd()
}

// Prepare hands what is queued to the kernel and tells for how long the foreign loop may wait: 0 is not at all, below 0
// is for ever. Nothing is missed between Prepare and the wait, whether the foreign loop looks at levels or at edges.
func (l *Loop) Prepare() (timeout time.Duration, err error) {
	if err := l.drivable(); err != nil {
		return 0, err
	}
	// Looking is needed even by a foreign loop that asks for levels: what the handlers left unread makes no new edge, and
	// on io_uring the polls of ready watches are not armed before.
	l.note(l.poller.wait(0))
	l.reapEngines()
	left := l.timeout(-1)
	if left != 0 && !l.state.CompareAndSwap(stateAwake, stateAsleep) && l.state.Load() == stateNotified {
		left = 0
	}
	return time.Duration(left), l.failure
}

// Dispatch does one turn's work with what is there and does not wait. Without anything to do it does no harm.
func (l *Loop) Dispatch() error {
	if err := l.drivable(); err != nil {
		return err
	}
	if !l.more() {
		l.note(l.poller.wait(0))
	}
	l.awake()
	l.work()
	return l.failure
}

func (l *Loop) drivable() error {
	switch {
	case l.closed:
		return ErrClosed
	case l.running.Load():
		return fmt.Errorf("drive %s: %w (Run drives it)", l.opts.Name, syscall.EBUSY)
	}
	_, err := l.poller.fd()
	return err
}
