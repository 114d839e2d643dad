// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"errors"
	"fmt"
	"syscall"
)

// ErrNotSupported is the answer to what the loop's poller, the file or the kernel cannot do.
var ErrNotSupported = errors.New("not supported")

// ErrClosed is the answer of a loop that has ended.
var ErrClosed = errors.New("the loop has ended")

// PollerKind names the way in which a loop waits.
type PollerKind uint8

const (
	// PollerAuto takes the first of the others that can be set up, in their order.
	PollerAuto PollerKind = iota
	// PollerIOUring waits in io_uring_enter, which submits at the same time.
	PollerIOUring
	// PollerEpoll waits in epoll_pwait2, or epoll_pwait before Linux 5.11.
	PollerEpoll
	// PollerPoll waits in ppoll. It needs no descriptor of its own and costs a pass over all watches a turn.
	PollerPoll
)

var pollerNames = [...]string{"auto", "io_uring", "epoll", "poll"}

// String is the poller's name as the command line knows it.
func (k PollerKind) String() string {
	if int(k) < len(pollerNames) {
		return pollerNames[k]
	}
	return fmt.Sprintf("poller(%d)", uint8(k))
}

// ParsePoller is the inverse of String.
func ParsePoller(s string) (PollerKind, error) {
	for i, n := range pollerNames {
		if n == s {
			return PollerKind(i), nil
		}
	}
	return 0, fmt.Errorf("unknown poller %q (want auto, io_uring, epoll or poll)", s)
}

// poller is how a loop waits and what it learns readiness from. Every method is called on the loop, or before it runs.
//
// No method calls a handler. What a wait finds goes to Loop.ready (watches), Loop.cqes and the engine, so that the turn
// runs all of it afterwards in one order, whatever the poller.
type poller interface {
	kind() PollerKind
	// start is called once, on the thread that will wait.
	start() error
	// set makes w's interest w.want, for a new watch and for a changed one; 0 is none.
	set(w *Watch) error
	// drop ends w's interest. Events of it that are under way are not delivered.
	drop(w *Watch)
	// wait hands over what is queued and waits for at most timeout nanoseconds: 0 only looks, below 0 is for ever. An
	// early return without an event is no error; the loop just turns once more.
	wait(timeout int64) error
	// look is wait(0), without the system call where memory shows that there is nothing to hand over or to take.
	look() error
	// submit hands over what is queued without waiting. Where nothing ever is, it does nothing.
	submit() error
	// pending tells whether something is queued, or can be taken without waiting, that only wait passes on.
	pending() bool
	// fd is the descriptor by which a foreign loop can wait in wait's place.
	fd() (int, error)
	close() error
}

// pollerSetups make the pollers, in the order in which PollerAuto tries them.
var pollerSetups = [...]struct {
	kind PollerKind
	make func(*Loop) (poller, error)
}{
	{PollerIOUring, newUringPoller},
	{PollerEpoll, newEpollPoller},
	{PollerPoll, newPollPoller},
}

// choosePoller makes the poller that the options ask for. The reason says why it is this one.
func (l *Loop) choosePoller() error {
	want := l.opts.Poller
	var refused error
	for _, s := range pollerSetups {
		if want != PollerAuto && want != s.kind {
			continue
		}
		p, err := s.make(l)
		switch {
		case err == nil:
			l.poller = p
			l.reason = chosenBecause(want, refused)
			return nil
		case want != PollerAuto:
			return fmt.Errorf("set up poller %s: %w", want, err)
		case refused == nil:
			refused = fmt.Errorf("no %s: %w", s.kind, err)
		default:
			refused = fmt.Errorf("%w; no %s: %w", refused, s.kind, err)
		}
	}
	if refused == nil {
		return fmt.Errorf("set up poller %s: %w", want, syscall.EINVAL)
	}
	return fmt.Errorf("set up a poller: %w", refused)
}

func chosenBecause(want PollerKind, refused error) string {
	switch {
	case want != PollerAuto:
		return "asked for"
	case refused != nil:
		return refused.Error()
	}
	return "the best that there is"
}
