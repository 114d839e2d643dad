// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/node/null"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhostuser"
	"github.com/sluice-blk/sluice/internal/virtqtest"
)

// BenchmarkTurn is a kick of 64 reads of 4 KiB, from the driver's adding them to its taking them back, with driver and
// loop taking turns on one thread. So nothing waits, and what a change adds to the way of a request can be seen in the
// nanoseconds of an iteration, which is 64 requests.
func BenchmarkTurn(b *testing.B) {
	b.Run("null", func(b *testing.B) { benchTurn(b, null.New(null.Options{Size: 1 << 30})) })
	b.Run("memory file", func(b *testing.B) {
		dir, err := os.MkdirTemp("/dev/shm", "sluice-bench-")
		if err != nil {
			b.Skipf("no memory file system at /dev/shm: %v", err)
		}
		defer os.RemoveAll(dir)
		path := filepath.Join(dir, "image")
		if err := os.WriteFile(path, make([]byte, 4<<20), 0o600); err != nil {
			b.Fatal(err)
		}
		node, err := file.Open(file.Options{Path: path})
		if err != nil {
			b.Fatal(err)
		}
		benchTurn(b, node)
	})
}

func benchTurn(b *testing.B, node block.Node) {
	const depth = 64
	need := func(err error) {
		if err != nil {
			b.Helper()
			b.Fatal(err)
		}
	}
	l, err := aio.NewLoop(nil)
	need(err)
	_, err = l.Fd() // we drive it
	need(err)
	h := block.NewHandle(node, nil)
	face, err := h.Queue(l)
	need(err)
	info := h.Info()
	d := &Device{handle: h, info: info, capacity: uint64(info.Size) / virtioblk.SectorSize, opts: Options{Loops: []*aio.Loop{l}},
		faces: []*block.HandleQueue{face}, bells: []*ringer{{}}}
	d.queues, d.records = make([]*queue, 1), make([]*record, 1)
	d.makeRecord(0)
	mem, err := virtqtest.NewMemory(1<<30, 8<<20)
	need(err)
	table, err := guestmem.NewMap([]guestmem.Region{mem.Region()})
	need(err)
	driver, err := virtqtest.NewDriver(mem, virtqtest.DriverConfig{Size: 256, EventIdx: true, Indirect: true, TableSize: 4})
	need(err)
	kick, err := sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
	need(err)
	call, err := sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
	need(err)
	desc, avail, used := driver.Addrs()
	q, err := newQueue(d, vhostuser.Vring{Size: driver.Size(), Desc: desc, Avail: avail, Used: used, Mem: table, Kick: kick,
		Call: call, Err: -1, EventIdx: true, Indirect: true}, 0)
	need(err)
	need(q.start())

	var reqs [depth]request
	for i := range reqs {
		header, err := mem.Alloc(virtioblk.HeaderSize, 16)
		need(err)
		virtioblk.Header{Type: virtioblk.TypeIn, Sector: uint64(i * 8)}.Encode(header.Bytes)
		data, err := mem.Alloc(4096, 4096)
		need(err)
		status, err := mem.Alloc(1, 1)
		need(err)
		reqs[i].readable = []virtqtest.Segment{segment(header)}
		reqs[i].writable = []virtqtest.Segment{segment(data), segment(status)}
	}
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		for i := range reqs {
			driver.Add(reqs[i].readable, reqs[i].writable)
		}
		if driver.Publish() {
			need(sys.EventfdWrite(kick, 1))
		}
		driver.ArmCalls(depth)
		for driver.Out() > 0 {
			_, err := l.Prepare()
			need(err)
			need(l.Dispatch())
			for _, _, ok := driver.Used(); ok; _, _, ok = driver.Used() {
			}
		}
	}
	b.StopTimer()
	q.stop()
	q.release()
	need(face.Close())
	need(l.Close())
	need(h.Close())
	need(d.bells[0].close())
	table.Release()
	need(mem.Close())
	need(sys.Close(kick))
	need(sys.Close(call))
}
