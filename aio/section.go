// SPDX-License-Identifier: Apache-2.0

package aio

import "github.com/sluice-blk/sluice/internal/invariant"

// Plug opens a section in which requests are kept back, so that they leave together. Sections nest: the last Unplug
// counts. Inside a turn everything is kept back until the turn's end anyway, so that sections serve code that submits
// outside one: before Run, or in a foreign loop.
//
// Must be called on the loop, or before it runs.
func (l *Loop) Plug() {
	l.assertOnLoop()
	l.sections++
}

// Unplug closes a section. Closing the outermost one hands what was kept back to the kernel, unless a turn is under way
// that will do it at its end. An Unplug without a Plug does nothing.
//
// Must be called on the loop, or before it runs.
func (l *Loop) Unplug() {
	l.assertOnLoop()
	invariant.Assert(l.sections > 0, "aio: Unplug without Plug")
	if l.sections == 0 {
		return
	}
	l.sections--
	if l.sections == 0 && !l.inTurn {
		l.Flush()
	}
}

// Flush hands what is kept back to the kernel now and leaves the sections as they are. Whoever waits for requests that
// may still be kept back must flush first, or waits for ever. No handler is called inside Flush.
//
// Must be called on the loop, or before it runs.
func (l *Loop) Flush() {
	l.assertOnLoop()
	l.flushEngines()
	l.note(l.poller.submit())
}

// plugged tells whether a request that is queued now leaves later by itself: at the end of the turn or of the section.
func (l *Loop) plugged() bool {
	return (l.inTurn || l.sections > 0) && !l.opts.Unbatched
}

// Unbatched tells whether the loop was made to hand on each request by itself. Users of AtTurnEnd then do their work at
// once, too.
func (l *Loop) Unbatched() bool { return l.opts.Unbatched }

func (l *Loop) flushEngines() {
	for _, e := range l.engines {
		if e != nil {
			e.flush()
		}
	}
}
