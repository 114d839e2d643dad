// SPDX-License-Identifier: Apache-2.0

package aio

import "runtime"

const (
	// roundsMax bounds how often a turn runs the completions that completions caused, and the end work that end work
	// caused. A chain of requests that are all answered at once would otherwise keep everybody else waiting. What is left
	// is done in the next turn, before which the loop does not sleep.
	roundsMax = 64
	// skipsMax bounds how many turns in a row may leave the poller unasked because there was work at hand already: a disk
	// that completes in the act of submission must not shut out the sockets and kicks, and asking costs one call.
	skipsMax = 8
	// yieldAfter and yieldTurns say when a loop that is about to sleep passes through the Go scheduler first, see yield:
	// sooner than the 10 ms after which the runtime takes an interest in it, and not before enough turns share the cost,
	// which is that of two thread switches.
	yieldAfter = 8_000_000
	yieldTurns = 16
)

// TurnEnder does work that is worth doing once for everything that happened in a turn, such as telling a guest of a batch
// of completions.
type TurnEnder interface {
	// EndTurn is called on the loop after all handlers of the turn and before the engines hand over their queues.
	EndTurn()
}

// TurnEnd is one piece of end-of-turn work. It is meant to be embedded in its owner and used again and again.
type TurnEnd struct {
	H TurnEnder

	next  *TurnEnd
	asked bool
}

// turnEnds is a first-in, first-out list.
type turnEnds struct{ head, tail *TurnEnd }

// AtTurnEnd has t.H.EndTurn called at the end of this turn, once however often it is asked for. Asked for inside an
// EndTurn it is still done in the same turn. Outside a turn it is done at the end of the next, which comes at once.
//
// Must be called on the loop, or before it runs.
func (l *Loop) AtTurnEnd(t *TurnEnd) {
	l.assertOnLoop()
	if t.asked {
		return
	}
	t.asked, t.next = true, nil
	if l.ends.tail == nil {
		l.ends.head = t
	} else {
		l.ends.tail.next = t
	}
	l.ends.tail = t
}

// CompleteLater has r.Finish(err) called on the loop, in this turn if its handlers are not all done, else in the next,
// and never inside CompleteLater. Outcomes are told in the order of these calls. The request must be in no other list.
//
// Must be called on the loop, or before it runs.
func (l *Loop) CompleteLater(r *Request, err error) {
	l.assertOnLoop()
	r.err = err
	l.done.push(r)
}

// turn waits for at most limit nanoseconds (below 0: for ever) and does one turn's work.
func (l *Loop) turn(limit int64) {
	l.wait(limit)
	l.work()
}

// work is a turn after its wait: take what completed, call back, do the end work, queue what it all caused. The next wait
// hands that to the kernel.
func (l *Loop) work() {
	l.now = nanotime()
	l.stamp = l.now
	l.inTurn = true
	l.counters.Turns++
	l.reapEngines()
	l.runPosted()
	l.runCQEs()
	l.runDone()
	l.runReady()
	l.runHooks()
	l.runTimers()
	l.runDone()
	l.runEnds()
	l.flushEngines()
	if l.pins != nil && l.pins.places {
		l.pins.work()
	}
	l.inTurn = false
}

// wait ends when there is something to do.
func (l *Loop) wait(limit int64) {
	// Linux AIO on a memory file system completes inside the submission, which was a moment ago.
	l.reapEngines()
	timeout := l.timeout(limit)
	if timeout == 0 && l.skipped < skipsMax && l.more() && !l.poller.pending() {
		l.skipped++
		l.awake()
		return
	}
	l.skipped = 0
	if timeout != 0 && l.now-l.yieldedAt >= yieldAfter && l.counters.Turns-l.yieldedTurn >= yieldTurns {
		l.yield()
	}
	if timeout != 0 && l.opts.PollMax > 0 && l.poll(timeout) {
		l.awake()
		return
	}
	if timeout != 0 && l.hooks != nil && l.armHooks() {
		timeout = 0
	}
	if timeout != 0 && !l.state.CompareAndSwap(stateAwake, stateAsleep) {
		timeout = 0
	}
	if timeout == 0 {
		l.note(l.poller.wait(0))
	} else {
		l.sleep(timeout)
	}
	l.awake()
}

// yield passes through the Go scheduler, once what is queued is under way.
//
// A goroutine that is locked to its thread and only makes system calls is never scheduled anew. The runtime's monitor
// takes it for one that hogs its processor: from ten milliseconds on it takes the processor away at every look, in the
// middle of system calls, and because it found something looks again 20 microseconds later, for ever. That costs a
// twentieth of a core, and the loop a search for a processor each time.
func (l *Loop) yield() {
	l.yieldedAt, l.yieldedTurn = l.now, l.counters.Turns
	l.note(l.poller.submit())
	l.counters.Yields++
	runtime.Gosched()
}

// awake makes the loop's state awake: what is published from here on is not seen by this turn unless by chance.
func (l *Loop) awake() {
	if l.state.Load() != stateAwake {
		l.state.Store(stateAwake)
	}
}

// timeout is how long a wait may take: nothing when work is at hand, until the first timer, or limit.
func (l *Loop) timeout(limit int64) int64 {
	if l.more() {
		return 0
	}
	if len(l.timers) == 0 {
		return limit
	}
	left := max(l.timers[0].at-nanotime(), 0)
	if limit >= 0 {
		left = min(left, limit)
	}
	return left
}

// more tells whether work is at hand that no wait needs to bring.
func (l *Loop) more() bool {
	return l.done.n > 0 || len(l.ready) > 0 || l.ends.head != nil || len(l.cqes) > 0
}

func (l *Loop) note(err error) {
	if err != nil && l.failure == nil {
		l.failure = err
	}
}

func (l *Loop) reapEngines() {
	for _, e := range l.engines {
		if e != nil {
			e.reap()
		}
	}
}

// runDone tells the outcomes, and those that this causes.
func (l *Loop) runDone() {
	for range roundsMax {
		round := l.done
		if round.n == 0 {
			return
		}
		l.done = requestList{}
		for r := round.pop(); r != nil; r = round.pop() {
			err := r.err
			r.err = nil
			r.Finish(err)
		}
	}
}

func (l *Loop) runEnds() {
	for range roundsMax {
		t := l.ends.head
		if t == nil {
			return
		}
		l.ends = turnEnds{}
		for t != nil {
			next := t.next
			t.next, t.asked = nil, false // before the call, which may ask again
			t.H.EndTurn()
			t = next
		}
	}
}
