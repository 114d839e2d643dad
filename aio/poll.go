// SPDX-License-Identifier: Apache-2.0

package aio

// Polled is work that shows in memory: the other side stores it there, and tells by a descriptor only when it was asked
// to. While the loop looks by itself nobody needs to be told, which saves both sides their calls.
type Polled interface {
	// Pending tells whether there is work, by a few loads. It is called on the loop, again and again while the loop polls
	// and once a turn.
	Pending() bool
	// HandlePending does the work. It is called on the loop like any handler, after Pending said yes.
	HandlePending()
	// Arm asks the other side to tell of work by the descriptor from now on, and then looks once more: true means that
	// some came before the other side could know. It is called on the loop before it sleeps.
	Arm() (more bool)
}

// PollHook is one piece of work that a loop can look for. It is meant to be embedded in its owner and used again and
// again.
type PollHook struct {
	H Polled

	next     *PollHook
	attended bool
}

// Attend asks the loop to look for h's work. Where it answers true it does so from now on, until the next call of
// HandlePending, and calls Arm before it sleeps, so that the other side need not tell. Where it answers false (the loop
// does not poll now, or another one drives it) the owner arms what wakes it by itself.
//
// Must be called on the loop.
func (l *Loop) Attend(h *PollHook) bool {
	l.assertOnLoop()
	if h.attended {
		return true
	}
	if l.windows == (windows{}) || l.tid.Load() == 0 {
		return false
	}
	h.attended, h.next = true, l.hooks
	l.hooks = h
	return true
}

// Neglect ends what Attend began. Arm is not called. Must be called on the loop.
func (l *Loop) Neglect(h *PollHook) {
	l.assertOnLoop()
	if h.attended {
		unlink(&l.hooks, h)
		unlink(&l.looking, h)
		h.attended, h.next = false, nil
	}
}

func unlink(list **PollHook, h *PollHook) {
	for at := list; *at != nil; at = &(*at).next {
		if *at == h {
			*at = h.next
			return
		}
	}
}

// pendingHook tells whether one of the hooks has work.
func (l *Loop) pendingHook() bool {
	for h := l.hooks; h != nil; h = h.next {
		if h.H.Pending() {
			return true
		}
	}
	return false
}

// runHooks does the work of the hooks that have some. Handlers may attend and neglect any.
func (l *Loop) runHooks() {
	l.looking, l.hooks = l.hooks, nil
	for l.looking != nil {
		h := l.looking
		l.looking, h.next, h.attended = h.next, nil, false
		if h.H.Pending() {
			l.counters.Polled++
			h.H.HandlePending()
			continue
		}
		h.attended, h.next = true, l.hooks
		l.hooks = h
	}
}

// armHooks has the work of all hooks wake the loop. It answers true when there is some already; who has some stays.
func (l *Loop) armHooks() (more bool) {
	for at := &l.hooks; *at != nil; {
		h := *at
		if h.H.Arm() {
			more, at = true, &h.next
			continue
		}
		*at, h.next, h.attended = h.next, nil, false
	}
	return more
}

// Found tells the loop that n pieces of work were taken from memory at once. Where many come together, meeting the next
// ones in time is worth as much more polling. Must be called on the loop.
func (l *Loop) Found(n int) {
	l.assertOnLoop()
	l.caught += n
}

const (
	// catchStep pieces of work at once are worth one more PollMax of looking for the next ones, up to catchMost of them.
	// Polling then costs a piece no more than it costs at depth 1.
	catchStep = 16
	catchMost = 4
	// windowMin is the first step of the polling window: below it looking costs more than it can find.
	windowMin = 4_000
	// pollShare bounds polling: it takes at most one part in so many of a processor's time, with pollBurst in advance. A
	// loop whose events come just before its window ends would otherwise take a whole one.
	pollShare = 2
	pollBurst = 1_000_000
)

// windows are for how long a wait polls first. There are two, since there are two things to wait for, which take
// different times. A guest that pauses says nothing about the device; but where the device takes longer than polling
// lasts, meeting the guest sooner gains little of the whole, and polling for it costs as much as ever: both are shut.
type windows struct {
	device int64 // while requests are in flight
	guest  int64 // while none is
}

// window is the one that the next wait goes by.
func (l *Loop) window() *int64 {
	if l.carried() > 0 {
		return &l.windows.device
	}
	return &l.windows.guest
}

// limit is how far the window may grow. A guest that comes with a batch is waited for longer.
func (l *Loop) limit(window *int64) int64 {
	limit := int64(l.opts.PollMax)
	if window == &l.windows.guest {
		limit *= int64(min(1+l.worth/catchStep, catchMost))
	}
	return limit
}

// poll looks for work without sleeping, for the length of the window at most and as long as the budget lasts. It tells
// whether it found any.
func (l *Loop) poll(timeout int64) bool {
	l.vain = 0
	if l.caught > 0 {
		l.worth, l.caught = max(l.caught, l.worth-l.worth/8), 0
	}
	which := l.window()
	window := min(*which, l.limit(which))
	if window == 0 {
		return false
	}
	began := nanotime()
	l.credit = min(l.credit+(began-l.polledAt)/pollShare, pollBurst)
	l.polledAt = began
	allowed := min(window, l.credit)
	if timeout > 0 {
		allowed = min(allowed, timeout)
	}
	if allowed < windowMin {
		return false
	}
	l.counters.Polls++
	found, now := false, began
	for !found && now-began < allowed {
		l.note(l.poller.look())
		l.reapEngines()
		found = l.more() || l.failure != nil || l.state.Load() == stateNotified || l.pendingHook()
		now = nanotime()
	}
	l.credit -= now - began
	l.counters.PollNanos += uint64(now - began)
	if found {
		l.counters.PollHits++
	} else {
		l.vain = now - began
	}
	return found
}

// sleep waits, and moves the polling window by the length of the whole wait: towards PollMax when the event came soon enough that polling would have met
// it, to nothing when it did not.
func (l *Loop) sleep(timeout int64) {
	l.counters.Sleeps++
	if l.opts.PollMax == 0 {
		l.note(l.poller.wait(timeout))
		return
	}
	window := l.window() // of what was waited for, whatever came
	limit := l.limit(window)
	device := window == &l.windows.device
	began := nanotime() - l.vain
	l.vain = 0
	l.note(l.poller.wait(timeout))
	switch slept := nanotime() - began; {
	case slept > limit && device:
		l.windows = windows{}
	case slept > limit:
		*window = 0
	case slept > *window:
		*window = min(max(2**window, windowMin), limit)
	}
}
