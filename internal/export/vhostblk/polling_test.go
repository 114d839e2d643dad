// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"fmt"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/node/null"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
)

// Goal: while the loop polls the guest saves its kicks; when it sleeps no request is missed; and with nothing to do the
// loop does nothing. Method: reads one after the other with pauses of all kinds between them, so that requests meet the
// loop polling, arming and asleep, until some were found by polling; then the loop's counters over a silence.
func TestPollingSavesKicks(t *testing.T) {
	for _, p := range []aio.PollerKind{aio.PollerIOUring, aio.PollerEpoll, aio.PollerPoll} {
		for _, noEventIdx := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/event index %v", p, !noEventIdx), func(t *testing.T) {
				r := newRig(t, null.New(null.Options{Size: diskSize}),
					rigOptions{loop: aio.LoopOptions{Poller: p, PollMax: 200 * time.Microsecond}, noEventIdx: noEventIdx})
				q := r.queues[0]
				req := r.standard(virtioblk.TypeIn, 0, 4096)
				kicks, requests := 0, 0
				deadline := time.Now().Add(patience)
				for requests < 2000 || kicks == requests {
					q.add(req)
					if q.d.Publish() {
						kicks++
						must(t, sys.EventfdWrite(q.kick, 1))
					}
					q.next()
					requests++
					switch {
					case requests%16 == 0:
						time.Sleep(time.Duration(requests%5) * 20 * time.Microsecond)
					case time.Now().After(deadline):
						t.Fatalf("%d kicks for %d requests, %+v", kicks, requests, r.loop.Stats())
					}
				}
				s := r.loop.Stats()
				t.Logf("%d requests, %d kicks, %d polls of which %d found something", requests, kicks, s.Polls, s.PollHits)
				if s.Polled == 0 {
					t.Errorf("no request was found by polling: %+v", s)
				}

				time.Sleep(50 * time.Millisecond) // the silence in which the loop falls asleep
				before := r.loop.Stats()
				time.Sleep(200 * time.Millisecond)
				after := r.loop.Stats()
				if after.Turns-before.Turns > 10 || after.SysCalls-before.SysCalls > 10 {
					t.Errorf("an idle loop turned %d times", after.Turns-before.Turns)
				}
				if status, _ := q.do(req); status != virtioblk.StatusOK {
					t.Errorf("status %d of a request after a silence", status)
				}
			})
		}
	}
}

// A guest that takes its memory away under a loop that polls loses its queue; the loop goes on.
func TestMemoryGoneUnderAPollingLoop(t *testing.T) {
	r := newRig(t, null.New(null.Options{Size: diskSize}),
		rigOptions{loop: aio.LoopOptions{PollMax: time.Second}})
	q := r.queues[0]
	req := r.standard(virtioblk.TypeIn, 0, 4096)
	for range 200 {
		q.do(req)
	}
	must(t, sys.Ftruncate(r.mem.FD(), 0))
	must(t, sys.EventfdWrite(q.kick, 1))
	select {
	case <-r.broken:
	case <-time.After(patience):
		t.Fatal("the queue goes on in memory that is gone")
	}
	must(t, r.loop.Call(t.Context(), func() error { return nil }))
}
