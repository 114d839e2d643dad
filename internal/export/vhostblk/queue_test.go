// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/node/null"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhostuser"
	"github.com/sluice-blk/sluice/internal/virtqtest"
	"github.com/sluice-blk/sluice/internal/virtqueue"
)

// slowDisk answers each request only after so long.
func slowDisk(latency time.Duration) block.Node {
	return null.New(null.Options{Size: diskSize, Latency: latency})
}

// A queue is stopped when what it took stands in the used ring; started again at the base that was answered, it goes on.
func TestStopDrainsAndStartGoesOn(t *testing.T) {
	r := newRig(t, slowDisk(50*time.Millisecond), rigOptions{})
	q := r.queues[0]
	for round := range 3 {
		for range 10 {
			q.add(r.standard(virtioblk.TypeIn, 0, 512))
		}
		q.ring()
		waitFor(t, "the queue to take what was offered", func() bool {
			s, err := r.dev.Stats(t.Context())
			must(t, err)
			return s.Requests == uint64(10*(round+1))
		})
		base, err := r.dev.StopQueue(0)
		must(t, err)
		if want := uint16(10 * (round + 1)); base != want || q.d.UsedIdx() != want {
			t.Errorf("base %d, used index %d; want %d", base, q.d.UsedIdx(), want)
		}
		for q.d.Out() > 0 {
			if _, _, ok := q.d.Used(); !ok {
				t.Fatalf("%d requests are missing after the stop: %v", q.d.Out(), q.d.Err())
			}
		}
		must(t, r.dev.StartQueue(q.vring(base, true)))
	}
	// What is offered while the queue is stopped is taken when it starts, though its kick is long gone.
	base, err := r.dev.StopQueue(0)
	must(t, err)
	q.add(r.standard(virtioblk.TypeIn, 0, 512))
	q.ring()
	must(t, sys.EventfdTake(q.kick))
	must(t, r.dev.StartQueue(q.vring(base, true)))
	q.next()
}

func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited too long for %s", what)
		}
	}
}

// A memory table that is replaced under load: requests in flight end in the memory that they came with, later ones use the
// new one, and the old one is given back.
func TestMemoryIsReplacedUnderLoad(t *testing.T) {
	r := newRig(t, slowDisk(2*time.Millisecond), rigOptions{})
	q := r.queues[0]
	var reqs []*request
	for range 64 {
		reqs = append(reqs, r.standard(virtioblk.TypeIn, 0, 4096))
	}
	extra, err := virtqtest.NewMemory(1<<40, 2<<20)
	must(t, err)
	defer extra.Close()
	current := r.table
	current.Retain()
	for round := range 100 {
		for _, req := range reqs {
			q.add(req)
		}
		q.ring()
		regions := []guestmem.Region{r.mem.Region()}
		if round%2 == 0 {
			regions = append(regions, extra.Region())
		}
		next, err := guestmem.NewMap(regions)
		must(t, err)
		must(t, r.dev.SetMem(next))
		current.Release()
		current = next
		for q.d.Out() > 0 {
			q.next()
		}
		for i, req := range reqs {
			if s := virtioblk.Status(req.status.Bytes[0]); s != virtioblk.StatusOK {
				t.Fatalf("round %d, request %d: status %d", round, i, s)
			}
			req.status.Bytes[0] = poison
		}
	}
	// A buffer in a region that is gone is an error of that request alone.
	gone := r.standard(virtioblk.TypeIn, 0, 512)
	b, err := extra.Alloc(512, 512)
	must(t, err)
	gone.writable[0] = segment(b)
	if status, _ := q.do(gone); status != virtioblk.StatusIOErr {
		t.Errorf("status %d for a buffer in a region that was removed, want an I/O error", status)
	}
	_, err = r.dev.StopQueue(0)
	must(t, err)
	current.Release()
}

// Memory that its owner truncates under a running queue stops that queue with a word, and the loop and the other queues go
// on.
func TestTruncatedMemoryStopsOneQueue(t *testing.T) {
	r := newRig(t, memDisk(t, mem.Options{}), rigOptions{queues: 2})
	lost, q, v := r.losable()
	must(t, r.dev.StartQueue(v))

	must(t, sys.Ftruncate(lost.FD(), 0))
	must(t, sys.EventfdWrite(q.kick, 1))
	select {
	case err := <-r.broken:
		if !errors.Is(err, errFault) {
			t.Errorf("the queue stopped for another reason: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("nobody was told")
	}
	if status, _ := r.queues[0].do(r.standard(virtioblk.TypeIn, 0, 512)); status != virtioblk.StatusOK {
		t.Errorf("the other queue: status %d", status)
	}
	_, err := r.dev.StopQueue(1)
	must(t, err)
}

// A header that vanishes while it is read breaks the queue, and costs no reference to its memory: what a front-end leaves
// behind is given back.
func TestAFaultWhileParsingKeepsNoMemory(t *testing.T) {
	r := newRig(t, memDisk(t, mem.Options{}), rigOptions{})
	lost, err := virtqtest.NewMemory(1<<40, 2<<20)
	must(t, err)
	defer lost.Close()
	b, err := lost.Alloc(virtioblk.HeaderSize, 16)
	must(t, err)
	before := memfdMappings(t)
	table, err := guestmem.NewMap([]guestmem.Region{r.mem.Region(), lost.Region()})
	must(t, err)
	must(t, r.dev.SetMem(table))
	table.Release() // the queue has its own reference
	must(t, sys.Ftruncate(lost.FD(), 0))
	req := r.standard(virtioblk.TypeIn, 0, 512)
	req.readable[0] = segment(b)
	r.queues[0].add(req)
	r.queues[0].ring()
	select {
	case err := <-r.broken:
		if !errors.Is(err, errFault) {
			t.Errorf("the queue stopped for another reason: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("nobody was told")
	}
	must(t, r.dev.SetMem(r.table))
	_, err = r.dev.StopQueue(0)
	must(t, err)
	if now := memfdMappings(t); now != before {
		t.Errorf("%d mappings of memfds, %d before", now, before)
	}
}

func memfdMappings(t *testing.T) int {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	must(t, err)
	return bytes.Count(maps, []byte("memfd:"))
}

// losable is a second memory, which the test may truncate, and queue 1, stopped, with its rings in there.
func (r *rig) losable() (*virtqtest.Memory, *rigQueue, vhostuser.Vring) {
	r.t.Helper()
	lost, err := virtqtest.NewMemory(1<<40, 2<<20)
	must(r.t, err)
	r.t.Cleanup(func() { must(r.t, lost.Close()) })
	table, err := guestmem.NewMap([]guestmem.Region{r.mem.Region(), lost.Region()})
	must(r.t, err)
	r.t.Cleanup(table.Release)
	_, err = r.dev.StopQueue(1)
	must(r.t, err)
	d, err := virtqtest.NewDriver(lost, virtqtest.DriverConfig{Size: 128, EventIdx: true, Indirect: true})
	must(r.t, err)
	q := &rigQueue{rig: r, index: 1, d: d, kick: r.queues[1].kick, call: r.queues[1].call}
	v := q.vring(0, true)
	v.Mem = table
	return lost, q, v
}

// A queue whose rings lie in memory that was truncated before it starts is refused, and the disk goes on.
func TestStartInTruncatedMemoryIsRefused(t *testing.T) {
	r := newRig(t, memDisk(t, mem.Options{}), rigOptions{queues: 2})
	lost, _, v := r.losable()
	must(t, sys.Ftruncate(lost.FD(), 0))
	if err := r.dev.StartQueue(v); !errors.Is(err, syscall.EFAULT) {
		t.Errorf("start: %v, want EFAULT", err)
	}
	if status, _ := r.queues[0].do(r.standard(virtioblk.TypeIn, 0, 512)); status != virtioblk.StatusOK {
		t.Errorf("the other queue: status %d", status)
	}
}

// Data that lies in truncated memory is one request's error: the disk in memory copies it itself, others leave it to the
// kernel.
func TestTruncatedDataIsAnError(t *testing.T) {
	r := newRig(t, memDisk(t, mem.Options{}), rigOptions{})
	lost, err := virtqtest.NewMemory(1<<40, 2<<20)
	must(t, err)
	defer lost.Close()
	table, err := guestmem.NewMap([]guestmem.Region{r.mem.Region(), lost.Region()})
	must(t, err)
	defer table.Release()
	must(t, r.dev.SetMem(table))
	b, err := lost.Alloc(4096, 4096)
	must(t, err)
	must(t, sys.Ftruncate(lost.FD(), 0))
	req := r.standard(virtioblk.TypeOut, 0, 4096)
	req.readable[1] = segment(b)
	if status, _ := r.queues[0].do(req); status != virtioblk.StatusIOErr {
		t.Errorf("status %d, want an I/O error", status)
	}
	if status, _ := r.queues[0].do(r.standard(virtioblk.TypeIn, 0, 512)); status != virtioblk.StatusOK {
		t.Error("a good read afterwards fails")
	}
}

// A driver that breaks its ring is told by the error descriptor and is left alone from then on; a new start serves it.
func TestBrokenRingIsToldAndStartsAnew(t *testing.T) {
	r := newRig(t, memDisk(t, mem.Options{}), rigOptions{})
	q := r.queues[0]
	_, err := r.dev.StopQueue(0)
	must(t, err)
	v := q.vring(0, true)
	v.Err, err = sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
	must(t, err)
	defer sys.Close(v.Err)
	must(t, r.dev.StartQueue(v))
	q.d.SetAvailIdx(q.d.Size() + 6)
	must(t, sys.EventfdWrite(q.kick, 1))
	err = <-r.broken
	if broken := new(virtqueue.BrokenError); !errors.As(err, &broken) {
		t.Errorf("the queue stopped for another reason: %v", err)
	}
	waitFor(t, "the error descriptor", func() bool { return sys.EventfdTake(v.Err) == nil })
	_, err = r.dev.StopQueue(0)
	must(t, err)
	q.d.Reset()
	must(t, r.dev.StartQueue(q.vring(0, true)))
	if status, _ := q.do(r.standard(virtioblk.TypeIn, 0, 512)); status != virtioblk.StatusOK {
		t.Errorf("after a new start: status %d", status)
	}
}

// A call descriptor that is full and would block its writer must not hold the loop.
func TestFullCallDescriptorHoldsNobody(t *testing.T) {
	for _, blocking := range []bool{true, false} {
		t.Run(fmt.Sprintf("blocking %v", blocking), func(t *testing.T) {
			r := newRig(t, memDisk(t, mem.Options{}), rigOptions{blockingCall: blocking, noEventIdx: true, queues: 2})
			q := r.queues[0]
			must(t, sys.EventfdWrite(q.call, 1<<64-2))
			for range 3 {
				q.add(r.standard(virtioblk.TypeIn, 0, 512))
				q.ring()
				waitFor(t, "the used index", func() bool { _, _, ok := q.d.Used(); return ok })
			}
			if status, _ := r.queues[1].do(r.standard(virtioblk.TypeIn, 0, 512)); status != virtioblk.StatusOK {
				t.Errorf("the other queue: status %d", status)
			}
			// Emptied, it calls again.
			must(t, sys.EventfdTake(q.call))
			if status, _ := q.do(r.standard(virtioblk.TypeIn, 0, 512)); status != virtioblk.StatusOK {
				t.Errorf("status %d", status)
			}
		})
	}
}

func TestDescriptorsThatAreNoEventfds(t *testing.T) {
	r := newRig(t, memDisk(t, mem.Options{}), rigOptions{})
	q := r.queues[0]
	_, err := r.dev.StopQueue(0)
	must(t, err)
	for _, name := range []string{"kick", "call"} {
		v := q.vring(0, true)
		if name == "kick" {
			v.Kick = r.mem.FD()
		} else {
			v.Call = r.mem.FD()
		}
		if err := r.dev.StartQueue(v); err == nil {
			t.Errorf("a file was taken as the %s descriptor", name)
		}
	}
	must(t, r.dev.StartQueue(q.vring(0, true)))
	if err := r.dev.SetCall(0, r.mem.FD()); err == nil {
		t.Error("a file was taken as the new call descriptor")
	}
	must(t, r.dev.SetCall(0, -1))
	must(t, r.dev.SetCall(0, q.call))
	if status, _ := q.do(r.standard(virtioblk.TypeIn, 0, 512)); status != virtioblk.StatusOK {
		t.Errorf("status %d", status)
	}
}

// The write cache is told truly: the configuration byte is what the disk does, the driver can switch it, and a driver that
// never flushes gets a disk that needs no flushes.
func TestWriteCache(t *testing.T) {
	const wce, flush = virtioblk.FeatureConfigWCE, virtioblk.FeatureFlush
	for _, c := range []struct {
		name     string
		cache    block.CacheMode
		features uint64
		write    int // to the configuration byte; -1: none
		refused  bool
		told     byte
		survives bool // a completed write survives a crash
	}{
		{"write-back", block.CacheDefault, wce | flush, -1, false, 1, false},
		{"write-back, switched off", block.CacheDefault, wce | flush, 0, false, 0, true},
		{"write-back, off and on", block.CacheDefault, wce | flush, 1, false, 1, false},
		{"write-back, no CONFIG_WCE", block.CacheDefault, flush, -1, false, 1, false},
		{"write-back, no CONFIG_WCE, written all the same", block.CacheDefault, flush, 0, true, 1, false},
		{"write-back, driver without flush", block.CacheDefault, 1 << 40, -1, false, 1, true},
		{"write-through", block.CacheWritethrough, wce | flush, -1, false, 0, true},
		{"nonsense", block.CacheDefault, wce | flush, 2, true, 1, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			n, err := mem.New(mem.Options{Size: diskSize, Journal: true})
			must(t, err)
			r := newRig(t, n, rigOptions{features: c.features, handle: block.HandleOptions{Cache: c.cache}})
			if c.write >= 0 {
				err := r.dev.WriteConfig(virtioblk.OffsetWriteback, []byte{byte(c.write)})
				if (err != nil) != c.refused {
					t.Errorf("write the byte: %v", err)
				}
			}
			var told [1]byte
			must(t, r.dev.ReadConfig(virtioblk.OffsetWriteback, told[:]))
			if told[0] != c.told {
				t.Errorf("the byte is %d, want %d", told[0], c.told)
			}
			write := r.standard(virtioblk.TypeOut, 0, 512)
			copy(write.data.Bytes, bytes.Repeat([]byte{0x77}, 512))
			if status, _ := r.queues[0].do(write); status != virtioblk.StatusOK {
				t.Fatalf("status %d", status)
			}
			clone, err := n.CrashClone(func(int64) bool { return false })
			must(t, err)
			if got := firstByte(t, clone) == 0x77; got != c.survives {
				t.Errorf("the write survives a crash: %v, want %v", got, c.survives)
			}
			if status, _ := r.queues[0].do(r.standard(virtioblk.TypeFlush, 0, 0)); status != virtioblk.StatusOK {
				t.Fatalf("flush: status %d", status)
			}
			clone, err = n.CrashClone(func(int64) bool { return false })
			must(t, err)
			if firstByte(t, clone) != 0x77 {
				t.Error("a flushed write does not survive a crash")
			}
		})
	}
}

// A guest that switches the cache off sends no flush from then on: what it wrote before is made durable by the switch.
func TestSwitchingTheCacheOffFlushes(t *testing.T) {
	n, err := mem.New(mem.Options{Size: diskSize, Journal: true})
	must(t, err)
	r := newRig(t, n, rigOptions{})
	write := r.standard(virtioblk.TypeOut, 0, 512)
	copy(write.data.Bytes, bytes.Repeat([]byte{0x77}, 512))
	if status, _ := r.queues[0].do(write); status != virtioblk.StatusOK {
		t.Fatalf("status %d", status)
	}
	must(t, r.dev.WriteConfig(virtioblk.OffsetWriteback, []byte{0}))
	clone, err := n.CrashClone(func(int64) bool { return false })
	must(t, err)
	if firstByte(t, clone) != 0x77 {
		t.Error("a write before the switch does not survive a crash after it")
	}
}

// A disk may have two guests. One that cannot flush keeps its durable writes when the other, which can, comes.
func TestWriteCacheIsEachGuestsOwn(t *testing.T) {
	n, err := mem.New(mem.Options{Size: diskSize, Journal: true})
	must(t, err)
	r := newRig(t, n, rigOptions{features: 1 << 40})
	other, err := New(r.handle, &Options{Loops: []*aio.Loop{r.loop}})
	must(t, err)
	defer other.Close()
	must(t, other.SetFeatures(other.Features()))
	other.Reset()
	write := r.standard(virtioblk.TypeOut, 0, 512)
	copy(write.data.Bytes, bytes.Repeat([]byte{0x77}, 512))
	if status, _ := r.queues[0].do(write); status != virtioblk.StatusOK {
		t.Fatalf("status %d", status)
	}
	clone, err := n.CrashClone(func(int64) bool { return false })
	must(t, err)
	if firstByte(t, clone) != 0x77 {
		t.Error("the write of a guest that cannot flush does not survive a crash")
	}
}

// firstByte reads the first byte of a node through a device of its own, and closes it.
func firstByte(t *testing.T, n block.Node) byte {
	t.Helper()
	var b byte
	t.Run("clone", func(t *testing.T) {
		r := newRig(t, n, rigOptions{})
		req := r.standard(virtioblk.TypeIn, 0, 512)
		if status, _ := r.queues[0].do(req); status != virtioblk.StatusOK {
			t.Fatalf("read the clone: status %d", status)
		}
		b = req.data.Bytes[0]
	})
	return b
}

// Limits of the device are checked when it is made.
func TestOptionsAreChecked(t *testing.T) {
	l := startLoop(t, nil)
	h := block.NewHandle(memDisk(t, mem.Options{}), nil)
	defer h.Close()
	for _, o := range []Options{
		{},
		{Loops: []*aio.Loop{l}, Queues: 257},
		{Loops: []*aio.Loop{l}, Queues: -1},
		{Loops: []*aio.Loop{l}, Serial: "a serial of more than twenty bytes"},
		{Loops: []*aio.Loop{l}, LogicalBlock: 256},
		{Loops: []*aio.Loop{l}, LogicalBlock: 3000},
	} {
		if d, err := New(h, &o); err == nil {
			t.Errorf("%+v was taken", o)
			must(t, d.Close())
		}
	}
}

// A disk with queues on two loops: nothing is shared but the node, and every queue is served.
func TestQueuesOnTwoLoops(t *testing.T) {
	loops := []*aio.Loop{startLoop(t, nil), startLoop(t, &aio.LoopOptions{Poller: aio.PollerEpoll})}
	h := block.NewHandle(memDisk(t, mem.Options{}), nil)
	defer h.Close()
	dev, err := New(h, &Options{Queues: 4, Loops: loops})
	must(t, err)
	defer dev.Close()
	must(t, dev.SetFeatures(dev.Features()))
	m, err := virtqtest.NewMemory(1<<30, 8<<20)
	must(t, err)
	defer m.Close()
	table, err := guestmem.NewMap([]guestmem.Region{m.Region()})
	must(t, err)
	defer table.Release()
	r := &rig{t: t, dev: dev, mem: m, table: table}
	for i := range 4 {
		q := r.addQueueNow(t, i)
		for range 50 {
			if status, _ := q.do(r.standard(virtioblk.TypeIn, 0, 512)); status != virtioblk.StatusOK {
				t.Fatalf("queue %d: status %d", i, status)
			}
		}
		defer func() {
			_, err := dev.StopQueue(i)
			must(t, errors.Join(err, sys.Close(q.kick), sys.Close(q.call)))
		}()
	}
	s, err := dev.Stats(context.Background())
	must(t, err)
	if s.Requests != 200 || s.Running != 4 {
		t.Errorf("%d requests on %d queues, want 200 on 4", s.Requests, s.Running)
	}
}

// addQueueNow is addQueue for a test that stops the queue itself.
func (r *rig) addQueueNow(t *testing.T, index int) *rigQueue {
	t.Helper()
	d, err := virtqtest.NewDriver(r.mem, virtqtest.DriverConfig{Size: 128, EventIdx: true, Indirect: true})
	must(t, err)
	q := &rigQueue{rig: r, index: index, d: d}
	q.kick, err = sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
	must(t, err)
	q.call, err = sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
	must(t, err)
	must(t, r.dev.StartQueue(q.vring(0, true)))
	return q
}
