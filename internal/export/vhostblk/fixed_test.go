// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"bytes"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/virtqtest"
)

// Guest memory is registered for as long as a queue runs in it, through a change of the table, and let go at the stop.
func TestGuestMemoryIsPinnedWhileAQueueRuns(t *testing.T) {
	n := imageIn(t, t.TempDir(), 1<<20, file.Options{Engine: aio.EngineIOUring, Cache: block.CacheNone})
	r := newRig(t, n, rigOptions{loop: aio.LoopOptions{Poller: aio.PollerIOUring, FixedBuffers: true}, queues: 2})
	data, err := r.mem.Alloc(4096, 4096)
	must(t, err)
	req := r.standard(virtioblk.TypeIn, 8, 0)
	req.data = data
	req.writable = append([]virtqtest.Segment{segment(data)}, req.writable...)
	read := func(q *rigQueue) {
		t.Helper()
		clear(data.Bytes)
		if status, _ := q.do(req); status != virtioblk.StatusOK {
			t.Fatalf("status %d", status)
		}
		want := make([]byte, 4096)
		for i := range want {
			want[i] = byte((4096+i)>>12) ^ byte(i)
		}
		if !bytes.Equal(data.Bytes, want) {
			t.Fatal("other bytes were read than are in the image")
		}
	}
	for range 3 {
		read(r.queues[0])
		read(r.queues[1])
	}
	pins := r.loop.Stats().Pins
	if pins.Refused != "" {
		t.Skipf("needs a kernel that registers memory: %s", pins.Refused)
	}
	if pins.Fixed < 4 || pins.Pinned == 0 {
		t.Errorf("%+v after six reads into one buffer", pins)
	}

	table, err := guestmem.NewMap([]guestmem.Region{r.mem.Region()})
	must(t, err)
	defer table.Release()
	must(t, r.dev.SetMem(table))
	for range 3 {
		read(r.queues[0])
	}
	if now := r.loop.Stats().Pins; now.Fixed < pins.Fixed+2 {
		t.Errorf("%+v after the memory table was replaced, %+v before", now, pins)
	}
	for i := range r.queues {
		_, err := r.dev.StopQueue(i)
		must(t, err)
	}
	if now := r.loop.Stats().Pins; now.Pinned != 0 {
		t.Errorf("%+v after the stop", now)
	}
}
