// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"time"

	"github.com/sluice-blk/sluice/aio"
)

// coalescer puts notifications off for as long as more completions can be expected to share them. It puts off only what
// the guest asked for, and nothing is ever dropped: what is owed is paid at the bound at the latest.
//
// There are three reasons to pay at once. Completions come too seldom for another one within the bound. Nothing is in
// flight, so that none will come: a guest with one request outstanding never waits. Or as much has been held back as is
// in flight: the guest had better send more before the device runs dry.
type coalescer struct {
	bound time.Duration // 0: off
	timer *aio.Timer
	owed  bool
	held  int   // completions that the owed notification tells of
	gap   int64 // nanoseconds from one completion to the next, a running average
	last  int64 // when the last ones were published
}

// gapWeight is how many completions the average looks back on.
const gapWeight = 8

// measure takes n completions into the average. A silence counts as four bounds, so that it is soon forgotten.
func (c *coalescer) measure(now int64, n int) {
	if n > 0 {
		gap := min((now-c.last)/int64(n), 4*int64(c.bound))
		c.gap += (gap - c.gap) / gapWeight
		c.last = now
	}
}

// pays tells whether what is owed is to be paid now.
func (c *coalescer) pays(inflight int) bool {
	return c.bound == 0 || inflight == 0 || c.held >= inflight || c.gap > int64(c.bound)
}

// notify calls the guest after n completions, if it asked for that (wanted) or did before.
func (q *queue) notify(n int, wanted bool, published int64) error {
	c := &q.calls
	q.told += uint64(n)
	if wanted || c.owed {
		if q.telling == 0 {
			q.tellingSince = published
		}
		q.telling += uint64(n)
	}
	if c.bound == 0 {
		if !wanted {
			return nil
		}
		return q.callGuest()
	}
	c.measure(q.loop.Now(), n)
	if !wanted && !c.owed {
		return nil
	}
	c.held += n
	if c.pays(q.inflight) {
		return q.callGuest()
	}
	if !c.owed {
		c.owed = true
		q.stats.Held++
		q.setBound()
	}
	return nil
}

func (q *queue) setBound() {
	c := &q.calls
	if c.timer == nil {
		c.timer = q.loop.Timer(c.bound, q)
	} else {
		c.timer.Reset(c.bound)
	}
}

// HandleTimer is the bound.
func (q *queue) HandleTimer(*aio.Timer) {
	if err := q.settleCalls(); err != nil {
		q.fail(err)
	}
}

// settleCalls pays what is owed.
func (q *queue) settleCalls() error {
	if !q.calls.owed {
		return nil
	}
	return q.callGuest()
}

func (q *queue) callGuest() error {
	c := &q.calls
	if c.owed {
		c.timer.Stop()
	}
	c.owed, c.held = false, 0
	if err := q.call.signal(); err != nil {
		return err
	}
	now := q.loop.Tick()
	q.record.notified(q.telling, q.told, now-q.tellingSince)
	if q.trace != nil {
		q.trace.Called(q.source, q.telling, now)
	}
	q.telling, q.told = 0, 0
	return nil
}
