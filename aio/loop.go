// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-blk/sluice/internal/invariant"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/uring"
)

// LoopOptions say what kind of loop [NewLoop] makes. The zero value is right for most.
type LoopOptions struct {
	// Poller is how the loop waits. PollerAuto takes the best that can be set up; any other is taken or NewLoop fails.
	Poller PollerKind
	// Unbatched hands each request to the kernel by itself, at once. It is for measuring what batching gives.
	Unbatched bool
	// Pin ties the loop's thread to processor CPU while it runs.
	Pin bool
	CPU int
	// PollMax is for how long at most a loop looks for work in vain before it sleeps. The actual window grows towards it
	// while looking pays and shrinks to nothing when it does not. Where work was found in memory in batches (see
	// [Loop.Found]) and no request is in flight it may be up to four times as long. 0 turns it off, which is right where
	// there is no processor to spare.
	PollMax time.Duration
	// RingEntries is how many entries the io_uring submission queue has, a power of two; 0 is 256. It bounds what leaves
	// in one system call, not how many requests a loop can carry.
	RingEntries uint32
	// AIOEvents is how many requests Linux AIO carries at a time; 0 is 1024. The system has a limit on the sum,
	// fs.aio-max-nr.
	AIOEvents int
	// Threads bounds the pool of the threads engine; 0 is 16.
	Threads int
	// FixedBuffers pins the memory that [Loop.RegisterMemory] tells of where direct requests of the io_uring engine use it,
	// which spares the kernel a tenth of their cost. See there for what the memory's owner must not do.
	FixedBuffers bool
	// Name tells this loop from others in messages; "" is "loop".
	Name string

	seams seams
}

// drainMax bounds how long an ending loop waits for requests in flight. Whoever ends a loop has drained it before, so
// that this is for mistakes and for devices that have stopped to answer: longer than a storage driver's own time-out
// would only turn a failed shutdown into a hung one.
const drainMax = 30 * time.Second

// Loop waits for descriptors, timers and completions on one thread and calls back on it. It is made by [NewLoop] and
// runs in [Loop.Run], or is driven by a foreign loop through [Loop.Fd], [Loop.Prepare] and [Loop.Dispatch].
//
// Post, Call, Stats and Poller may be called from any goroutine. Everything else must be called on the loop, that is
// inside one of its callbacks, or, before Run, by the goroutine that sets the loop up.
type Loop struct {
	opts    LoopOptions
	poller  poller
	reason  string
	ring    *uring.Ring              // the poller's; nil off io_uring
	engines [len(engineNames)]engine // by EngineKind; nil until first used

	// The turn.
	now         int64
	stamp       int64 // the latest reading of the clock
	inTurn      bool
	closed      bool
	sections    int
	skipped     int         // turns since the poller was last asked
	done        requestList // outcomes to be told
	ready       []*Watch
	cqes        []userCQE
	ends        turnEnds
	windows     windows   // for how long waits poll first
	hooks       *PollHook // what the loop looks for by itself
	looking     *PollHook // those of them that a turn has not come to yet
	caught      int       // pieces of work found in memory since the last wait
	worth       int       // the same for the last waits: the most of them, fading
	vain        int64     // nanoseconds that the wait under way has polled for nothing
	credit      int64     // nanoseconds that polling may still take
	polledAt    int64     // when credit was counted
	pins        *pinner   // nil until memory is registered
	failure     error     // the poller's, ends the loop
	yieldedAt   int64
	yieldedTurn uint64
	counters    Counters

	timers   timerHeap
	timerSeq uint64

	watches   []*Watch
	watchFree []int32
	watchGen  uint32
	watched   map[int]*Watch // by descriptor; touched by Watch and Close alone

	// What other goroutines touch.
	state      atomic.Uint32
	posted     atomic.Bool // posts is not empty
	stopping   atomic.Bool
	running    atomic.Bool
	tid        atomic.Int64
	postMu     sync.Mutex
	posts      []func()
	ended      bool
	postsSpare []func() // the loop's: the slice to swap in
	wakeMu     sync.RWMutex
	wakeFD     int
	over       chan struct{} // closed when the loop has ended

	last        Stats // valid when over is closed
	enginesGone [len(engineNames)]EngineCounters
}

// NewLoop makes a loop; nil is the zero [LoopOptions]. With PollerAuto what cannot be set up is replaced by the next best
// (see [Loop.Poller] for why); a poller asked for by name that cannot be set up is an error that names the remedy.
//
// The loop holds descriptors from here on: end it through Run, or with Close when it never ran.
func NewLoop(o *LoopOptions) (*Loop, error) {
	l := &Loop{wakeFD: -1, watched: make(map[int]*Watch), over: make(chan struct{})}
	if o != nil {
		l.opts = *o
	}
	l.opts.setDefaults()
	l.ready = make([]*Watch, 0, readyAtFirst)
	l.cqes = make([]userCQE, 0, readyAtFirst)
	l.now = nanotime()
	if err := l.setUp(); err != nil {
		return nil, errors.Join(fmt.Errorf("set up %s: %w", l.opts.Name, err), l.release())
	}
	return l, nil
}

// readyAtFirst is room for what one turn finds ready, more than one loop's queues and sockets; the slices grow beyond.
const readyAtFirst = 64

func (o *LoopOptions) setDefaults() {
	if o.RingEntries == 0 {
		o.RingEntries = 256
	}
	if o.AIOEvents == 0 {
		o.AIOEvents = 1024
	}
	if o.Threads == 0 {
		o.Threads = 16
	}
	if o.Name == "" {
		o.Name = "loop"
	}
	o.seams.setDefaults()
}

func (l *Loop) setUp() error {
	if err := l.choosePoller(); err != nil {
		return err
	}
	// Non-blocking, so that no write through it can ever stop the loop or a poster.
	fd, err := sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("make eventfd: %w (raise the limit on open files, ulimit -n, if it is EMFILE)", err)
	}
	l.wakeFD = fd
	_, err = l.Watch(fd, EventRead, (*wakeHandler)(l))
	return err
}

// Poller is how the loop waits, and why so. Safe for concurrent use.
func (l *Loop) Poller() (kind PollerKind, reason string) { return l.poller.kind(), l.reason }

// Name is the loop's name. Safe for concurrent use.
func (l *Loop) Name() string { return l.opts.Name }

// Now is the loop's clock: nanoseconds of a monotonic clock of no particular origin, read once a turn.
// Must be called on the loop, or before it runs.
func (l *Loop) Now() int64 {
	if !l.inTurn {
		l.now = nanotime()
		l.stamp = l.now
	}
	return l.now
}

// epoch is the origin of nanotime.
var epoch = time.Now()

// nanotime is the monotonic clock. time.Since reads no other.
func nanotime() int64 { return int64(time.Since(epoch)) }

// Run runs the loop until ctx ends. It locks the goroutine to its thread, ties the thread to a processor if the options
// say so, and makes a fault on memory a panic of this goroutine (see [debug.SetPanicOnFault]); all of that is undone at
// the end. A handler that panics is not caught.
//
// When ctx ends, what was posted before is run, requests in flight are waited for (bounded; whoever ends a loop drains it
// first), watches, engines and the poller are closed, and Run gives nil. The descriptors that the watches borrowed stay
// open. A loop runs once.
func (l *Loop) Run(ctx context.Context) error {
	l.postMu.Lock()
	again := l.running.Swap(true)
	l.postMu.Unlock()
	if again || l.closed {
		return fmt.Errorf("run %s: it has run before, or was closed", l.opts.Name)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	unpin, err := l.pin()
	if err != nil {
		return errors.Join(err, l.finish())
	}
	defer unpin()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer context.AfterFunc(ctx, func() { l.stopping.Store(true); l.wake() })()

	l.tid.Store(int64(sys.Gettid()))
	l.failure = l.poller.start()
	for l.failure == nil && !l.stopping.Load() {
		l.turn(-1)
	}
	l.drain()
	err = l.finish()
	l.tid.Store(0)
	return err
}

// pin ties the thread to the processor asked for; the function it gives unties it.
func (l *Loop) pin() (unpin func(), err error) {
	if !l.opts.Pin {
		return func() {}, nil
	}
	var before, set sys.CPUSet
	if err := sys.SchedGetaffinity(&before); err != nil {
		return nil, fmt.Errorf("read processor affinity of %s: %w", l.opts.Name, err)
	}
	set.Set(l.opts.CPU)
	if err := sys.SchedSetaffinity(&set); err != nil {
		return nil, fmt.Errorf("pin %s to processor %d: %w (it must exist and be allowed, see taskset -p)", l.opts.Name, l.opts.CPU, err)
	}
	return func() { _ = sys.SchedSetaffinity(&before) }, nil
}

// drain turns until nothing is posted, queued or in flight any more, for drainMax at most.
func (l *Loop) drain() {
	if p, ok := l.poller.(*uringPoller); ok {
		p.cancelUsers()
	}
	deadline := nanotime() + int64(drainMax)
	for l.failure == nil {
		left := deadline - nanotime()
		if left <= 0 {
			return
		}
		if !l.posted.Load() && !l.more() && l.carried() == 0 {
			return
		}
		l.turn(left)
	}
}

// carried counts the requests that the engines have not given back, and the entries of AddSQE that are in flight.
func (l *Loop) carried() int {
	n := 0
	if p, ok := l.poller.(*uringPoller); ok {
		n = p.users
	}
	for _, e := range l.engines {
		if e != nil {
			n += e.queued() + e.inflight()
		}
	}
	return n
}

// finish refuses further posts, runs the last ones and releases everything.
func (l *Loop) finish() error {
	l.postMu.Lock()
	l.ended = true
	l.postMu.Unlock()
	if l.failure == nil && (l.posted.Load() || l.more()) {
		l.work()
	}
	err := l.failure
	if n := l.carried(); n > 0 {
		err = errors.Join(err, fmt.Errorf("end %s: %d requests are still in flight (drain before the loop ends)", l.opts.Name, n))
	}
	return errors.Join(err, l.release())
}

// Close releases a loop that never ran, or one that a foreign loop drives. After Run, and a second time, it does nothing.
// It must not be called while Run runs, or inside a callback.
func (l *Loop) Close() error {
	if l.closed {
		return nil
	}
	if l.running.Load() {
		return fmt.Errorf("close %s: it runs (end the context of Run)", l.opts.Name)
	}
	return l.finish()
}

// release gives back what NewLoop and the engines took.
func (l *Loop) release() error {
	if l.closed {
		return nil
	}
	var errs []error
	if l.poller != nil {
		l.closeEngines()
		for _, w := range l.watches {
			if w != nil {
				w.Close()
			}
		}
		errs = append(errs, l.lookOnce(), l.poller.close())
		l.last = l.snapshot()
	}
	l.state.Store(stateNotified) // nobody writes the eventfd from here on
	l.wakeMu.Lock()
	if l.wakeFD >= 0 {
		errs = append(errs, sys.Close(l.wakeFD))
		l.wakeFD = -1
	}
	l.wakeMu.Unlock()
	l.closed = true
	close(l.over)
	return errors.Join(errs...)
}

// lookOnce hands the removal of the watches to the kernel. A ring that is closed with polls in flight lets go of their
// files only some time later.
func (l *Loop) lookOnce() error {
	if p, ok := l.poller.(*uringPoller); ok && p.started && l.failure == nil {
		return p.wait(0)
	}
	return nil
}

// closeEngines closes the engines that are empty. One that is not keeps its resources: its requests' memory is still
// the kernel's to write to.
func (l *Loop) closeEngines() {
	for i, e := range l.engines {
		if e == nil {
			continue
		}
		l.enginesGone[i] = *e.counters()
		if e.queued()+e.inflight() == 0 {
			e.close()
		}
		l.engines[i] = nil
	}
}

// onLoop tells whether the caller is on the running loop's thread.
func (l *Loop) onLoop() bool { return l.tid.Load() == int64(sys.Gettid()) }

// OnLoop tells whether the caller may use the loop: it is on the loop's thread, or the loop does not run.
// May be called from any goroutine.
func (l *Loop) OnLoop() bool { return l.tid.Load() == 0 || l.onLoop() }

// assertOnLoop stops builds with the invariants tag when the thread rule is broken.
func (l *Loop) assertOnLoop() {
	if invariant.Enabled {
		invariant.Assert(l.OnLoop(), "aio: called off the loop")
	}
}
