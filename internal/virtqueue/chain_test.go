// SPDX-License-Identifier: Apache-2.0

package virtqueue_test

import (
	"errors"
	"math"
	"testing"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/virtqtest"
	"github.com/sluice-blk/sluice/internal/virtqueue"
)

// Goal: every row of the package's table of faults about descriptors, and what must be accepted.
// Method: a driver that writes raw descriptors into a memfd, and a queue over the same memory.

func TestChainsComeAsTheirDescriptorsSay(t *testing.T) {
	type part struct{ at, n uint64 }
	const next, write, indirect = virtqueue.DescNext, virtqueue.DescWrite, virtqueue.DescIndirect
	usual := func() ([]part, []part) { return []part{{0, 16}}, []part{{512, 512}, {1024, 1}} }
	for _, c := range []struct {
		name  string
		setup func(r *rig)
		want  func() (readable, writable []part) // offsets in buf
	}{
		{"direct", func(r *rig) { r.request() }, usual},
		{"indirect", func(r *rig) { r.table(48) }, usual},
		{"WRITE on the indirect descriptor is ignored", func(r *rig) {
			r.table(48)
			v := r.d.Desc(0)
			v.Flags |= write
			r.d.SetDesc(0, v)
		}, usual},
		{"unknown flags are ignored", func(r *rig) { r.change(2, func(v *virtqueue.Desc) { v.Flags |= 0xfff8; v.Next = 0xffff }) }, usual},
		{"an indirect table at an odd address", func(r *rig) {
			r.table(48)
			copy(r.alt.Bytes[101:], r.alt.Bytes[:48])
			r.d.SetDesc(0, virtqueue.Desc{Addr: r.alt.Addr + 101, Len: 48, Flags: indirect})
		}, usual},
		{"direct descriptors before an indirect one", func(r *rig) {
			a := r.buf.Addr
			r.d.SetDesc(0, virtqueue.Desc{Addr: a, Len: 16, Flags: next, Next: 7})
			r.d.SetDesc(7, virtqueue.Desc{Addr: r.alt.Addr, Len: 32, Flags: indirect})
			virtqtest.PutTable(r.alt.Bytes,
				virtqueue.Desc{Addr: a + 512, Len: 512, Flags: next | write, Next: 1}, virtqueue.Desc{Addr: a + 1024, Len: 1, Flags: write})
		}, usual},
		{"descriptors of 0 bytes are skipped, wherever they point", func(r *rig) {
			r.change(1, func(v *virtqueue.Desc) { v.Len = 0; v.Addr = 0x10 })
		}, func() ([]part, []part) { return []part{{0, 16}}, []part{{1024, 1}} }},
		{"all descriptors of 0 bytes", func(r *rig) {
			r.request()
			for i := range uint16(3) {
				v := r.d.Desc(i)
				v.Len = 0
				r.d.SetDesc(i, v)
			}
		}, func() ([]part, []part) { return nil, nil }},
		{"a header alone", func(r *rig) { r.change(0, func(v *virtqueue.Desc) { v.Flags = 0 }) },
			func() ([]part, []part) { return []part{{0, 16}}, nil }},
		{"one writable descriptor", func(r *rig) {
			r.d.SetDesc(0, virtqueue.Desc{Addr: r.buf.Addr, Len: 5, Flags: write})
		}, func() ([]part, []part) { return nil, []part{{0, 5}} }},
		{"as many as the queue has", func(r *rig) {
			for i := range uint16(16) {
				r.d.SetDesc(i, virtqueue.Desc{Addr: r.buf.Addr + uint64(i), Len: 1, Flags: next, Next: i + 1})
			}
			r.d.SetDesc(15, virtqueue.Desc{Addr: r.buf.Addr + 15, Len: 1})
		}, func() (readable, writable []part) {
			for i := range uint64(16) {
				readable = append(readable, part{i, 1})
			}
			return readable, nil
		}},
		{"more in an indirect table than the queue has", func(r *rig) {
			v := make([]virtqueue.Desc, virtqueue.MaxSize)
			for i := range v {
				v[i] = virtqueue.Desc{Addr: r.buf.Addr + uint64(i), Len: 1, Flags: next | write, Next: uint16(i + 1)}
			}
			v[len(v)-1].Flags = write
			virtqtest.PutTable(r.alt.Bytes, v...)
			r.d.SetDesc(0, virtqueue.Desc{Addr: r.alt.Addr, Len: uint32(len(v)) * 16, Flags: indirect})
		}, func() (readable, writable []part) {
			for i := range uint64(virtqueue.MaxSize) {
				writable = append(writable, part{i, 1})
			}
			return nil, writable
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, virtqtest.DriverConfig{Size: 16, Indirect: true})
			c.setup(r)
			r.d.Offer(0)
			got := r.pop(t)
			if got.Err != nil || got.Head != 0 {
				t.Fatalf("head %d, %v", got.Head, got.Err)
			}
			readable, writable := c.want()
			for _, dir := range []struct {
				name  string
				got   []sys.IOVec
				want  []part
				total int64
			}{{"readable", got.Readable, readable, got.ReadableLen}, {"writable", got.Writable, writable, got.WritableLen}} {
				if len(dir.got) != len(dir.want) {
					t.Fatalf("%d %s segments, want %d", len(dir.got), dir.name, len(dir.want))
				}
				total := int64(0)
				for i, s := range dir.want {
					r.at(t, dir.got[i], r.buf.Addr+s.at, s.n)
					total += int64(s.n)
				}
				if total != dir.total {
					t.Errorf("%s length %d, want %d", dir.name, dir.total, total)
				}
			}
			r.q.Push(0, 0)
			r.q.Publish()
			r.good(t)
		})
	}
}

func TestStructuralFaultsBreakTheQueue(t *testing.T) {
	const next, indirect = virtqueue.DescNext, virtqueue.DescIndirect
	loop := func(v *virtqueue.Desc) { v.Flags |= next; v.Next = 1 }
	short := func(r *rig, length uint32, last int) { // a table whose chain ends with the entry last
		v := r.table(length)
		v[last].Flags &^= next
		virtqtest.PutTable(r.alt.Bytes, v...)
	}
	for _, c := range []struct {
		name  string
		setup func(r *rig) (head uint16)
	}{
		{"a loop", func(r *rig) uint16 { r.change(2, loop); return 0 }},
		{"a descriptor that follows itself", func(r *rig) uint16 { r.change(1, func(v *virtqueue.Desc) { v.Next = 1 }); return 0 }},
		{"a loop of descriptors of 0 bytes", func(r *rig) uint16 {
			r.d.SetDesc(0, virtqueue.Desc{Flags: next})
			return 0
		}},
		{"next is the queue size", func(r *rig) uint16 { r.change(1, func(v *virtqueue.Desc) { v.Next = 16 }); return 0 }},
		{"next is 65535", func(r *rig) uint16 { r.change(1, func(v *virtqueue.Desc) { v.Next = 0xffff }); return 0 }},
		{"head is the queue size", func(r *rig) uint16 { r.request(); return 16 }},
		{"head is 65535", func(r *rig) uint16 { r.request(); return 0xffff }},
		{"INDIRECT and NEXT", func(r *rig) uint16 {
			r.table(48)
			r.d.SetDesc(0, virtqueue.Desc{Addr: r.alt.Addr, Len: 48, Flags: indirect | next, Next: 1})
			return 0
		}},
		{"a table in a table", func(r *rig) uint16 {
			r.edit(1, func(v *virtqueue.Desc) {
				*v = virtqueue.Desc{Addr: r.alt.Addr, Len: 48, Flags: indirect}
			})
			return 0
		}},
		{"a table in a table, with NEXT", func(r *rig) uint16 {
			r.edit(1, func(v *virtqueue.Desc) {
				*v = virtqueue.Desc{Addr: r.alt.Addr, Len: 48, Flags: indirect | next, Next: 2}
			})
			return 0
		}},
		{"a table of 0 bytes", func(r *rig) uint16 { r.table(0); return 0 }},
		{"a table of 0 bytes before a descriptor that would do", func(r *rig) uint16 { short(r, 0, 0); return 0 }},
		{"a table of 15 bytes", func(r *rig) uint16 { short(r, 15, 0); return 0 }},
		{"a table of 41 bytes, of which 32 would do", func(r *rig) uint16 { short(r, 41, 1); return 0 }},
		{"a table of one descriptor too many", func(r *rig) uint16 { r.table((virtqueue.MaxSize + 1) * 16); return 0 }},
		{"a table of 4096 descriptors", func(r *rig) uint16 { r.table(4096 * 16); return 0 }},
		{"a table of 4 GiB", func(r *rig) uint16 { r.table(0xfffffff0); return 0 }},
		{"a loop in a table", func(r *rig) uint16 { r.edit(2, loop); return 0 }},
		{"next is behind the table", func(r *rig) uint16 { r.edit(1, func(v *virtqueue.Desc) { v.Next = 3 }); return 0 }},
		{"a table behind a loop of direct ones", func(r *rig) uint16 {
			r.d.SetDesc(0, virtqueue.Desc{Addr: r.buf.Addr, Len: 1, Flags: next, Next: 1})
			r.d.SetDesc(1, virtqueue.Desc{Addr: r.buf.Addr, Len: 1, Flags: next, Next: 0})
			return 0
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, virtqtest.DriverConfig{Size: 16, Indirect: true})
			r.good(t)
			r.d.SetDesc(9, virtqueue.Desc{Addr: r.buf.Addr, Len: 1}) // stays in flight
			r.d.Offer(9)
			r.pop(t)
			r.d.Offer(c.setup(r))
			r.mustBreak(t)
			// What was in flight is still delivered.
			r.q.Push(9, 0)
			r.q.Publish()
			if id, _ := r.d.UsedElem(1); r.d.UsedIdx() != 2 || id != 9 {
				t.Errorf("used index %d, element %d; want 2 and 9", r.d.UsedIdx(), id)
			}
		})
	}
}

func TestIndirectTablesAreRefusedWhenNotNegotiated(t *testing.T) {
	r := newRig(t, virtqtest.DriverConfig{Size: 16})
	r.table(48)
	r.d.Offer(0)
	r.mustBreak(t)
}

func TestFaultyContentsCostTheChainOnly(t *testing.T) {
	const next, write, indirect = virtqueue.DescNext, virtqueue.DescWrite, virtqueue.DescIndirect
	addr := func(i uint16, a uint64) func(r *rig) {
		return func(r *rig) { r.change(i, func(v *virtqueue.Desc) { v.Addr = a }) }
	}
	const end = guestBase + memSize
	long := func(n int, piece uint32) func(r *rig) {
		return func(r *rig) {
			v := make([]virtqueue.Desc, n)
			for i := range v {
				v[i] = virtqueue.Desc{Addr: r.buf.Addr, Len: piece, Flags: next | write, Next: uint16(i + 1)}
			}
			v[n-1] = virtqueue.Desc{Addr: r.buf.Addr + 1024, Len: 1, Flags: write}
			virtqtest.PutTable(r.alt.Bytes, v...)
			r.d.SetDesc(0, virtqueue.Desc{Addr: r.alt.Addr, Len: uint32(n) * 16, Flags: indirect})
		}
	}
	for _, c := range []struct {
		name   string
		setup  func(r *rig)
		want   error
		status bool // the byte at 1024 can still be told
	}{
		{"data below the memory", addr(1, 0x10000), virtqueue.ErrAddress, true},
		{"data behind the memory", addr(1, end), virtqueue.ErrAddress, true},
		{"data across the end of the memory", addr(1, end-511), virtqueue.ErrAddress, true},
		{"data across the begin of the memory", addr(1, guestBase-1), virtqueue.ErrAddress, true},
		{"data that wraps", addr(1, math.MaxUint64-255), virtqueue.ErrAddress, true},
		{"header outside", addr(0, 8), virtqueue.ErrAddress, true},
		{"status outside", addr(2, end), virtqueue.ErrAddress, false},
		{"status at the last address", addr(2, math.MaxUint64), virtqueue.ErrAddress, false},
		{"status that wraps", func(r *rig) {
			r.change(2, func(v *virtqueue.Desc) { v.Addr = math.MaxUint64; v.Len = 2 })
		}, virtqueue.ErrAddress, false},
		{"status that wraps into the memory", func(r *rig) {
			r.change(2, func(v *virtqueue.Desc) { v.Addr = math.MaxUint64; v.Len = uint32(r.buf.Addr) + 2 })
		}, virtqueue.ErrAddress, false},
		{"status at the end of a longer buffer", func(r *rig) {
			r.change(0, func(v *virtqueue.Desc) { v.Addr = 1 })
			v := r.d.Desc(2)
			v.Addr, v.Len = v.Addr-99, 100
			r.d.SetDesc(2, v)
		}, virtqueue.ErrAddress, true},
		{"no fault: data to read", func(r *rig) { r.change(1, func(v *virtqueue.Desc) { v.Flags = next }) }, nil, true},
		{"readable behind writable", func(r *rig) {
			r.change(0, func(v *virtqueue.Desc) { v.Flags = next | write; v.Addr, v.Len = r.buf.Addr+1024, 1 })
			v := r.d.Desc(1)
			v.Flags = 0
			r.d.SetDesc(1, v)
		}, virtqueue.ErrOrder, true},
		{"readable behind writable, then writable again", func(r *rig) {
			r.change(0, func(v *virtqueue.Desc) { v.Flags |= write })
			v := r.d.Desc(1)
			v.Flags = next
			r.d.SetDesc(1, v)
		}, virtqueue.ErrOrder, true},
		{"table outside", func(r *rig) {
			r.table(48)
			r.d.SetDesc(0, virtqueue.Desc{Addr: 0xdead0000, Len: 48, Flags: indirect})
		}, virtqueue.ErrAddress, false},
		{"table across the end of the memory", func(r *rig) {
			r.table(48)
			r.d.SetDesc(0, virtqueue.Desc{Addr: end - 32, Len: 48, Flags: indirect})
		}, virtqueue.ErrAddress, false},
		{"bad address in a table", func(r *rig) { r.edit(1, func(v *virtqueue.Desc) { v.Addr = 1 }) }, virtqueue.ErrAddress, true},
		{"more segments than the limit", long(33, 1), virtqueue.ErrTooLong, true},
		{"as many segments as the limit", long(32, 1), nil, true},
		{"4 GiB to write", func(r *rig) {
			r.change(0, func(v *virtqueue.Desc) { v.Len = 1 })
			r.change(1, func(v *virtqueue.Desc) { v.Len = math.MaxUint32 })
		}, virtqueue.ErrAddress, true}, // such a piece is not in memory here
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, virtqtest.DriverConfig{Size: 16, Indirect: true})
			r.start(t, func(c *virtqueue.Config) { c.MaxSegments = 32 })
			c.setup(r)
			r.d.Offer(0)
			got := r.pop(t)
			if got.Head != 0 || !errors.Is(got.Err, c.want) {
				t.Fatalf("head %d, %v; want head 0 and %v", got.Head, got.Err, c.want)
			}
			if c.want != nil {
				if len(got.Readable) != 0 || got.ReadableLen != 0 {
					t.Errorf("a faulty chain can be read: %v", got.Readable)
				}
				if c.status {
					if len(got.Writable) != 1 || got.WritableLen != 1 {
						t.Fatalf("writable %v, want the status alone", got.Writable)
					}
					r.at(t, got.Writable[0], r.buf.Addr+1024, 1)
				} else if len(got.Writable) != 0 || got.WritableLen != 0 {
					t.Errorf("writable %v, want nothing", got.Writable)
				}
			}
			r.q.Push(got.Head, 0)
			r.q.Publish()
			if id, n := r.d.UsedElem(0); r.d.UsedIdx() != 1 || id != 0 || n != 0 {
				t.Errorf("completed as %d with %d bytes, index %d", id, n, r.d.UsedIdx())
			}
			r.good(t)
		})
	}
}

func TestAChainMayNotHave4GiBInOneDirection(t *testing.T) {
	mem, err := virtqtest.NewMemory(0, 1<<30)
	if err != nil {
		t.Skipf("needs 1 GiB of address space: %v", err)
	}
	defer mem.Close()
	m, err := guestmem.NewMap([]guestmem.Region{mem.Region()})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Release()
	d, err := virtqtest.NewDriver(mem, virtqtest.DriverConfig{Size: 8})
	if err != nil {
		t.Fatal(err)
	}
	q, err := virtqueue.New(d.QueueConfig(m))
	if err != nil {
		t.Fatal(err)
	}
	defer q.Close()
	c := virtqueue.NewChain(8)
	for _, last := range []uint32{1<<30 - 1, 1 << 30} {
		all := []virtqtest.Segment{seg(0, 1<<30), seg(0, 1<<30), seg(0, 1<<30), seg(0, last)}
		for _, dir := range []string{"read", "write"} {
			readable, writable := all, []virtqtest.Segment(nil)
			if dir == "write" {
				readable, writable = nil, all
			}
			if _, ok := d.Add(readable, writable); !ok {
				t.Fatal("no room")
			}
			d.Publish()
			if ok, err := q.Pop(c); !ok || err != nil {
				t.Fatal(ok, err)
			}
			want := int64(3<<30) + int64(last)
			if last == 1<<30 {
				if !errors.Is(c.Err, virtqueue.ErrTooLong) {
					t.Errorf("%s of 4 GiB: %v", dir, c.Err)
				}
			} else if c.Err != nil || c.ReadableLen+c.WritableLen != want {
				t.Errorf("%s of %d bytes: %v, %d and %d", dir, want, c.Err, c.ReadableLen, c.WritableLen)
			}
			q.Push(c.Head, 0)
			q.Publish()
			if _, _, ok := d.Used(); !ok {
				t.Fatal(d.Err())
			}
		}
	}
}

func TestAChainIsBoundedByItsOwnRoom(t *testing.T) {
	r := newRig(t, virtqtest.DriverConfig{Size: 16})
	for room := range 5 {
		r.c = virtqueue.NewChain(room)
		r.request()
		r.d.Offer(0)
		c := r.pop(t)
		if want := room < 3; errors.Is(c.Err, virtqueue.ErrTooLong) != want {
			t.Errorf("3 segments in a room of %d: %v", room, c.Err)
		}
		if c.Err != nil && room > 0 {
			r.at(t, c.Writable[0], r.buf.Addr+1024, 1)
		}
		r.q.Push(0, 0)
		r.q.Publish()
	}
}

func TestBuffersMayCrossGuestContiguousRegions(t *testing.T) {
	const border = guestBase + memSize
	r := newRig(t, virtqtest.DriverConfig{Size: 16})
	above, err := virtqtest.NewMemory(border, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer above.Close()
	m, err := r.m.Add(above.Region())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Release()
	if err := r.q.SetMem(m); err != nil {
		t.Fatal(err)
	}
	r.change(1, func(v *virtqueue.Desc) { v.Addr = border - 100 })
	r.d.Offer(0)
	c := r.pop(t)
	if c.Err != nil || len(c.Writable) != 3 || c.Writable[0].Len != 100 || c.Writable[1].Len != 412 || c.WritableLen != 513 {
		t.Fatalf("%v: %v", c.Err, c.Writable)
	}
	c.Writable[1].Bytes()[0] = 0x5a
	if above.At(border, 1)[0] != 0x5a {
		t.Error("the second segment is not the upper region's memory")
	}
	r.q.Push(0, 513)
	r.q.Publish()
	r.c = virtqueue.NewChain(3) // one too few
	r.d.Offer(0)
	if c := r.pop(t); !errors.Is(c.Err, virtqueue.ErrTooLong) {
		t.Errorf("4 segments in a room of 3: %v", c.Err)
	}
}
