// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/node/null"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
)

// imageIn makes an image with content in dir and opens it.
func imageIn(t *testing.T, dir string, size int, o file.Options) block.Node {
	t.Helper()
	o.Path = filepath.Join(dir, "image")
	b := make([]byte, size)
	for i := range b {
		b[i] = byte(i>>12) ^ byte(i)
	}
	must(t, os.WriteFile(o.Path, b, 0o600))
	n, err := file.Open(o)
	must(t, err)
	return n
}

// memoryDir is a directory on a memory file system, where the machine has one.
func memoryDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "sluice-test-")
	if err != nil {
		t.Skipf("no memory file system at /dev/shm: %v", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

var engineLoops = []struct {
	engine aio.EngineKind
	poller aio.PollerKind
}{
	{aio.EngineIOUring, aio.PollerIOUring},
	{aio.EngineLinuxAIO, aio.PollerIOUring},
	{aio.EngineLinuxAIO, aio.PollerEpoll},
	{aio.EngineLinuxAIO, aio.PollerPoll},
}

// quickImage is an image whose reads are done within their submission: for linux-aio a file in memory; for io_uring, which
// hands those to kernel workers, a file on disk that stands in the page cache.
func quickImage(t *testing.T, engine aio.EngineKind) block.Node {
	t.Helper()
	if engine == aio.EngineIOUring {
		return imageIn(t, t.TempDir(), 4<<20, file.Options{Engine: engine, Cache: block.CacheWriteback})
	}
	return imageIn(t, memoryDir(t), 4<<20, file.Options{Engine: engine})
}

// Goal: batching that can be counted. Method: 640 reads in 20 kicks of 32, each batch waited for, and the counters of the
// engine and the queue. A server that does not batch needs 640 submissions and, without the event index, 640
// notifications. Two turns for a kick now and then are honest: the loop may look while the driver still adds.
func TestReadsLeaveInBatches(t *testing.T) {
	const kicks, batch, most = 20, 32, 24
	for _, e := range engineLoops {
		for _, noEventIdx := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/%v/event index %v", e.engine, e.poller, !noEventIdx), func(t *testing.T) {
				n := quickImage(t, e.engine)
				r := newRig(t, n, rigOptions{loop: aio.LoopOptions{Poller: e.poller}, noEventIdx: noEventIdx, noMerge: true})
				q := r.queues[0]
				before := r.loop.Stats().Engines[e.engine]
				for k := range kicks {
					var reqs []*request
					for i := range batch {
						reqs = append(reqs, r.standard(virtioblk.TypeIn, uint64((k*batch+i)%1024*8), 4096))
						q.add(reqs[i])
					}
					q.ring()
					// The driver sleeps until the whole batch is back, as one that asks for a call at its end.
					for q.d.Out() > 0 {
						if !noEventIdx {
							q.d.ArmCalls(uint16(q.d.Out()))
						}
						q.next()
					}
					for _, req := range reqs {
						if s := virtioblk.Status(req.status.Bytes[0]); s != virtioblk.StatusOK {
							t.Fatalf("status %d", s)
						}
					}
				}
				after := r.loop.Stats().Engines[e.engine]
				stats, err := r.dev.Stats(t.Context())
				must(t, err)
				submissions, submitted := after.Submissions-before.Submissions, after.Requests-before.Requests
				t.Logf("%d requests in %d submissions, %d notifications", submitted, submissions, stats.Notifications)
				if submitted != kicks*batch || stats.Requests != kicks*batch {
					t.Errorf("%d requests submitted, %d taken from the ring; want %d", submitted, stats.Requests, kicks*batch)
				}
				if submissions > most {
					t.Errorf("%d submissions, want at most %d", submissions, most)
				}
				if stats.Notifications > most {
					t.Errorf("%d notifications, want at most %d", stats.Notifications, most)
				}
			})
		}
	}
}

// 32 requests that all complete in one turn cost one publication and one notification.
func TestOneTurnOneNotification(t *testing.T) {
	for _, noEventIdx := range []bool{false, true} {
		t.Run(fmt.Sprintf("event index %v", !noEventIdx), func(t *testing.T) {
			r := newRig(t, null.New(null.Options{Size: diskSize}), rigOptions{noEventIdx: noEventIdx})
			q := r.queues[0]
			for range 32 {
				q.add(r.standard(virtioblk.TypeIn, 0, 4096))
			}
			q.d.ArmCalls(32)
			q.ring()
			for q.d.Out() > 0 {
				q.next()
			}
			s, err := r.dev.Stats(t.Context())
			must(t, err)
			if s.Notifications != 1 || s.Publishes != 1 || s.Batches != 1 {
				t.Errorf("%d notifications, %d publications, %d batches; want 1 of each", s.Notifications, s.Publishes, s.Batches)
			}
		})
	}
}

// A ring that holds more than the first share begins with that share, so that the guest hears of it while the rest is taken;
// the shares grow, and all of it is served by one kick.
func TestAFullRingBeginsSmall(t *testing.T) {
	r := newRig(t, null.New(null.Options{Size: diskSize}), rigOptions{noEventIdx: true})
	q := r.queues[0]
	for range 256 {
		q.add(r.standard(virtioblk.TypeIn, 0, 512))
	}
	q.ring()
	for q.d.Out() > 0 {
		q.next()
	}
	s, err := r.dev.Stats(t.Context())
	must(t, err)
	// 32, 64, 128 and the rest.
	if s.Batches != 4 || s.Publishes != 4 || s.Kicks != 1 {
		t.Errorf("%d looks that found something, %d publications, %d kicks; want 4, 4, 1", s.Batches, s.Publishes, s.Kicks)
	}
}

// The same without batching, which is what the batching is measured against: each leaves and comes back by itself.
func TestUnbatchedLoopNotifiesEach(t *testing.T) {
	n := imageIn(t, memoryDir(t), 4<<20, file.Options{Engine: aio.EngineLinuxAIO})
	r := newRig(t, n, rigOptions{loop: aio.LoopOptions{Unbatched: true}, noEventIdx: true})
	q := r.queues[0]
	for i := range 32 {
		q.add(r.standard(virtioblk.TypeIn, uint64(8*i), 4096))
	}
	q.ring()
	for q.d.Out() > 0 {
		q.next()
	}
	s, err := r.dev.Stats(t.Context())
	must(t, err)
	if got := r.loop.Stats().Engines[aio.EngineLinuxAIO].Submissions; got != 32 {
		t.Errorf("%d submissions, want 32", got)
	}
	if s.Publishes != 32 {
		t.Errorf("%d publications, want 32", s.Publishes)
	}
}

// Goal: the walk of a request allocates nothing. Method: rounds of 32 reads, and the number of heap objects that the whole
// process made meanwhile, which a few of the runtime's own may add to but not thousands.
func TestWalkAllocatesNothing(t *testing.T) {
	for _, e := range engineLoops {
		t.Run(fmt.Sprintf("%v/%v", e.engine, e.poller), func(t *testing.T) {
			n := imageIn(t, memoryDir(t), 4<<20, file.Options{Engine: e.engine})
			r := newRig(t, n, rigOptions{loop: aio.LoopOptions{Poller: e.poller}})
			q := r.queues[0]
			var reqs []*request
			for i := range 32 {
				reqs = append(reqs, r.standard(virtioblk.TypeIn, uint64(8*i), 4096))
			}
			round := func() {
				for _, req := range reqs {
					q.add(req)
				}
				q.ring()
				for q.d.Out() > 0 {
					q.next()
				}
			}
			for range 20 {
				round()
			}
			const rounds = 300
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			for range rounds {
				round()
			}
			runtime.ReadMemStats(&after)
			if made := after.Mallocs - before.Mallocs; made > rounds {
				t.Errorf("%d objects were made in %d rounds of 32 requests", made, rounds)
			}
		})
	}
}

// A ring that holds more than the queue has slots is impossible; one that holds all of them at once is not.
func TestFullRing(t *testing.T) {
	for _, size := range []uint16{2, 128, 1024} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			n := imageIn(t, memoryDir(t), 4<<20, file.Options{})
			r := newRig(t, n, rigOptions{size: size})
			q := r.queues[0]
			var reqs []*request
			for i := range int(size) {
				reqs = append(reqs, r.standard(virtioblk.TypeIn, uint64(i%1024), 512))
			}
			for range 5 {
				for _, req := range reqs {
					q.add(req) // each by an indirect table, so that a chain takes one descriptor
				}
				q.ring()
				for q.d.Out() > 0 {
					q.next()
				}
			}
		})
	}
}
