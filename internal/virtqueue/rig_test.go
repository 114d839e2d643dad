// SPDX-License-Identifier: Apache-2.0

package virtqueue_test

import (
	"errors"
	"testing"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/virtqtest"
	"github.com/sluice-blk/sluice/internal/virtqueue"
)

func seg(addr uint64, length uint32) virtqtest.Segment {
	return virtqtest.Segment{Addr: addr, Len: length}
}

// rig is a driver and a device on one piece of guest memory.
type rig struct {
	mem *virtqtest.Memory
	m   *guestmem.Map
	d   *virtqtest.Driver
	q   *virtqueue.Queue
	c   *virtqueue.Chain
	buf virtqtest.Buffer // a page for header, data and status
	alt virtqtest.Buffer // a page for indirect tables
}

const (
	guestBase = 0x4000_0000
	memSize   = 4 << 20
)

func newRig(t testing.TB, c virtqtest.DriverConfig) *rig {
	t.Helper()
	r := &rig{c: virtqueue.NewChain(virtqueue.MaxSize)}
	var err error
	if r.mem, err = virtqtest.NewMemory(guestBase, memSize); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.mem.Close(); err != nil {
			t.Error(err)
		}
	})
	if r.m, err = guestmem.NewMap([]guestmem.Region{r.mem.Region()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.m.Release)
	if r.d, err = virtqtest.NewDriver(r.mem, c); err != nil {
		t.Fatal(err)
	}
	r.buf, r.alt = r.alloc(t, 65536), r.alloc(t, 2*virtqueue.MaxSize*virtqueue.DescSize)
	r.start(t, nil)
	return r
}

func (r *rig) alloc(t testing.TB, n int) virtqtest.Buffer {
	t.Helper()
	b, err := r.mem.Alloc(n, 4096)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// start makes the device, with changes to its configuration.
func (r *rig) start(t testing.TB, change func(*virtqueue.Config)) {
	t.Helper()
	if r.q != nil {
		r.q.Close()
	}
	c := r.d.QueueConfig(r.m)
	if change != nil {
		change(&c)
	}
	q, err := virtqueue.New(c)
	if err != nil {
		t.Fatal(err)
	}
	r.q = q
	t.Cleanup(q.Close)
}

// pop takes a chain that must be there.
func (r *rig) pop(t testing.TB) *virtqueue.Chain {
	t.Helper()
	ok, err := r.q.Pop(r.c)
	if !ok || err != nil {
		t.Fatalf("pop: %v, %v; want a chain", ok, err)
	}
	return r.c
}

// empty demands that there is nothing to pop and nothing wrong.
func (r *rig) empty(t testing.TB) {
	t.Helper()
	if ok, err := r.q.Pop(r.c); ok || err != nil {
		t.Fatalf("pop: %v, %v; want nothing", ok, err)
	}
}

// request writes the usual three descriptors at 0: a header, 512 bytes to write, a status.
func (r *rig) request() {
	a := r.buf.Addr
	r.d.SetDesc(0, virtqueue.Desc{Addr: a, Len: 16, Flags: virtqueue.DescNext, Next: 1})
	r.d.SetDesc(1, virtqueue.Desc{Addr: a + 512, Len: 512, Flags: virtqueue.DescNext | virtqueue.DescWrite, Next: 2})
	r.d.SetDesc(2, virtqueue.Desc{Addr: a + 1024, Len: 1, Flags: virtqueue.DescWrite})
}

// table writes the usual request as an indirect table into alt, and descriptor 0 that refers to it.
func (r *rig) table(length uint32) []virtqueue.Desc {
	a := r.buf.Addr
	t := []virtqueue.Desc{
		{Addr: a, Len: 16, Flags: virtqueue.DescNext, Next: 1},
		{Addr: a + 512, Len: 512, Flags: virtqueue.DescNext | virtqueue.DescWrite, Next: 2},
		{Addr: a + 1024, Len: 1, Flags: virtqueue.DescWrite},
	}
	virtqtest.PutTable(r.alt.Bytes, t...)
	r.d.SetDesc(0, virtqueue.Desc{Addr: r.alt.Addr, Len: length, Flags: virtqueue.DescIndirect})
	return t
}

// edit changes one entry of the indirect table.
func (r *rig) edit(i int, change func(*virtqueue.Desc)) {
	t := r.table(48)
	change(&t[i])
	virtqtest.PutTable(r.alt.Bytes, t...)
}

// change changes one descriptor of the usual request.
func (r *rig) change(i uint16, change func(*virtqueue.Desc)) {
	r.request()
	v := r.d.Desc(i)
	change(&v)
	r.d.SetDesc(i, v)
}

// good does a whole well-formed request and demands that it goes as it should.
func (r *rig) good(t testing.TB) {
	t.Helper()
	r.request()
	r.d.Offer(0)
	c := r.pop(t)
	if c.Err != nil || c.Head != 0 || c.ReadableLen != 16 || c.WritableLen != 513 || len(c.Readable) != 1 || len(c.Writable) != 2 {
		t.Fatalf("a good request came as %+v", c)
	}
	r.q.Push(c.Head, 513)
	r.q.Publish()
	if id, n := r.d.UsedElem(r.q.UsedIdx() - 1); id != 0 || n != 513 {
		t.Fatalf("a good request came back as %d, %d bytes", id, n)
	}
}

// at demands that the segment is length bytes at the guest address.
func (r *rig) at(t testing.TB, v sys.IOVec, addr, length uint64) {
	t.Helper()
	b, err := r.m.Slice(addr, length)
	if err != nil || v != sys.IOVecOf(b) {
		t.Errorf("segment of %d bytes is not the %d bytes at %#x (%v)", v.Len, length, addr, err)
	}
}

// mustBreak demands that the queue breaks on the next Pop and stays so.
func (r *rig) mustBreak(t testing.TB) {
	t.Helper()
	at, held := r.q.LastAvail(), r.q.InFlight()
	for range 2 {
		ok, err := r.q.Pop(r.c)
		var broken *virtqueue.BrokenError
		if ok || !errors.As(err, &broken) || broken.Reason == "" {
			t.Fatalf("pop: %v, %v; want a broken queue", ok, err)
		}
	}
	if r.q.Err() == nil || r.q.EnableKicks() || r.q.Pending() {
		t.Error("a broken queue goes on")
	}
	if r.q.LastAvail() != at || r.q.InFlight() != held {
		t.Errorf("the broken entry was taken: %d in flight, next %d", r.q.InFlight(), r.q.LastAvail())
	}
	for i := range r.d.Size() { // the driver repents, which is too late
		r.d.SetAvail(at+i, i)
		r.d.SetDesc(i, virtqueue.Desc{Addr: r.buf.Addr, Len: 1})
	}
	r.d.SetAvailIdx(at + 1)
	if ok, err := r.q.Pop(r.c); ok || err == nil {
		t.Errorf("pop: %v, %v; want the queue to stay broken", ok, err)
	}
}
