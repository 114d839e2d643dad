// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/sys"
)

// Events is a set of conditions of a descriptor, in the bits of poll(2).
type Events uint32

const (
	// EventRead says that a read would not block.
	EventRead Events = sys.POLLIN
	// EventWrite says that a write would not block.
	EventWrite Events = sys.POLLOUT
	// EventError and EventHangup are told whether they were asked for or not, to every watch that asks for anything.
	EventError  Events = sys.POLLERR
	EventHangup Events = sys.POLLHUP
	// EventEdge asks to be told of news and not of a state: the handler is called when something was written since the
	// last call, and need not read what made the descriptor ready. It is meant for eventfds, whose counter nobody needs
	// to know, and saves the read. Where the poller has no edges the watch is level-triggered; see [Watch.Edge].
	EventEdge Events = sys.EPOLLET
)

// always are the events that nobody needs to ask for.
const always = EventError | EventHangup

// Handler hears that a descriptor is ready.
type Handler interface {
	// HandleReady is called on the loop, once a turn for as long as the condition holds (level-triggered, on every
	// poller). A handler that does not consume what made it ready is called again in the next turn. It may add, modify
	// and close any watch, its own too; a closed watch is not called again, not even for what was seen before.
	HandleReady(w *Watch, ev Events)
}

// Watch is one descriptor that a loop watches. It is made by [Loop.Watch].
type Watch struct {
	loop *Loop
	h    Handler
	fd   int
	want Events // what the owner asked for; 0 is nothing
	seen Events // what the last wait found, until it is dispatched

	index  int32  // place in Loop.watches
	gen    uint32 // of this use of that place: what a stale event does not match
	closed bool
	listed bool // in Loop.ready

	// The poller's own.
	armed   Events // epoll: what the kernel has been told. io_uring: what the poll in flight asks for
	slot    uint64 // io_uring: user_data of the poll in flight; 0 is none. poll: index+1 in the array
	rearm   bool   // io_uring: in the list of those to arm
	stopped bool   // io_uring, poll: the descriptor was found to be closed; quiet until modified
}

// Watch calls h whenever fd meets one of ev. ev 0 is a watch that waits to be modified. It borrows fd until the watch is
// closed: close the watch first, then the descriptor. A descriptor has at most one watch; dup(2) makes another one of it.
//
// The events come from the next wait on; none is delivered inside Watch. Errors: EBADF, EEXIST for a second watch, EPERM
// for a file that cannot be waited for (epoll only: regular files are always ready on the others).
//
// Must be called on the loop, or before it runs.
func (l *Loop) Watch(fd int, ev Events, h Handler) (*Watch, error) {
	l.assertOnLoop()
	if l.closed {
		return nil, fmt.Errorf("watch descriptor %d: %w", fd, ErrClosed)
	}
	if _, err := sys.FcntlGetfd(fd); err != nil {
		return nil, fmt.Errorf("watch descriptor %d: %w", fd, err)
	}
	if l.watched[fd] != nil {
		return nil, fmt.Errorf("watch descriptor %d: %w (it has a watch; close that one before the descriptor)", fd, syscall.EEXIST)
	}
	w := &Watch{loop: l, h: h, fd: fd, want: ev}
	l.enter(w)
	if err := l.poller.set(w); err != nil {
		l.leave(w)
		return nil, fmt.Errorf("watch descriptor %d: %w", fd, err)
	}
	return w, nil
}

// Edge tells whether the watch is told of edges, so that its handler need not consume what made it ready. It is asked in
// the handler, each time: a kernel that turns out to have no edges makes the watch level-triggered. Must be called on the
// loop.
func (w *Watch) Edge() bool { return w.want&EventEdge != 0 }

// Fd is the watched descriptor.
func (w *Watch) Fd() int { return w.fd }

// Modify makes ev what the watch asks for; 0 quietens it. What was seen but not dispatched yet is dropped as far as ev
// does not ask for it. Must be called on the loop, or before it runs.
func (w *Watch) Modify(ev Events) error {
	w.loop.assertOnLoop()
	if w.closed {
		return fmt.Errorf("modify watch of descriptor %d: %w", w.fd, ErrClosed)
	}
	if w.want == ev && !w.stopped {
		return nil
	}
	before := w.want
	w.want, w.stopped = ev, false
	if err := w.loop.poller.set(w); err != nil {
		w.want = before
		return fmt.Errorf("modify watch of descriptor %d: %w", w.fd, err)
	}
	return nil
}

// Close ends the watch: its handler is not called again. The descriptor stays open and is the owner's to close, now or
// later. A second Close does nothing. Must be called on the loop, or before it runs.
func (w *Watch) Close() {
	w.loop.assertOnLoop()
	if w.closed {
		return
	}
	w.closed = true
	w.loop.poller.drop(w)
	w.loop.leave(w)
}

// enter gives w a place in the table. A place's generation grows with every use, so that an event which names the
// place's last user is known to be stale.
func (l *Loop) enter(w *Watch) {
	l.watched[w.fd] = w
	if n := len(l.watchFree); n > 0 {
		w.index = l.watchFree[n-1]
		l.watchFree = l.watchFree[:n-1]
		l.watches[w.index] = w
	} else {
		w.index = int32(len(l.watches))
		l.watches = append(l.watches, w)
	}
	l.watchGen++
	w.gen = l.watchGen
}

func (l *Loop) leave(w *Watch) {
	delete(l.watched, w.fd)
	l.watches[w.index] = nil
	l.watchFree = append(l.watchFree, w.index)
	w.closed = true
}

// found notes that w met ev, for this turn's dispatch.
func (l *Loop) found(w *Watch, ev Events) {
	w.seen |= ev
	if !w.listed {
		w.listed = true
		l.ready = append(l.ready, w)
	}
}

// runReady calls the handlers of what the wait found. Handlers may close and modify watches further down the list.
func (l *Loop) runReady() {
	for i := 0; i < len(l.ready); i++ {
		w := l.ready[i]
		l.ready[i] = nil
		ev := w.seen
		w.seen, w.listed = 0, false
		if w.closed || w.want == 0 {
			continue
		}
		if ev &= w.want | always; ev != 0 {
			l.counters.Ready++
			w.h.HandleReady(w, ev)
		}
	}
	l.ready = l.ready[:0]
}
