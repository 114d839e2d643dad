// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"fmt"
	"iter"
	"runtime/debug"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/invariant"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
	"github.com/sluice-blk/sluice/internal/sys"
)

// maxRoutines bounds how many requests of one image may wait for tables or copies at the same time. More wait for their turn.
const maxRoutines = 64

// routine is a coroutine of the loop's thread. It carries out one job after the other as straight-line code: where that has
// to wait for a child request it goes back to the loop, and the completion brings it on again. Nothing is handed to another
// thread, and only one routine of an image runs at a time.
type routine struct {
	h     *home
	next  func() (struct{}, bool)
	stop  func()
	yield func(struct{}) bool

	job    job
	idle   bool
	await  block.Request // the one request that the routine waits for
	err    error         // its outcome
	parts  [maxParts]part
	flying int  // parts on their way
	all    bool // waits for all of them, and not for any
	joins  bool // waits for parts
	failed error

	one   [1]block.IOVec // of do
	zero  [1]block.IOVec // of writeZeros
	mem   cursor         // the job's memory
	alloc metadata.Allocation
	head  []block.IOVec // what stands before a write in its new clusters
	tail  []block.IOVec // and behind
	ready func() bool   // what it is parked for
	link  *routine      // in the list of the free or the parked
}

// job is what a routine is given to do: a request, or something that the control plane wants.
type job struct {
	r  *block.Request
	fn func()
}

// newRoutine must be called on the loop, and not in a routine.
func newRoutine(h *home) *routine {
	c := &routine{h: h, idle: true}
	c.await.Done = c
	for i := range c.parts {
		c.parts[i].c = c
		c.parts[i].req.Done = &c.parts[i]
	}
	c.next, c.stop = iter.Pull(c.body)
	return c
}

// mistake is a panic of ours that leaves a coroutine, with the stack that it would lose there.
type mistake struct {
	what  any
	stack string
}

// Error is both.
func (m mistake) Error() string { return fmt.Sprintf("%v\n%s", m.what, m.stack) }

// body is the life of the coroutine.
func (c *routine) body(yield func(struct{}) bool) {
	sys.SetPanicOnFault()
	defer func() {
		if r := recover(); r != nil {
			panic(mistake{r, string(debug.Stack())}) // it goes on
		}
	}()
	c.yield = yield
	for {
		c.carryOut()
		c.job, c.idle = job{}, true
		if !yield(struct{}{}) {
			return
		}
	}
}

func (c *routine) carryOut() {
	if c.job.fn != nil {
		c.job.fn()
		return
	}
	c.serve(c.job.r)
}

// suspend goes back to the loop until somebody runs the routine again.
func (c *routine) suspend() {
	goesOn := c.yield(struct{}{})
	// An image is closed only when nothing is in flight, and only routines that are free are stopped.
	invariant.Assert(goesOn, "qcow2: a routine was stopped while it waits")
}

// do submits one request and waits for its outcome.
func (c *routine) do(q *block.HandleQueue, op block.Op, flags block.Flags, off, n int64, mem []block.IOVec) error {
	r := &c.await
	r.Op, r.Flags, r.Offset, r.Length, r.Mem = op, flags, off, n, mem
	q.Submit(r)
	c.suspend()
	r.Mem = nil
	return c.err
}

// Complete brings the outcome of do.
func (c *routine) Complete(_ *block.Request, err error) {
	c.err = err
	c.h.run(c)
}

// scheduler is the part of home that knows which routine runs when.
type scheduler struct {
	loop    *aio.Loop
	running *routine
	made    int
	free    *routine
	parked  routineList // until what they wait for holds
	jobs    jobList
	kick    block.Request
	kicked  bool
}

// begin queues a job. It starts in this turn, not inside begin. Must be called on the loop; a routine may.
func (h *home) begin(j job) {
	h.jobs.push(j)
	h.later()
}

// later has the loop look for routines that can go on.
func (h *home) later() {
	if !h.kicked {
		h.kicked = true
		h.loop.CompleteLater(&h.kick, nil)
	}
}

// kicker is home as the completer of the kick.
type kicker home

// Complete starts jobs.
func (k *kicker) Complete(*block.Request, error) {
	h := (*home)(k)
	h.kicked = false
	h.goOn()
}

// run resumes c, and then whoever may go on because of what it did. Must be called on the loop's own stack.
func (h *home) run(c *routine) {
	h.step(c)
	h.goOn()
}

// step resumes c until it waits or has done its job.
func (h *home) step(c *routine) {
	invariant.Assert(h.running == nil, "qcow2: a routine is resumed inside another")
	h.running = c
	c.next()
	h.running = nil
	if c.idle {
		c.link, h.free = h.free, c
	}
}

// goOn resumes those that wait for something that holds now, the longest waiting first, and then gives jobs to routines
// while there are both. What has begun goes before what has not, so that nobody starves.
func (h *home) goOn() {
	for {
		c := h.parked.take()
		if c == nil {
			c = h.employ()
		}
		if c == nil {
			return
		}
		h.step(c)
	}
}

// employ gives the next job to a routine, if there are both.
func (h *home) employ() *routine {
	if h.jobs.n == 0 {
		return nil
	}
	c := h.free
	switch {
	case c != nil:
		h.free, c.link = c.link, nil
	case h.made < maxRoutines:
		h.made++
		c = newRoutine(h)
	default:
		return nil
	}
	c.job, c.idle = h.jobs.pop(), false
	return c
}

// wait has the routine that runs wait until ready holds, which is looked at whenever a routine has run, and after changed.
func (h *home) wait(ready func() bool) {
	if ready() {
		return
	}
	c := h.running
	c.ready = ready
	h.parked.push(c)
	c.suspend()
}

// changed has the loop look at what routines wait for, later in this turn. It is for those who are no routine.
func (h *home) changed() {
	if h.parked.head != nil {
		h.later()
	}
}

// stopRoutines ends all coroutines, which are idle. Must be called on the loop.
func (h *home) stopRoutines() {
	for h.free != nil {
		c := h.free
		h.free, c.link = c.link, nil
		c.stop()
		h.made--
	}
	invariant.Assert(h.made == 0, "qcow2: an image is closed while a routine has something to do")
}

// routineList is first in, first out.
type routineList struct{ head, tail *routine }

func (l *routineList) push(c *routine) {
	c.link = nil
	if l.tail == nil {
		l.head = c
	} else {
		l.tail.link = c
	}
	l.tail = c
}

// take removes the first one whose condition holds.
func (l *routineList) take() *routine {
	var before *routine
	for c := l.head; c != nil; before, c = c, c.link {
		if !c.ready() {
			continue
		}
		if before == nil {
			l.head = c.link
		} else {
			before.link = c.link
		}
		if l.tail == c {
			l.tail = before
		}
		c.link, c.ready = nil, nil
		return c
	}
	return nil
}

// jobList is first in, first out, and keeps its memory.
type jobList struct {
	ring    []job
	head, n int
}

func (l *jobList) push(j job) {
	if l.n == len(l.ring) {
		bigger := make([]job, max(64, 2*l.n))
		for i := range l.n {
			bigger[i] = l.ring[(l.head+i)%len(l.ring)]
		}
		l.ring, l.head = bigger, 0
	}
	l.ring[(l.head+l.n)%len(l.ring)] = j
	l.n++
}

func (l *jobList) pop() job {
	j := l.ring[l.head]
	l.ring[l.head] = job{}
	l.head = (l.head + 1) % len(l.ring)
	l.n--
	return j
}
