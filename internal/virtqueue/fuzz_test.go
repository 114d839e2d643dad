// SPDX-License-Identifier: Apache-2.0

package virtqueue_test

import (
	"encoding/binary"
	"errors"
	"testing"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/virtqtest"
	"github.com/sluice-blk/sluice/internal/virtqueue"
)

// hostile is a small guest memory with a queue at fixed places, for drivers that write anything.
type hostile struct {
	mem *virtqtest.Memory
	m   *guestmem.Map
	all []byte // the device's view
}

const (
	hostileSize  = 64 << 10
	hostileDesc  = 0
	hostileAvail = 16 << 10
	hostileUsed  = 24 << 10
)

func newHostile(t testing.TB) *hostile {
	t.Helper()
	mem, err := virtqtest.NewMemory(0, hostileSize)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = mem.Close() })
	m, err := guestmem.NewMap([]guestmem.Region{mem.Region()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Release)
	all, err := m.Slice(0, hostileSize)
	if err != nil {
		t.Fatal(err)
	}
	return &hostile{mem: mem, m: m, all: all}
}

func (h *hostile) queue(t testing.TB, size, base uint16, eventIdx, indirect bool) *virtqueue.Queue {
	t.Helper()
	q, err := virtqueue.New(virtqueue.Config{
		Size: size, Desc: h.mem.UserAddr(hostileDesc), Avail: h.mem.UserAddr(hostileAvail), Used: h.mem.UserAddr(hostileUsed),
		Mem: h.m, Base: base, EventIdx: eventIdx, Indirect: indirect, MaxSegments: 130,
	})
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// inside demands that all that a chain offers lies in guest memory and adds up.
func (h *hostile) inside(t testing.TB, c *virtqueue.Chain) {
	t.Helper()
	begin := uintptr(unsafe.Pointer(&h.all[0]))
	check := func(list []sys.IOVec, length int64) {
		total := int64(0)
		for _, v := range list {
			at := uintptr(unsafe.Pointer(v.Base))
			if at < begin || at-begin >= hostileSize || v.Len == 0 || v.Len > hostileSize-uint64(at-begin) {
				t.Fatalf("a segment of %d bytes at %#x leaves the memory at %#x", v.Len, at, begin)
			}
			total += int64(v.Len)
		}
		if total != length {
			t.Fatalf("segments of %d bytes are said to be %d", total, length)
		}
	}
	check(c.Readable, c.ReadableLen)
	check(c.Writable, c.WritableLen)
	if c.Err != nil && (len(c.Readable) != 0 || len(c.Writable) > 1) {
		t.Fatalf("a faulty chain offers %d and %d segments", len(c.Readable), len(c.Writable))
	}
	if n := len(c.Readable) + len(c.Writable); n > 130 {
		t.Fatalf("%d segments", n)
	}
}

// drain pops until there is nothing, or the queue is broken, and completes all. A queue gives each head once, so it
// can give no more chains than it has descriptors.
func (h *hostile) drain(t testing.TB, q *virtqueue.Queue, c *virtqueue.Chain) {
	t.Helper()
	var heads []uint16
	for {
		ok, err := q.Pop(c)
		if err != nil {
			var broken *virtqueue.BrokenError
			if ok || !errors.As(err, &broken) {
				t.Fatalf("pop: %v, %v", ok, err)
			}
			break
		}
		if !ok {
			break
		}
		if c.Head >= q.Size() {
			t.Fatalf("head %d of %d", c.Head, q.Size())
		}
		h.inside(t, c)
		if heads = append(heads, c.Head); len(heads) > int(q.Size()) {
			t.Fatalf("%d chains from a queue of %d", len(heads), q.Size())
		}
	}
	q.EnableKicks()
	q.DisableKicks()
	for _, head := range heads {
		q.Push(head, 1)
	}
	q.Publish()
	if q.InFlight() != 0 {
		t.Fatalf("%d in flight after all were pushed", q.InFlight())
	}
}

// seedMemory is the image of a guest's memory with these descriptors, and the heads 0.. available.
func seedMemory(avail uint16, table ...virtqueue.Desc) []byte {
	b := make([]byte, hostileAvail+64)
	virtqtest.PutTable(b, table...)
	binary.LittleEndian.PutUint16(b[hostileAvail+2:], avail)
	for i := range uint16(16) {
		binary.LittleEndian.PutUint16(b[hostileAvail+4+2*int(i):], i)
	}
	return b
}

// FuzzChain serves a queue whose memory has any contents: it never panics, ends, and offers no byte that is not the
// guest's. Whatever data is short of repeats itself through the memory, so that short inputs fill it too.
func FuzzChain(f *testing.F) {
	const next, write, indirect = virtqueue.DescNext, virtqueue.DescWrite, virtqueue.DescIndirect
	f.Add(seedMemory(1, virtqueue.Desc{Addr: 0x8000, Len: 16, Flags: next, Next: 1}, virtqueue.Desc{Addr: 0x9000, Len: 512, Flags: next | write, Next: 2},
		virtqueue.Desc{Addr: 0xa000, Len: 1, Flags: write}), uint8(4), uint16(0), true, true)
	f.Add(seedMemory(1, virtqueue.Desc{Addr: 16, Len: 48, Flags: indirect}, virtqueue.Desc{Addr: 0x8000, Len: 16, Flags: next, Next: 2},
		virtqueue.Desc{}, virtqueue.Desc{Addr: 0xffff, Len: 1, Flags: write}), uint8(4), uint16(0), false, true)
	f.Add(seedMemory(4, virtqueue.Desc{Addr: 0, Len: 1, Flags: next}, virtqueue.Desc{Addr: 0xffff, Len: 2, Flags: write},
		virtqueue.Desc{Addr: 1 << 63, Len: 1 << 31}, virtqueue.Desc{Flags: indirect | next}), uint8(4), uint16(0xffff), true, true)
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 5, 0, 1, 0}, uint8(7), uint16(0), true, true)
	f.Add([]byte{0}, uint8(0), uint16(0), false, false)
	h := newHostile(f)
	c := virtqueue.NewChain(virtqueue.MaxSize)
	f.Fuzz(func(t *testing.T, data []byte, log uint8, base uint16, eventIdx, wantIndirect bool) {
		memory := h.mem.At(0, hostileSize)
		clear(memory)
		for at := 0; len(data) > 0 && at < len(memory); at += len(data) {
			copy(memory[at:], data)
		}
		q := h.queue(t, 1<<(log%11), base, eventIdx, wantIndirect)
		defer q.Close()
		h.drain(t, q, c)
	})
}
