// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"runtime"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/sys"
)

// mailbox is polled work as a guest's queue is: somebody puts work in and writes the eventfd only when he was asked to.
// It is used on the loop alone, so that a test can put work in at a known moment.
type mailbox struct {
	hook    PollHook
	loop    *Loop
	work    int
	armed   bool
	late    bool // work comes in while the other side is being told
	arms    int
	handled int
	then    func()
}

func newMailbox(l *Loop) *mailbox {
	m := &mailbox{loop: l}
	m.hook.H = m
	return m
}

func (m *mailbox) Pending() bool { return m.work > 0 }

func (m *mailbox) HandlePending() {
	m.handled += m.work
	m.work = 0
	if m.then != nil {
		m.then()
	}
	m.attend()
}

func (m *mailbox) Arm() bool {
	m.arms++
	m.armed = true
	if m.late {
		m.late = false
		m.work++
	}
	return m.work > 0
}

func (m *mailbox) attend() { m.armed = !m.loop.Attend(&m.hook) }

func both(window int64) windows { return windows{device: window, guest: window} }

// pollingLoop is a loop that this goroutine drives, with a window.
func pollingLoop(t *testing.T, o LoopOptions, window time.Duration) *Loop {
	t.Helper()
	// A ring belongs to the thread that enables it.
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	o.PollMax = max(window, 1)
	l, _, _ := diaryLoop(t, o)
	l.tid.Store(int64(sys.Gettid()))
	t.Cleanup(func() { l.tid.Store(0) })
	l.windows = both(int64(window))
	l.polledAt = nanotime()
	return l
}

func TestHookIsAttendedWhileTheLoopPolls(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		l := pollingLoop(t, o, 0)
		m := newMailbox(l)
		if m.attend(); !m.armed || l.hooks != nil {
			t.Fatal("a loop that does not poll attends")
		}
		l.opts.PollMax = time.Hour // it looks until it finds
		l.windows, l.credit = both(int64(time.Hour)), int64(time.Hour)
		if m.attend(); m.armed {
			t.Fatal("a loop that polls does not attend")
		}
		if l.Attend(&m.hook); l.hooks.next != nil {
			t.Error("attended twice")
		}
		// Work that is there is found without a sleep, in a turn that waits.
		m.work = 3
		l.turn(-1)
		if m.handled != 3 || m.arms != 0 || l.counters.Sleeps != 0 || l.counters.Polled != 1 {
			t.Errorf("handled %d, armed %d times, %+v", m.handled, m.arms, l.counters)
		}
		// Work is found, too, by a turn that something else brought.
		m.work = 1
		l.Post(func() {})
		l.turn(-1)
		if m.handled != 4 || l.counters.Sleeps != 0 {
			t.Errorf("handled %d, %+v", m.handled, l.counters)
		}
		l.Neglect(&m.hook)
		m.work = 1
		l.turn(int64(time.Microsecond))
		if m.handled != 4 || m.arms != 0 {
			t.Errorf("neglected, and handled %d, armed %d times", m.handled, m.arms)
		}
	})
}

func TestHookIsArmedBeforeASleep(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		l := pollingLoop(t, o, 10*time.Microsecond)
		m := newMailbox(l)
		m.attend()
		l.turn(int64(time.Microsecond)) // less than a window's first step: no polling
		if !m.armed || m.arms != 1 || l.hooks != nil || l.counters.Sleeps != 1 {
			t.Errorf("armed %v, %d times, %+v", m.armed, m.arms, l.counters)
		}
		// What comes in while the other side is told keeps the loop from its sleep.
		l.windows = both(10_000)
		m.attend()
		m.late = true
		l.turn(int64(time.Microsecond))
		if m.handled != 1 || l.counters.Sleeps != 1 {
			t.Errorf("handled %d, %+v", m.handled, l.counters)
		}
	})
}

// Handlers may take each other off the list, whether their turn has come or not.
func TestHooksThatNeglectOthers(t *testing.T) {
	l := pollingLoop(t, LoopOptions{Poller: PollerPoll}, time.Hour)
	boxes := make([]*mailbox, 4)
	for i := range boxes {
		m := newMailbox(l)
		boxes[i] = m
		m.work = 1
		m.then = func() {
			for _, other := range boxes {
				if other != m {
					l.Neglect(&other.hook)
				}
			}
		}
		m.attend()
	}
	l.runHooks()
	handled := 0
	for _, m := range boxes {
		handled += m.handled
	}
	if handled != 1 {
		t.Errorf("%d handled, though the first took the others off", handled)
	}
	if l.hooks == nil || l.hooks.next != nil {
		t.Error("not only the first is attended")
	}
}

// Polling stops when its share of the processor's time is used up, and the work is armed instead.
func TestPollingKeepsToItsBudget(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		l := pollingLoop(t, o, time.Hour)
		l.credit = 5 * windowMin // much less than the window
		l.polledAt = nanotime()
		if l.poll(-1) {
			t.Fatal("it found something")
		}
		if l.counters.Polls != 1 || l.credit > windowMin {
			t.Errorf("credit %d after polling in vain, %+v", l.credit, l.counters)
		}
		l.polledAt, l.credit = nanotime()+int64(time.Hour), 0 // no time has passed
		if l.poll(-1) || l.counters.Polls != 1 {
			t.Errorf("it polls on credit: %+v", l.counters)
		}
		l.polledAt = nanotime() - int64(time.Hour)
		l.credit = 0
		l.windows = both(windowMin)
		l.poll(-1)
		if l.credit > pollBurst {
			t.Errorf("credit %d is more than a burst", l.credit)
		}
	})
}

// A guest that pauses shuts its own window; a device that is slow shuts both.
func TestSlowDeviceEndsPolling(t *testing.T) {
	l := pollingLoop(t, LoopOptions{Poller: PollerPoll}, time.Microsecond)
	l.windows = both(500)
	l.sleep(int64(2 * time.Millisecond))
	if l.windows != (windows{device: 500}) {
		t.Errorf("%+v after a pause of the guest's", l.windows)
	}
	busy := l.engines[EngineThreads].(*diaryEngine)
	busy.queue = 1
	defer func() { busy.queue = 0 }()
	l.windows = both(500)
	l.sleep(int64(2 * time.Millisecond))
	if l.windows != both(0) {
		t.Errorf("%+v after a slow request", l.windows)
	}
}

// A batch is waited for longer than a single piece; the device is not, and what came in batches once is forgotten.
func TestBatchesWidenTheGuestsWindow(t *testing.T) {
	l := pollingLoop(t, LoopOptions{}, 1000)
	for _, c := range []struct {
		found int
		want  int64
	}{{0, 1000}, {1, 1000}, {16, 2000}, {47, 3000}, {64, 4000}, {1000, 4000}} {
		l.worth, l.caught = 0, 0
		if c.found > 0 {
			l.Found(c.found - c.found/2) // two queues
			l.Found(c.found / 2)
		}
		l.poll(1)
		if got := l.limit(&l.windows.guest); got != c.want {
			t.Errorf("%d at once: the guest's window may reach %d ns, want %d", c.found, got, c.want)
		}
		if got := l.limit(&l.windows.device); got != 1000 {
			t.Errorf("%d at once: the device's window may reach %d ns, want 1000", c.found, got)
		}
	}
	for range 100 {
		l.Found(1)
		l.poll(1)
	}
	if got := l.limit(&l.windows.guest); got != 1000 {
		t.Errorf("a hundred single pieces after a batch: the window may reach %d ns, want 1000", got)
	}
}
