// SPDX-License-Identifier: Apache-2.0

// Package matrix runs the built-in guest driver against a whole daemon, in every combination that a user may choose.
//
// Goal: what is written is read, whatever engine, poller, file system, cache mode, depth and number of queues. Method: a
// short verified run of random reads, writes and flushes for each; the driver judges status, length, order and content,
// and reads everything back at the end.
package matrix

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/bench"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/daemon"
)

const imageBytes = 32 << 20

// places are the directories for images: on the disk, and in memory.
func places(t *testing.T) map[string]string {
	t.Helper()
	shm, err := os.MkdirTemp("/dev/shm", "sluice-matrix-")
	if err != nil {
		t.Fatalf("the matrix needs a file system in memory: %v", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(shm) })
	return map[string]string{"disk": t.TempDir(), "memory": shm}
}

// serve starts a daemon with one disk and answers its socket.
func serve(t *testing.T, loop daemon.LoopConfig, disk daemon.DiskConfig, options ...string) string {
	t.Helper()
	f, err := os.CreateTemp(filepath.Dir(disk.Path), "image-")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Truncate(imageBytes), f.Close()); err != nil {
		t.Fatal(err)
	}
	disk.Path = f.Name()
	if disk.Format == "qcow2" {
		image(t, disk.Path, "create", "-q", "-f", "qcow2", "-o", strings.Join(options, ","), disk.Path, strconv.Itoa(imageBytes))
	}
	socket := filepath.Join(t.TempDir(), "s")
	disk.Exports = []daemon.ExportConfig{{Socket: socket}}
	d, err := daemon.New(daemon.Config{Loops: []daemon.LoopConfig{loop}, Disks: []daemon.DiskConfig{disk}})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Stop(context.Background()); err != nil {
			t.Error(err)
		}
		if disk.Format == "qcow2" {
			image(t, disk.Path, "check", "-q", "-f", "qcow2", disk.Path)
		}
		if err := os.Remove(disk.Path); err != nil {
			t.Error(err)
		}
	})
	return socket
}

// image runs qemu-img, which must do it.
func image(t *testing.T, path string, args ...string) {
	t.Helper()
	if out, err := exec.Command("qemu-img", args...).CombinedOutput(); err != nil {
		t.Errorf("qemu-img %v of %s: %v\n%s", args[:1], path, err, out)
	}
}

func verify(t *testing.T, socket string, w bench.Workload) {
	t.Helper()
	w.RW, w.Verify, w.Fsync, w.Runtime = "randrw", true, 50, 100*time.Millisecond
	r, err := bench.Run(t.Context(), socket, w)
	if err != nil {
		t.Fatal(err)
	}
	if r.IOs() == 0 || r.Verified == 0 {
		t.Errorf("nothing was done: %d requests, %d blocks compared", r.IOs(), r.Verified)
	}
}

func TestEnginesDepthsAndQueues(t *testing.T) {
	for place, dir := range places(t) {
		for _, engine := range []aio.EngineKind{aio.EngineIOUring, aio.EngineLinuxAIO, aio.EngineThreads} {
			t.Run(fmt.Sprintf("%s/%v", place, engine), func(t *testing.T) {
				socket := serve(t, daemon.LoopConfig{}, daemon.DiskConfig{Path: dir + "/x", Engine: engine, Queues: 4})
				for _, depth := range []int{1, 64, 256} {
					for _, queues := range []int{1, 4} {
						t.Run(fmt.Sprintf("depth %d/queues %d", depth, queues), func(t *testing.T) {
							verify(t, socket, bench.Workload{IODepth: depth, NumJobs: queues})
						})
					}
				}
			})
		}
	}
}

func TestPollersAndBatching(t *testing.T) {
	dir := places(t)["disk"]
	for _, poller := range []aio.PollerKind{aio.PollerIOUring, aio.PollerEpoll, aio.PollerPoll} {
		for _, unbatched := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/batching %v", poller, !unbatched), func(t *testing.T) {
				socket := serve(t, daemon.LoopConfig{Poller: poller, Unbatched: unbatched}, daemon.DiskConfig{Path: dir + "/x"})
				verify(t, socket, bench.Workload{IODepth: 32})
				verify(t, socket, bench.Workload{IODepth: 8, BS: 64 << 10, NoEvent: true})
			})
		}
	}
}

func TestCacheModesAndBlockSizes(t *testing.T) {
	for place, dir := range places(t) {
		for _, cache := range []block.CacheMode{block.CacheNone, block.CacheWriteback, block.CacheWritethrough, block.CacheUnsafe} {
			t.Run(fmt.Sprintf("%s/%v", place, cache), func(t *testing.T) {
				socket := serve(t, daemon.LoopConfig{}, daemon.DiskConfig{Path: dir + "/x", Cache: cache})
				for _, bs := range []int{512, 1536, 4096, 128 << 10} {
					verify(t, socket, bench.Workload{IODepth: 16, BS: bs})
				}
			})
		}
	}
}

// All queues of an image are on one loop, whatever their number: its tables are shared by all of them.
func TestImages(t *testing.T) {
	for place, dir := range places(t) {
		for _, options := range []string{"cluster_size=64k", "cluster_size=4k,lazy_refcounts=on", "extended_l2=on", "cluster_size=64k,preallocation=metadata"} {
			t.Run(place+"/"+options, func(t *testing.T) {
				disk := daemon.DiskConfig{Path: dir + "/x", Format: "qcow2", Queues: 4, L2CacheSize: 64 << 10}
				socket := serve(t, daemon.LoopConfig{}, disk, options)
				for _, bs := range []int{512, 6144, 128 << 10} {
					for _, queues := range []int{1, 4} {
						verify(t, socket, bench.Workload{IODepth: 32, NumJobs: queues, BS: bs})
					}
				}
			})
		}
	}
}
