// SPDX-License-Identifier: Apache-2.0

package aio

import "testing"

// engineTimes: each request carries when it was queued and handed over, both before its outcome is told, the queueing of a
// section before its one hand-over; and each submission is counted by its size.
func engineTimes(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	f := b.file(64 * page)
	asks := make([]*ask, 32)
	for round := range 3 {
		began := b.l.Tick()
		before := b.counters()
		b.l.Plug()
		for i := range asks {
			if round == 0 {
				asks[i] = b.ask(OpRead, int64(i)*page, b.buffer(page))
			}
			f.Submit(&asks[i].Request)
		}
		kept := b.l.Tick()
		b.l.Unplug()
		b.until(len(asks))
		for _, a := range asks {
			queued, submitted := a.Times()
			if queued < began || queued > kept || submitted < kept || submitted > b.l.Stamp() {
				t.Fatalf("queued at %d, submitted at %d, told at %d; want the first from %d to %d, and each after the one before",
					queued, submitted, b.l.Stamp(), began, kept)
			}
			if _, first := asks[0].Times(); submitted != first {
				t.Errorf("one section was submitted at two times")
			}
		}
		after := b.counters()
		sizes := after.Batches.Since(&before.Batches)
		if sizes.Sum() != 32 || sizes.Count() != after.Submissions-before.Submissions {
			t.Errorf("%d requests in %d batches, %d submissions", sizes.Sum(), sizes.Count(), after.Submissions-before.Submissions)
		}
	}
}

func TestTimesAreAdoptedFromTheFirstPart(t *testing.T) {
	var r Request
	first, second := Request{times: times{3, 4}}, Request{times: times{5, 6}}
	r.AdoptTimes(&first)
	r.AdoptTimes(&second)
	if queued, submitted := r.Times(); queued != 3 || submitted != 4 {
		t.Errorf("times are %d and %d, want those of the first part", queued, submitted)
	}
	r.ForgetTimes()
	if queued, submitted := r.Times(); queued != 0 || submitted != 0 {
		t.Error("forgotten times are still there")
	}
}

func TestTheStampNeverGoesBack(t *testing.T) {
	l, err := NewLoop(&LoopOptions{Poller: PollerPoll})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	last := l.Stamp()
	for range 100 {
		tick := l.Tick()
		if tick < last || l.Stamp() != tick {
			t.Fatalf("stamp %d after a tick of %d, %d before", l.Stamp(), tick, last)
		}
		l.turn(0)
		if l.Stamp() < tick {
			t.Fatalf("a turn put the stamp back from %d to %d", tick, l.Stamp())
		}
		last = l.Now()
	}
}
