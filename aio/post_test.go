// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"
)

// Goal: no post is lost and none waits, whatever the loop is doing at that moment. The loop is met awake, asleep, and on
// the way from one to the other; a lost wake-up shows as a test that hangs.

func TestPostsFromManyGoroutines(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		const posters, posts = 8, 100_000 / 8
		r := start(t, o, nil)
		var seen [posters]int // touched on the loop alone
		all := make(chan bool, 1)
		left := posters * posts
		var group sync.WaitGroup
		for p := range posters {
			group.Go(func() {
				dice := rand.New(rand.NewPCG(1, uint64(p)))
				for i := range posts {
					r.Post(func() {
						if seen[p] != i {
							t.Errorf("poster %d: post %d runs after %d", p, i, seen[p]-1)
						}
						seen[p] = i + 1
						if left--; left == 0 {
							all <- true
						}
					})
					if dice.IntN(200) == 0 {
						runtime.Gosched() // the loop catches up and sleeps
					}
				}
			})
		}
		group.Wait()
		wait(t, all)
	})
}

// Each post is made when the one before has run, that is when the loop is just about to sleep.
func TestPostMeetsALoopThatFallsAsleep(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		r := start(t, o, nil)
		ran := make(chan int, 1)
		for i := range 5000 {
			r.Post(func() { ran <- i })
			if got := wait(t, ran); got != i {
				t.Fatalf("post %d: ran %d", i, got)
			}
		}
	})
}

// One post every few milliseconds finds the loop deep asleep. A loop that learns of it by a timer shows hundreds of
// milliseconds at every post; the bound on the median leaves room for a busy machine and none for that.
func TestPostDoesNotWaitForATimer(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		const posts = 200
		r := start(t, o, func(l *Loop) { l.Timer(time.Hour, timerFunc(func(*Timer) {})) })
		took := make([]time.Duration, posts)
		ran := make(chan time.Duration, 1)
		for i := range took {
			time.Sleep(3 * time.Millisecond)
			began := time.Now()
			r.Post(func() { ran <- time.Since(began) })
			took[i] = wait(t, ran)
		}
		slices.Sort(took)
		t.Logf("p50 %v, p99 %v", took[posts/2], took[posts*99/100])
		if p50 := took[posts/2]; p50 > 200*time.Millisecond {
			t.Errorf("half of the posts waited for more than %v", p50)
		}
	})
}

func TestPostOnTheLoopRunsInTheNextTurn(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		turns := make(chan uint64, 2)
		start(t, o, func(l *Loop) {
			l.Post(func() {
				turns <- l.Counters().Turns
				l.Post(func() { turns <- l.Counters().Turns })
			})
		})
		first := wait(t, turns)
		if second := wait(t, turns); second != first+1 {
			t.Errorf("posted in turn %d, ran in turn %d", first, second)
		}
	})
}

// A post to a loop that is awake costs no system call: the eventfd is written only to one that sleeps.
func TestPostToAnAwakeLoopWritesNoEventfd(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		r := start(t, o, nil)
		before := r.Stats().Wakeups
		ran := make(chan bool, 1)
		r.Post(func() {
			for range 1000 {
				r.Post(func() {})
			}
			r.Post(func() { ran <- true })
		})
		wait(t, ran)
		if n := r.Stats().Wakeups - before; n > 3 {
			t.Errorf("%d wake-ups for posts of the loop itself", n)
		}
	})
}

func TestCallGivesUp(t *testing.T) {
	l, err := NewLoop(nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	why := errors.New("enough")
	cancel(why)
	if err := l.Call(ctx, func() error { return nil }); !errors.Is(err, why) {
		t.Errorf("Call on a loop that does not run: %v, want %v", err, why)
	}
	answer := errors.New("answer")
	done := make(chan error, 1)
	go func() { done <- l.Call(context.Background(), func() error { return answer }) }()
	for began := time.Now(); time.Since(began) < time.Millisecond; { // before Close or after it: both must end
		runtime.Gosched()
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := wait(t, done); err != nil && !errors.Is(err, answer) && !errors.Is(err, ErrClosed) {
		t.Errorf("Call on a loop that closes: %v", err)
	}
}

// A waker that stops between publishing and notifying, or between the two halves of a sleep, is met in every order.
func TestWakeStates(t *testing.T) {
	l, err := NewLoop(&LoopOptions{Poller: PollerPoll})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, c := range []struct {
		name       string
		before     uint32
		after      uint32
		writes     bool
		sleepsNext bool
	}{
		{"awake", stateAwake, stateNotified, false, false},
		{"notified already", stateNotified, stateNotified, false, false},
		{"asleep", stateAsleep, stateNotified, true, false},
	} {
		l.state.Store(c.before)
		l.wake()
		if got := l.state.Load(); got != c.after {
			t.Errorf("%s: state %d after wake, want %d", c.name, got, c.after)
		}
		_ = l.poller.wait(0)
		if wrote := len(l.ready) == 1; wrote != c.writes {
			t.Errorf("%s: eventfd written: %v, want %v", c.name, wrote, c.writes)
		}
		l.runReady()
		if slept := l.state.CompareAndSwap(stateAwake, stateAsleep); slept != c.sleepsNext {
			t.Errorf("%s: falls asleep: %v", c.name, slept)
		}
	}
}
