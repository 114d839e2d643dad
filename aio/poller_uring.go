// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"fmt"
	"syscall"
	"time"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/uring"
)

const (
	// cqPerSQ makes the completion queue larger than the kernel's default of two: requests, watches and user entries stay
	// in flight long after their submission entries are free again, and completions that do not fit cost the kernel an
	// allocation each and us a system call.
	cqPerSQ = 4
	// sqTries bounds how often a full submission queue is handed over again while the kernel refuses it.
	sqTries = 4
	// backoff is how long the loop waits when the kernel takes no submission and has no completion either. Something
	// that is not ours has to give way first, and asking at once again would burn the processor that it needs.
	backoff = int64(time.Millisecond)
)

// uringPoller waits in io_uring_enter, which submits in the same call.
//
// A watch is a one-shot POLL_ADD that is made again after its event has been dispatched, which gives level-triggered
// readiness without a call of its own: the new POLL_ADD rides on the next wait. (Multishot polls are edge-triggered; a
// handler that takes one message a call would hang on them. They serve the watches that ask for edges.)
//
// A completion names its slot and the slot's generation. To take back a poll is to free its slot and to queue a
// POLL_REMOVE: whatever the kernel still has to say about it names a generation that is gone. So there are no states
// between "armed" and "not armed", and nothing waits for a removal.
type uringPoller struct {
	l       *Loop
	ring    *uring.Ring
	slots   slotTable
	started bool
	foreign bool

	engine  *uringEngine // nil until a file uses it
	fresh   uint32       // requests of the engine among the entries that the kernel has not taken yet
	users   int          // slots of AddSQE in use
	arm     []*Watch     // to be polled from the next wait on
	cancel  []uint64     // user data of polls to take back
	reaping [64]uring.CQE
}

func newUringPoller(l *Loop) (poller, error) {
	p := &uringPoller{l: l}
	if err := p.makeRing(); err != nil {
		return nil, err
	}
	return p, nil
}

// makeRing makes the ring. For Run it is made disabled, because the thread that enables it is the one that owns it; a
// foreign loop may drive us from any thread, and gets a ring that does not care.
func (p *uringPoller) makeRing() error {
	s := &p.l.opts.seams
	o := &uring.Options{CQEntries: s.cqEntries, Enter: p.enter, RDisabled: !p.foreign}
	if o.CQEntries == 0 {
		o.CQEntries = cqPerSQ * p.l.opts.RingEntries
	}
	make := s.newRing
	if p.foreign {
		make = uring.New
	}
	ring, err := make(p.l.opts.RingEntries, o)
	if err != nil {
		return err
	}
	p.ring, p.l.ring = ring, ring
	return nil
}

func (p *uringPoller) kind() PollerKind { return PollerIOUring }

func (p *uringPoller) start() error {
	if p.foreign {
		p.started = true
		return nil
	}
	if err := p.ring.Enable(); err != nil {
		return fmt.Errorf("start the ring: %w", err)
	}
	p.started = true
	// It saves the kernel a look-up at each call. A thread has few places for it, and we do as well without.
	_ = p.ring.RegisterRingFD()
	return nil
}

// fd makes the ring one that any thread may use, when it was not one before.
func (p *uringPoller) fd() (int, error) {
	if p.started {
		return p.ring.Fd(), nil
	}
	if p.ring.SQPending() != 0 {
		return -1, fmt.Errorf("give the ring to a foreign loop: %w (call Fd before the first request)", syscall.EBUSY)
	}
	old := p.ring
	p.foreign = true
	if err := p.makeRing(); err != nil {
		p.foreign = false
		return -1, err
	}
	_ = old.Close() // nothing was ever submitted to it
	return p.ring.Fd(), p.start()
}

func (p *uringPoller) close() error {
	p.l.ring = nil
	return p.ring.Close()
}

func (p *uringPoller) pending() bool {
	return len(p.arm) > 0 || len(p.cancel) > 0 ||
		p.ring.SQPending() > 0 || p.ring.CQReady() > 0 || p.ring.NeedsEnter()
}

// enter is io_uring_enter with a count. It is where the ring enters the kernel, always.
func (p *uringPoller) enter(fd int, toSubmit, minComplete, flags uint32, arg unsafe.Pointer, argSize uintptr) (int, error) {
	p.l.counters.SysCalls++
	if p.fresh > 0 {
		p.engine.handOver()
	}
	n, err := p.l.opts.seams.enter(fd, toSubmit, minComplete, flags, arg, argSize)
	if n > 0 && p.fresh > 0 {
		took := min(p.fresh, uint32(n))
		p.engine.count.Submissions++
		p.engine.count.Batches.Add(uint64(took))
		p.fresh -= took
	}
	return n, err
}

func (p *uringPoller) wait(timeout int64) error {
	p.queuePolls()
	if p.l.more() {
		timeout = 0 // the queue was full on the way, and completions were taken to make room
	} else if timeout != 0 && len(p.arm)+len(p.cancel) > 0 {
		timeout = backoff // the kernel takes nothing now; who is not polled must not be forgotten over a long sleep
	}
	var err error
	if timeout == 0 {
		_, err = p.ring.SubmitAndGetEvents()
	} else {
		_, err = p.ring.SubmitAndWait(1, time.Duration(timeout))
	}
	found := p.reap()
	for p.ring.CQOverflowed() && p.ring.FlushOverflow() == nil {
		// The queue was full, and what did not fit is as old as what did. Taken now, it is not news of a turn ago.
		n := p.reap()
		if n == 0 {
			break
		}
		found += n
	}
	if err = excused(err); err != nil || found > 0 || timeout == 0 {
		return p.fatal(err)
	}
	if p.ring.SQPending() > 0 {
		p.backOff(timeout)
	}
	return nil
}

// excused drops the errors after which nothing is lost and the next turn tries again.
func excused(err error) error {
	switch err { // bare errnos: the ring promises it
	case syscall.EINTR, syscall.ETIME, syscall.EAGAIN, syscall.EBUSY:
		return nil
	}
	return err
}

func (p *uringPoller) fatal(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("wait in io_uring_enter: %w", err)
}

// backOff waits a little for a completion when the kernel takes no submission.
func (p *uringPoller) backOff(timeout int64) {
	if timeout < 0 || timeout > backoff {
		timeout = backoff
	}
	_, _ = sys.PpollIn(p.ring.Fd(), timeout) // whatever comes of it, the next turn looks
}

// look enters the kernel only with something to hand over, or for what it holds back.
func (p *uringPoller) look() error {
	if len(p.arm)+len(p.cancel) > 0 || p.ring.SQPending() > 0 || p.ring.NeedsEnter() {
		return p.wait(0)
	}
	p.reap()
	return nil
}

// submit hands over what is queued and waits for nothing. On a ring that has not been started the entries stay until it
// is.
func (p *uringPoller) submit() error {
	if !p.started || p.ring.SQPending() == 0 {
		return nil
	}
	_, err := p.ring.Submit()
	return p.fatal(excused(err))
}

// sqe is a submission entry, or nil when the queue is full and the kernel takes nothing now. A full queue is handed over
// on the spot. Completions that stand in the way are taken, which calls nobody.
func (p *uringPoller) sqe() *uring.SQE {
	for range sqTries {
		if e := p.ring.GetSQE(); e != nil {
			return e
		}
		if !p.started {
			return nil
		}
		_, err := p.ring.Submit()
		p.reap()
		if excused(err) != nil {
			p.l.note(p.fatal(err))
			return nil
		}
	}
	return p.ring.GetSQE()
}

func (p *uringPoller) set(w *Watch) error {
	if w.slot != 0 && w.armed != w.want {
		p.disarm(w)
	}
	if w.want != 0 && w.slot == 0 && !w.rearm {
		w.rearm = true
		p.arm = append(p.arm, w)
	}
	return nil
}

func (p *uringPoller) drop(w *Watch) {
	if w.slot != 0 {
		p.disarm(w)
	}
}

// disarm takes back the poll in flight.
func (p *uringPoller) disarm(w *Watch) {
	p.cancel = append(p.cancel, w.slot)
	p.slots.give(w.slot)
	w.slot = 0
}

// queuePolls makes entries of what the watches asked for since the last wait: removals first, so that a descriptor that
// was closed and opened again under the same number is polled only for its new owner.
func (p *uringPoller) queuePolls() {
	done := 0
	for _, data := range p.cancel {
		e := p.sqe()
		if e == nil {
			break
		}
		e.PrepPollRemove(data)
		e.UserData = nobody
		done++
	}
	p.cancel = p.cancel[:copy(p.cancel, p.cancel[done:])]
	if len(p.cancel) > 0 {
		return
	}
	done = 0
	for _, w := range p.arm {
		if !p.queuePoll(w) {
			break
		}
		done++
	}
	n := copy(p.arm, p.arm[done:])
	clear(p.arm[n:])
	p.arm = p.arm[:n]
}

func (p *uringPoller) queuePoll(w *Watch) bool {
	if w.closed || w.want == 0 || w.slot != 0 {
		w.rearm = false
		return true
	}
	e := p.sqe()
	if e == nil {
		return false
	}
	w.rearm = false
	s, data := p.slots.take(slotWatch)
	s.watch = w
	w.slot, w.armed = data, w.want
	flags := uint32(0)
	if w.Edge() {
		flags = uring.IORING_POLL_ADD_MULTI
	}
	e.PrepPollAdd(w.fd, uint32(w.want&^EventEdge), flags)
	e.UserData = data
	return true
}

// reap takes all completions that are there to where the turn finds them, and counts them. It calls nobody.
func (p *uringPoller) reap() int {
	found := 0
	for {
		n := p.ring.Reap(p.reaping[:])
		for i := range p.reaping[:n] {
			p.route(&p.reaping[i])
		}
		if found += n; n < len(p.reaping) {
			return found
		}
	}
}

func (p *uringPoller) route(c *uring.CQE) {
	s := p.slots.at(c.UserData)
	if s == nil {
		return // nobody's, or of a generation that is gone
	}
	switch s.kind {
	case slotWatch:
		w := s.watch
		if !c.More() {
			p.slots.give(c.UserData)
			w.slot = 0
		}
		p.polled(w, c.Res)
	case slotRequest:
		r := s.request
		p.slots.give(c.UserData)
		p.engine.complete(r, int64(c.Res))
	case slotUser:
		p.l.cqes = append(p.l.cqes, userCQE{h: s.user, cqe: *c})
		if !c.More() {
			p.slots.give(c.UserData)
			p.users--
		}
	}
}

// polled takes the outcome of a watch's poll, and has it polled again after the dispatch of this turn.
func (p *uringPoller) polled(w *Watch, res int32) {
	switch {
	case res >= 0:
		p.l.found(w, Events(res))
	case syscall.Errno(-res) == syscall.EINVAL && w.Edge():
		w.want &^= EventEdge // no multishot polls before Linux 5.13
	case syscall.Errno(-res) != syscall.ECANCELED:
		// The owner closed the descriptor before the watch (EBADF), or it cannot be polled. Say it once.
		w.stopped = true
		p.l.found(w, always)
		return
	}
	_ = p.set(w) // it cannot fail
}
