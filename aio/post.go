// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"context"
	"fmt"

	"github.com/sluice-blk/sluice/internal/invariant"
	"github.com/sluice-blk/sluice/internal/sys"
)

// What Loop.state says. It is one word so that the question "is it asleep?" and the note "look again" cannot miss each
// other: a waker first publishes its work and then swaps in notified; the loop first says awake and then looks for work,
// and falls asleep only by turning awake into asleep, which fails when somebody swapped in between. Go's atomics are in
// one total order, which is the full barrier that both sides need.
const (
	stateAwake    uint32 = iota // the loop is in a turn and will not see what is published from now on
	stateNotified               // somebody published work: the next wait must not sleep
	stateAsleep                 // the loop waits, or is about to: whoever notifies must write the eventfd
)

// wake makes the loop turn once more: it ends its sleep, or keeps it from falling asleep. Publish the work first. It costs
// a system call only when the loop sleeps. May be called from any goroutine.
func (l *Loop) wake() {
	if l.state.Load() == stateNotified {
		return // the loop has not looked yet, and will
	}
	if l.state.Swap(stateNotified) == stateAsleep {
		// The counter cannot overflow: the loop empties it once a turn. A closed loop has no eventfd and needs none.
		l.wakeMu.RLock()
		if l.wakeFD >= 0 {
			_ = sys.EventfdWrite(l.wakeFD, 1)
		}
		l.wakeMu.RUnlock()
	}
}

// Post runs fn on the loop, in a turn that begins after the call. Functions that one goroutine posts run in the order of
// their posting. Those posted before Run run in the first turn; those posted after the loop has ended never run.
//
// May be called from any goroutine, and on the loop, where fn runs in the next turn.
func (l *Loop) Post(fn func()) { l.post(fn) }

func (l *Loop) post(fn func()) bool {
	l.postMu.Lock()
	ended := l.ended
	if !ended {
		l.posts = append(l.posts, fn)
		l.posted.Store(true)
	}
	l.postMu.Unlock()
	if !ended {
		l.wake()
	}
	return !ended
}

// runPosted runs what has been posted until now.
func (l *Loop) runPosted() {
	if !l.posted.Load() {
		return
	}
	l.postMu.Lock()
	fns := l.posts
	l.posts = l.postsSpare[:0]
	l.posted.Store(false)
	l.postMu.Unlock()
	for i, fn := range fns {
		fns[i] = nil
		l.counters.Posted++
		fn()
	}
	l.postsSpare = fns
}

// Call runs fn on the loop and waits for its answer. It gives up waiting when ctx ends, but fn may run all the same. A
// loop that has ended, or ends before fn has run, gives [ErrClosed]; one that does not run yet makes it wait.
//
// May be called from any goroutine, but not on the loop, which it would wait for.
func (l *Loop) Call(ctx context.Context, fn func() error) error {
	if invariant.Enabled {
		invariant.Assert(!l.onLoop(), "aio: Loop.Call on the loop")
	}
	answer := make(chan error, 1)
	if !l.post(func() { answer <- fn() }) {
		return ErrClosed
	}
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return fmt.Errorf("wait for the loop: %w", context.Cause(ctx))
	case <-l.over:
		select { // it may have been among the last things that the loop did
		case err := <-answer:
			return err
		default:
			return ErrClosed
		}
	}
}

// wakeHandler empties the eventfd that ends a sleep. What it was written for is found by the turn itself.
type wakeHandler Loop

func (h *wakeHandler) HandleReady(w *Watch, _ Events) {
	h.counters.Wakeups++
	_, _ = sys.EventfdRead(w.fd) // EAGAIN: two writes, one read before
}
