// SPDX-License-Identifier: Apache-2.0

package aio

import "context"

// Counters count what a loop did since it was made.
type Counters struct {
	Turns     uint64 // turns of the loop
	SysCalls  uint64 // system calls of the poller that wait, submit or look: io_uring_enter, epoll_pwait, ppoll
	Sleeps    uint64 // those of them that were allowed to sleep
	Polls     uint64 // times that the loop looked for work before it slept
	PollHits  uint64 // those of them that found some
	PollNanos uint64 // nanoseconds that they took
	Polled    uint64 // pieces of work that a PollHook showed
	Yields    uint64 // times that the loop passed through the Go scheduler before it slept
	Wakeups   uint64 // times that another goroutine had to write the eventfd
	Posted    uint64 // posted functions that were run
	Timers    uint64 // timers that were due
	Ready     uint64 // handlers of watches that were called
}

// Stats is a copy of a loop's counters, taken at one moment between two pieces of its work.
type Stats struct {
	Counters
	Poller  PollerKind
	Pins    PinCounters
	Engines [len(engineNames)]EngineCounters // by EngineKind; zeros for those that the loop has not used
}

// Counters are the loop's own, not a copy. Must be called on the loop, and read there.
func (l *Loop) Counters() *Counters {
	l.assertOnLoop()
	return &l.counters
}

// Stats copies the counters. While the loop runs, the loop makes the copy in its next turn and the caller waits for it.
//
// May be called from any goroutine; for a loop that a foreign loop drives, from the one that drives it.
func (l *Loop) Stats() Stats {
	if l.onLoop() {
		return l.snapshot()
	}
	if s, ok := l.atRest(); ok {
		return s
	}
	var s Stats
	if err := l.Call(context.Background(), func() error { s = l.snapshot(); return nil }); err != nil {
		<-l.over
		return l.last
	}
	return s
}

// atRest is the snapshot of a loop that Run does not drive yet. The lock keeps Run from beginning meanwhile.
func (l *Loop) atRest() (s Stats, ok bool) {
	l.postMu.Lock()
	defer l.postMu.Unlock()
	if l.running.Load() {
		return s, false
	}
	return l.snapshot(), true
}

func (l *Loop) snapshot() Stats {
	s := Stats{Counters: l.counters, Poller: l.poller.kind(), Engines: l.enginesGone}
	if l.pins != nil {
		s.Pins = l.pins.count
	}
	for i, e := range l.engines {
		if e != nil {
			s.Engines[i] = *e.counters()
		}
	}
	return s
}
