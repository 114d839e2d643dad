// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/virtqtest"
)

// whereabouts is a node that counts which loop brought a request, by the offset's queue.
type whereabouts struct {
	block.Node
	loops []*aio.Loop

	mu     sync.Mutex
	seen   map[[2]int]int // by queue and loop
	strays int            // requests that came on another thread than their loop's
}

type whereaboutsQueue struct {
	block.Queue
	n    *whereabouts
	loop *aio.Loop
}

func (n *whereabouts) Queue(l *aio.Loop) (block.Queue, error) {
	q, err := n.Node.Queue(l)
	return &whereaboutsQueue{q, n, l}, err
}

func (q *whereaboutsQueue) Submit(r *block.Request) {
	q.n.mu.Lock()
	q.n.seen[[2]int{int(r.Offset >> 16), slices.Index(q.n.loops, q.loop)}]++
	if !q.loop.OnLoop() {
		q.n.strays++
	}
	q.n.mu.Unlock()
	q.Queue.Submit(r)
}

// Goal: each queue runs on the loop asked for, and nothing that one of them uses is another one's: the race detector looks
// on. Method: four guests' threads at the same time, each with a queue of its own, and a node that notes which loop it is
// called on.
func TestEachQueueRunsOnItsLoop(t *testing.T) {
	const rounds, depth = 40, 16
	loopOf := []int{1, 1, 0, 1}
	n := &whereabouts{Node: memDisk(t, mem.Options{}), seen: make(map[[2]int]int),
		loops: []*aio.Loop{startLoop(t, nil), startLoop(t, &aio.LoopOptions{Poller: aio.PollerEpoll})}}
	h := block.NewHandle(n, nil)
	defer h.Close()
	dev, err := New(h, &Options{Queues: 4, Loops: n.loops, LoopOf: loopOf})
	must(t, err)
	defer dev.Close()
	must(t, dev.SetFeatures(dev.Features()))
	m, err := virtqtest.NewMemory(1<<30, 16<<20)
	must(t, err)
	defer m.Close()
	table, err := guestmem.NewMap([]guestmem.Region{m.Region()})
	must(t, err)
	defer table.Release()
	r := &rig{t: t, dev: dev, mem: m, table: table}
	var guests sync.WaitGroup
	var queues []*rigQueue
	for i := range 4 {
		q := r.addQueueNow(t, i)
		queues = append(queues, q)
		var reqs []*request
		for k := range depth {
			reqs = append(reqs, r.standard(virtioblk.TypeIn, uint64(i)<<7+uint64(k*16%128), 512))
		}
		guests.Go(func() {
			for range rounds {
				for _, req := range reqs {
					q.add(req)
				}
				q.ring()
				for q.d.Out() > 0 {
					q.next()
				}
			}
		})
	}
	guests.Wait()
	for i, q := range queues {
		_, err := dev.StopQueue(i)
		must(t, errors.Join(err, sys.Close(q.kick), sys.Close(q.call)))
	}
	for at, count := range n.seen {
		if loopOf[at[0]] != at[1] {
			t.Errorf("%d requests of queue %d came on loop %d, want %d", count, at[0], at[1], loopOf[at[0]])
		}
	}
	if len(n.seen) != 4 || n.strays > 0 {
		t.Errorf("queues were seen on loops as %v, want each on one; %d requests came on no loop", n.seen, n.strays)
	}
}

func TestLoopsOfQueuesAreChecked(t *testing.T) {
	l := startLoop(t, nil)
	h := block.NewHandle(memDisk(t, mem.Options{}), nil)
	defer h.Close()
	for want, loopOf := range map[string][]int{
		"1 queues are given a loop, there are 2": {0},
		"queue 1 is given loop 1 of 1":           {0, 1},
		"queue 0 is given loop -1 of 1":          {-1, 0},
	} {
		d, err := New(h, &Options{Loops: []*aio.Loop{l}, Queues: 2, LoopOf: loopOf})
		if err == nil {
			must(t, d.Close())
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v; want an error with %q", loopOf, err, want)
		}
	}
}
