// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"fmt"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/node/null"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
)

// sysCalls is how many system calls the data plane made: waits and looks, submissions that are not part of a wait, and
// notifications.
func (r *rig) sysCalls(e aio.EngineKind) (calls, requests uint64) {
	r.t.Helper()
	s := r.loop.Stats()
	d, err := r.dev.Stats(r.t.Context())
	must(r.t, err)
	calls = s.SysCalls + d.Notifications
	if e == aio.EngineLinuxAIO {
		calls += s.Engines[e].Submissions
	}
	return calls, d.Requests
}

// rounds sends so many requests at once, again and again, and waits for all of them each time, as a driver does that
// asks for one call at the end.
func (q *rigQueue) rounds(n, depth int) {
	q.rig.t.Helper()
	var reqs []*request
	for i := range depth {
		reqs = append(reqs, q.rig.standard(virtioblk.TypeIn, uint64(i*37%1024*8), 4096))
	}
	for range n {
		for _, req := range reqs {
			q.add(req)
		}
		q.ring()
		for q.d.Out() > 0 {
			q.d.ArmCalls(uint16(q.d.Out()))
			q.next()
		}
	}
}

// Goal: one system call a turn. Method: 64 requests a kick, whose reads are done within their submission, and the
// counters of the loop, the engine and the queue. On io_uring a kick is a wait, a submission that is the next wait, and a
// notification; on linux-aio the submission is a call of its own. Ten in a hundred leave room for the test's own look at
// the counters and for a loop that looks while the driver still adds.
func TestSystemCallsOfABusyQueue(t *testing.T) {
	const rounds, depth = 50, 64
	for _, e := range engineLoops {
		t.Run(fmt.Sprintf("%v/%v", e.engine, e.poller), func(t *testing.T) {
			r := newRig(t, quickImage(t, e.engine), rigOptions{loop: aio.LoopOptions{Poller: e.poller}})
			calls, requests := r.sysCalls(e.engine)
			r.queues[0].rounds(rounds, depth)
			after, done := r.sysCalls(e.engine)
			each := float64(after-calls) / float64(done-requests)
			t.Logf("%.3f system calls a request", each)
			if each > 0.1 {
				t.Errorf("%d system calls for %d requests", after-calls, done-requests)
			}
		})
	}
}

// Goal: depth 1 does not pay for depth 64. Method: one request at a time on io_uring, whose kick, submission and completion
// are two waits and a notification, and on a disk that answers at once, where they are one wait.
func TestSystemCallsOfOneRequest(t *testing.T) {
	const rounds = 200
	for _, c := range []struct {
		name string
		rig  func() *rig
		each float64
	}{
		{"io_uring", func() *rig {
			return newRig(t, quickImage(t, aio.EngineIOUring), rigOptions{loop: aio.LoopOptions{Poller: aio.PollerIOUring}})
		}, 3},
		{"null", func() *rig { return newRig(t, null.New(null.Options{Size: diskSize}), rigOptions{}) }, 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := c.rig()
			calls, requests := r.sysCalls(aio.EngineIOUring)
			r.queues[0].rounds(rounds, 1)
			after, done := r.sysCalls(aio.EngineIOUring)
			each := float64(after-calls) / float64(done-requests)
			t.Logf("%.3f system calls a request", each)
			if each > c.each+0.2 { // the loop may find its wake-up for the counters, and signals of the runtime
				t.Errorf("%d system calls for %d requests", after-calls, done-requests)
			}
			s := r.loop.Stats()
			if n := s.Engines[aio.EngineIOUring].Submissions; n > rounds {
				t.Errorf("%d submissions for %d requests", n, rounds)
			}
		})
	}
}
