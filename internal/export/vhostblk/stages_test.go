// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"testing"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/node/null"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
)

// send places n reads of size bytes, rings once, and waits for all.
func (q *rigQueue) send(n, size int) {
	q.rig.t.Helper()
	for i := range n {
		q.add(q.rig.standard(virtioblk.TypeIn, uint64(i*size/virtioblk.SectorSize), size))
	}
	q.ring()
	for range n {
		q.next()
	}
}

func (r *rig) view(index int) *QueueView {
	r.t.Helper()
	views, err := r.dev.Views(r.t.Context(), nil)
	must(r.t, err)
	for i := range views {
		if views[i].Index == index {
			return &views[i]
		}
	}
	r.t.Fatalf("queue %d is not among the %d that are told of", index, len(views))
	return nil
}

// Goal: the stages of a request leave nothing out and count nothing twice. Method: many batches over each engine and none,
// and their sums beside the sum of the totals.
func TestStagesAddUpToTheTotal(t *testing.T) {
	const kicks, batch = 20, 32
	check := func(t *testing.T, r *rig, carried uint64) {
		for range kicks {
			r.queues[0].send(batch, 4096)
		}
		v := r.view(0)
		const all = kicks * batch
		want := [StageCount]uint64{StageRing: all, StageGraph: all, StageQueued: carried, StageKernel: carried, StagePublish: all, StageTotal: all}
		var sum uint64
		for s := range StageCount {
			h := &v.Stages[s]
			if s == StageNotify {
				if h.Count() > all || v.Notifications == 0 || h.Count() < v.Notifications {
					t.Errorf("stage notify has %d requests, %d notifications", h.Count(), v.Notifications)
				}
				continue
			}
			if h.Count() != want[s] {
				t.Errorf("stage %v has %d requests, want %d", s, h.Count(), want[s])
			}
			if s != StageTotal {
				sum += h.Sum()
			}
		}
		if total := v.Stages[StageTotal].Sum(); sum != total {
			t.Errorf("the stages add up to %d ns, the total to %d", sum, total)
		}
		if v.PerBatch.Sum() != all || v.PerPublish.Sum() != all || v.PerNotification.Sum() > all {
			t.Errorf("batches of %d, publications of %d, notifications of %d requests", v.PerBatch.Sum(), v.PerPublish.Sum(), v.PerNotification.Sum())
		}
		if v.PerNotification.Count() != v.Notifications || v.PerPublish.Count() != v.Publishes || v.PerBatch.Count() != v.Batches {
			t.Error("batch sizes and counters disagree")
		}
		if v.Reads != all || v.ReadNanos == 0 || v.ReadNanos > v.Stages[StageTotal].Sum() || !v.Running || v.Loop != r.loop.Name() {
			t.Errorf("%d reads in %d ns on loop %q, running %v", v.Reads, v.ReadNanos, v.Loop, v.Running)
		}
	}
	t.Run("none", func(t *testing.T) {
		check(t, newRig(t, null.New(null.Options{Size: diskSize}), rigOptions{}), 0)
	})
	for _, e := range engineLoops {
		t.Run(e.engine.String()+" "+e.poller.String(), func(t *testing.T) {
			check(t, newRig(t, quickImage(t, e.engine), rigOptions{loop: aio.LoopOptions{Poller: e.poller}}), kicks*batch)
		})
	}
	t.Run("threads", func(t *testing.T) {
		n := imageIn(t, t.TempDir(), 4<<20, file.Options{Engine: aio.EngineThreads, Cache: block.CacheWriteback})
		check(t, newRig(t, n, rigOptions{}), kicks*batch)
	})
	t.Run("several steps a request", func(t *testing.T) {
		n := imageIn(t, memoryDir(t), 4<<20, file.Options{})
		check(t, newRig(t, &narrow{n}, rigOptions{}), kicks*batch)
	})
}

// narrow takes two sectors at a time.
type narrow struct{ block.Node }

func (n *narrow) Info() block.Info {
	i := n.Node.Info()
	i.MaxTransfer = 1024
	return i
}

// What waits in the graph is told as that: the null disk's latency is a timer's.
func TestAWaitInTheGraphIsSeenThere(t *testing.T) {
	const latency = 20 * time.Millisecond
	r := newRig(t, slowDisk(latency), rigOptions{})
	r.queues[0].send(8, 512)
	v := r.view(0)
	if got := v.Stages[StageGraph].Min(); got < uint64(latency)*9/10 { // counted from the turn, and the timer too
		t.Errorf("%v in the graph, want about %v at least", time.Duration(got), latency)
	}
	if got := v.Stages[StageTotal].Min(); got < v.Stages[StageGraph].Min() {
		t.Errorf("total %v is less than a stage of it", time.Duration(got))
	}
}

// A guest's restart does not make its disk's history begin anew.
func TestFiguresOutliveTheQueue(t *testing.T) {
	r := newRig(t, null.New(null.Options{Size: diskSize}), rigOptions{})
	q := r.queues[0]
	for round := range uint64(3) {
		q.send(10, 512)
		base, err := r.dev.StopQueue(0)
		must(t, err)
		if v := r.view(0); v.Requests != 10*(round+1) || v.Stages[StageTotal].Count() != v.Requests || v.Running {
			t.Errorf("round %d: %d requests, %d in the histogram, running %v", round, v.Requests, v.Stages[StageTotal].Count(), v.Running)
		}
		must(t, r.dev.StartQueue(q.vring(base, true)))
	}
}
