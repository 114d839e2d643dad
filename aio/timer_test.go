// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestTimersComeInOrder(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		delays := []int{5, 1, 3, 2, 4, 3, 1, 0, 20}
		type call struct{ ms, index int }
		var calls []call
		done := make(chan bool, 1)
		began := time.Now()
		start(t, o, func(l *Loop) {
			l.Post(func() { // in one turn, so that all count from the same moment
				for i, ms := range delays {
					l.Timer(time.Duration(ms)*time.Millisecond, timerFunc(func(*Timer) {
						calls = append(calls, call{ms, i})
						if early := time.Duration(ms)*time.Millisecond - time.Since(began); early > 0 {
							t.Errorf("timer of %d ms is %v early", ms, early)
						}
						if len(calls) == len(delays) {
							done <- true
						}
					}))
				}
			})
		})
		wait(t, done)
		if !slices.IsSortedFunc(calls, func(a, b call) int {
			if a.ms != b.ms {
				return a.ms - b.ms
			}
			return a.index - b.index
		}) {
			t.Errorf("order of calls %v", calls)
		}
	})
}

func TestTimerStoppedInAHandler(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		var ts [2]*Timer
		calls := 0
		done := make(chan bool, 1)
		r := start(t, o, func(l *Loop) {
			l.Post(func() {
				for i := range ts { // due in the same turn; the first stops the second
					ts[i] = l.Timer(time.Millisecond, timerFunc(func(self *Timer) {
						calls++
						if self.Stop() {
							t.Error("a timer that was called is still set")
						}
						if !ts[1-i].Stop() {
							t.Error("the other timer is not set")
						}
						l.Timer(5*time.Millisecond, timerFunc(func(*Timer) { done <- true }))
					}))
				}
			})
		})
		wait(t, done)
		r.do(func() {
			if calls != 1 {
				t.Errorf("%d calls", calls)
			}
		})
	})
}

// Set again in its own handler, a timer is due in a later turn, even without a delay.
func TestTimerSetAgainInItsHandler(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		done := make(chan bool, 1)
		var turns []uint64
		start(t, o, func(l *Loop) {
			l.Timer(-time.Second, timerFunc(func(self *Timer) {
				if turns = append(turns, l.Counters().Turns); len(turns) == 100 {
					done <- true
					return
				}
				self.Reset(0)
			}))
		})
		wait(t, done)
		if len(slices.Compact(turns)) != 100 {
			t.Errorf("called twice in a turn: %v", turns)
		}
	})
}

// Moved back and forth, a timer is due at its last time, once.
func TestTimerMoved(t *testing.T) {
	eachPoller(t, func(t *testing.T, o LoopOptions) {
		calls := make(chan string, 10)
		start(t, o, func(l *Loop) {
			late := l.Timer(time.Millisecond, timerFunc(func(*Timer) { calls <- "late" }))
			soon := l.Timer(time.Hour, timerFunc(func(*Timer) { calls <- "soon" }))
			l.Post(func() {
				late.Reset(30 * time.Millisecond)
				soon.Reset(2 * time.Millisecond)
				soon.Reset(time.Millisecond)
			})
		})
		if first, second := wait(t, calls), wait(t, calls); first != "soon" || second != "late" {
			t.Errorf("called %s, then %s", first, second)
		}
	})
}

// The heap against a sorted list.
func TestTimerHeap(t *testing.T) {
	dice := rand.New(rand.NewPCG(7, 7))
	l, err := NewLoop(&LoopOptions{Poller: PollerPoll})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	l.inTurn = true // so that the clock stands
	var got []string
	set := map[*Timer]string{}
	for i := range 300 {
		var self *Timer
		name := fmt.Sprint(i)
		self = l.Timer(time.Duration(dice.IntN(50)), timerFunc(func(*Timer) { got = append(got, name) }))
		set[self] = name
		if dice.IntN(3) == 0 {
			for victim := range set { // any
				if dice.IntN(2) == 0 {
					victim.Reset(time.Duration(dice.IntN(50)))
				} else if victim.Stop() {
					delete(set, victim)
				}
				break
			}
		}
	}
	left := make([]*Timer, 0, len(set))
	for tm := range set {
		left = append(left, tm)
	}
	slices.SortFunc(left, func(a, b *Timer) int {
		if a.at != b.at {
			return int(a.at - b.at)
		}
		return int(a.seq) - int(b.seq)
	})
	var want []string
	for _, tm := range left {
		want = append(want, set[tm])
	}
	l.now += 100
	l.runTimers()
	if !slices.Equal(got, want) {
		t.Errorf("called %v\nwant   %v", got, want)
	}
}
