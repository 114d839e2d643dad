// SPDX-License-Identifier: Apache-2.0

package virtqueue_test

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/virtqtest"
	"github.com/sluice-blk/sluice/internal/virtqueue"
)

// Goal: every row of the package's table of faults, and the rules of the rings' indices and notifications.
// Method: a driver that writes raw rings into a memfd, and a queue over the same memory.

func TestMalformedQueuesAreRefused(t *testing.T) {
	r := newRig(t, virtqtest.DriverConfig{Size: 128})
	end := r.mem.UserAddr(r.mem.End())
	for _, c := range []struct {
		name   string
		change func(*virtqueue.Config)
		want   error
	}{
		{"size 0", func(c *virtqueue.Config) { c.Size = 0 }, nil},
		{"size 3", func(c *virtqueue.Config) { c.Size = 3 }, nil},
		{"size 1000", func(c *virtqueue.Config) { c.Size = 1000 }, nil},
		{"size 2048", func(c *virtqueue.Config) { c.Size = 2048 }, nil},
		{"size 32768", func(c *virtqueue.Config) { c.Size = 32768 }, nil},
		{"no memory", func(c *virtqueue.Config) { c.Mem = nil }, nil},
		{"descriptors misaligned", func(c *virtqueue.Config) { c.Desc += 8 }, nil},
		{"available ring misaligned", func(c *virtqueue.Config) { c.Avail++ }, nil},
		{"used ring misaligned", func(c *virtqueue.Config) { c.Used += 2 }, nil},
		{"descriptors outside", func(c *virtqueue.Config) { c.Desc = 0x1000 }, guestmem.ErrRange},
		{"available ring outside", func(c *virtqueue.Config) { c.Avail = 0x1000 }, guestmem.ErrRange},
		{"used ring outside", func(c *virtqueue.Config) { c.Used = 0x1000 }, guestmem.ErrRange},
		{"descriptors across the end", func(c *virtqueue.Config) { c.Desc = end - 128*16 + 16 }, guestmem.ErrRange},
		{"available ring across the end", func(c *virtqueue.Config) { c.Avail = end - 128*2 - 4 }, guestmem.ErrRange},
		{"used ring across the end", func(c *virtqueue.Config) { c.Used = end - 128*8 - 4 }, guestmem.ErrRange},
		{"descriptors wrap", func(c *virtqueue.Config) { c.Desc = math.MaxUint64 - 15 }, guestmem.ErrRange},
	} {
		t.Run(c.name, func(t *testing.T) {
			conf := r.d.QueueConfig(r.m)
			c.change(&conf)
			q, err := virtqueue.New(conf)
			if err == nil || q != nil || (c.want != nil && !errors.Is(err, c.want)) {
				t.Errorf("got %v, %v; want an error (%v)", q, err, c.want)
			}
		})
	}
	for size := uint16(1); size <= virtqueue.MaxSize; size *= 2 {
		r.start(t, func(c *virtqueue.Config) {
			c.Size = size
			c.Avail = end - virtqueue.AvailSize(size) // to the very last byte
		})
	}
}

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
		{"a table of 15 bytes", func(r *rig) uint16 { r.table(15); return 0 }},
		{"a table of 41 bytes", func(r *rig) uint16 { r.table(41); return 0 }},
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

func TestAvailableIndexMovesByAtMostTheQueueSize(t *testing.T) {
	for _, c := range []struct {
		name   string
		step   uint16 // from what was taken
		broken bool
	}{
		{"by one", 1, false}, {"by the queue size", 16, false}, {"by one more", 17, true}, {"by the queue size and six", 22, true},
		{"by half of its range", 0x8000, true}, {"back by one", 0xffff, true}, {"back by the queue size", 0xfff0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, virtqtest.DriverConfig{Size: 16})
			for i := range uint16(16) {
				r.d.SetDesc(i, virtqueue.Desc{Addr: r.buf.Addr, Len: 1})
			}
			for range 3 {
				r.good(t)
			}
			r.request()
			for i := range uint16(16) {
				r.d.SetAvail(3+i, i)
				r.d.SetDesc(i, virtqueue.Desc{Addr: r.buf.Addr, Len: 1})
			}
			r.d.SetAvailIdx(3 + c.step)
			if !r.q.Pending() || !r.q.EnableKicks() {
				t.Error("the move is not noticed")
			}
			if c.broken {
				r.mustBreak(t)
				return
			}
			for i := range c.step {
				if got := r.pop(t); got.Head != i {
					t.Errorf("head %d, want %d", got.Head, i)
				}
			}
			r.empty(t)
		})
	}
}

func TestAHeadInFlightMayNotBeOfferedAgain(t *testing.T) {
	for _, between := range []string{"at once", "later"} {
		t.Run(between, func(t *testing.T) {
			r := newRig(t, virtqtest.DriverConfig{Size: 16})
			r.request()
			r.d.Offer(0)
			if between == "at once" {
				r.d.Offer(0)
			}
			r.pop(t)
			if between == "later" {
				r.empty(t)
				r.d.Offer(0)
			}
			r.mustBreak(t)
		})
	}
	t.Run("but after it was pushed", func(t *testing.T) {
		r := newRig(t, virtqtest.DriverConfig{Size: 16})
		for range 40 {
			r.good(t)
		}
	})
	t.Run("a base that leads back over entries that were taken", func(t *testing.T) {
		r := newRig(t, virtqtest.DriverConfig{Size: 128})
		r.request()
		r.d.Offer(0) // avail.idx 1
		r.start(t, func(c *virtqueue.Config) { c.Base = 0xfff0 })
		r.pop(t)
		r.mustBreak(t)
	})
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
		{"header writable", func(r *rig) { r.change(1, func(v *virtqueue.Desc) { v.Flags = next }) }, nil, true},
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

func TestAQueueMovesToNewMemoryWhole(t *testing.T) {
	r := newRig(t, virtqtest.DriverConfig{Size: 16})
	r.good(t)
	empty, err := guestmem.NewMap(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer empty.Release()
	if err := r.q.SetMem(empty); !errors.Is(err, guestmem.ErrRange) {
		t.Fatalf("moved to memory without its rings: %v", err)
	}
	r.good(t) // still where it was
	again, err := guestmem.NewMap([]guestmem.Region{r.mem.Region()})
	if err != nil {
		t.Fatal(err)
	}
	r.request()
	r.d.Offer(0)
	r.pop(t)
	if err := r.q.SetMem(again); err != nil {
		t.Fatal(err)
	}
	again.Release() // the queue has its own
	r.q.Push(0, 7)
	r.q.Publish()
	if _, n := r.d.UsedElem(2); r.d.UsedIdx() != 3 || n != 7 {
		t.Errorf("completed with %d bytes at index %d", n, r.d.UsedIdx())
	}
	r.good(t)
	r.q.Close()
	r.q.Close()
	if ok, err := r.q.Pop(r.c); ok || err == nil {
		t.Errorf("pop of a closed queue: %v, %v", ok, err)
	}
}

func TestAQueueGoesOnWhereItsPredecessorStopped(t *testing.T) {
	r := newRig(t, virtqtest.DriverConfig{Size: 16, EventIdx: true})
	for range 10 {
		r.good(t)
	}
	for range 2 { // twice: to ask must change nothing
		if r.q.LastAvail() != 10 || r.q.UsedIdx() != 10 || r.q.InFlight() != 0 {
			t.Fatalf("next %d, used %d, %d in flight", r.q.LastAvail(), r.q.UsedIdx(), r.q.InFlight())
		}
	}
	r.d.SetUsedEvent(500) // the driver wants no call
	base := r.q.LastAvail()
	r.start(t, func(c *virtqueue.Config) { c.Base = base })
	if r.q.UsedIdx() != 10 || r.q.LastAvail() != 10 {
		t.Fatalf("the new queue starts at %d, used %d", r.q.LastAvail(), r.q.UsedIdx())
	}
	r.empty(t)
	r.request()
	r.d.Offer(0)
	r.pop(t)
	r.q.Push(0, 0)
	if !r.q.Publish() {
		t.Error("the first completions of a new queue are not notified: the driver may wait for its predecessor's")
	}
	r.d.Offer(0)
	r.pop(t)
	r.q.Push(0, 0)
	if r.q.Publish() {
		t.Error("notified although the driver asked for none")
	}
	for range 10 {
		r.good(t)
	}
}

func TestNothingIsSeenBeforePublish(t *testing.T) {
	r := newRig(t, virtqtest.DriverConfig{Size: 16})
	for i := range uint16(5) {
		r.d.SetDesc(i, virtqueue.Desc{Addr: r.buf.Addr, Len: 1, Flags: virtqueue.DescWrite})
		r.d.Offer(i)
	}
	for range 5 {
		r.pop(t)
	}
	for i := range uint16(5) {
		r.q.Push(4-i, uint32(i))
		if r.d.UsedIdx() != 0 || r.q.UsedIdx() != 0 {
			t.Fatal("a push is seen")
		}
	}
	if !r.q.Publish() || r.d.UsedIdx() != 5 || r.q.InFlight() != 0 {
		t.Errorf("used index %d, %d in flight", r.d.UsedIdx(), r.q.InFlight())
	}
	if r.q.Publish() {
		t.Error("nothing pushed, and notified")
	}
	for i := range uint16(5) {
		if id, n := r.d.UsedElem(i); id != uint32(4-i) || n != uint32(i) {
			t.Errorf("element %d: %d, %d", i, id, n)
		}
	}
}

func TestNeedEvent(t *testing.T) {
	for _, c := range []struct {
		event, now, old uint16
		want            bool
	}{
		{0, 1, 0, true}, {1, 1, 0, false}, {0, 0, 0, false}, {5, 10, 5, true}, {9, 10, 5, true}, {10, 10, 5, false}, {4, 10, 5, false},
		{0xffff, 0, 0xffff, true}, {0xffff, 3, 0xfffe, true}, {2, 3, 0xfffe, true}, {3, 3, 0xfffe, false}, {0xfffd, 3, 0xfffe, false},
		{0x8000, 3, 0xfffe, false},
	} {
		if got := virtqueue.NeedEvent(c.event, c.now, c.old); got != c.want {
			t.Errorf("event %d, from %d to %d: %v", c.event, c.old, c.now, got)
		}
	}
}

func TestNotificationsAreAskedForByFlagOrEvent(t *testing.T) {
	complete := func(r *rig, n int) bool {
		for i := range uint16(n) {
			r.d.SetDesc(i, virtqueue.Desc{Addr: r.buf.Addr, Len: 1})
			r.d.Offer(i)
			r.pop(t)
			r.q.Push(i, 0)
		}
		return r.q.Publish()
	}
	t.Run("flag", func(t *testing.T) {
		r := newRig(t, virtqtest.DriverConfig{Size: 16})
		r.d.SetUsedEvent(0) // means nothing here
		for _, f := range []uint16{0, virtqueue.AvailNoInterrupt, 0, 0xfffe, 0xffff} {
			r.d.SetAvailFlags(f)
			if got := complete(r, 3); got != (f&1 == 0) {
				t.Errorf("flags %#x: notify %v", f, got)
			}
		}
	})
	t.Run("event", func(t *testing.T) {
		r := newRig(t, virtqtest.DriverConfig{Size: 16, EventIdx: true})
		complete(r, 1)
		r.d.SetAvailFlags(virtqueue.AvailNoInterrupt) // means nothing here
		for i := range 20000 {
			at := r.q.UsedIdx()
			n := 1 + i%7
			event := at + uint16(i%9) - 1
			r.d.SetUsedEvent(event)
			if got, want := complete(r, n), i%9 >= 1 && i%9 <= n; got != want {
				t.Fatalf("used index %d + %d, event %d: notify %v, want %v", at, n, event, got, want)
			}
		}
	})
}

func TestKicksAreAskedForByFlagOrEvent(t *testing.T) {
	t.Run("flag", func(t *testing.T) {
		r := newRig(t, virtqtest.DriverConfig{Size: 16})
		r.q.DisableKicks()
		if r.d.UsedFlags() != virtqueue.UsedNoNotify {
			t.Errorf("flags %#x after DisableKicks", r.d.UsedFlags())
		}
		if r.q.EnableKicks() || r.d.UsedFlags() != 0 {
			t.Errorf("flags %#x after EnableKicks", r.d.UsedFlags())
		}
		if r.d.AvailEvent() != 0 {
			t.Error("the event is written although it was not negotiated")
		}
	})
	t.Run("event", func(t *testing.T) {
		r := newRig(t, virtqtest.DriverConfig{Size: 16, EventIdx: true})
		for i := range uint16(40) {
			if r.q.EnableKicks() || r.d.AvailEvent() != i {
				t.Fatalf("event %d, want %d", r.d.AvailEvent(), i)
			}
			r.q.DisableKicks()
			if r.d.UsedFlags() != 0 {
				t.Fatal("flags are to stay 0 with the event index")
			}
			r.good(t)
		}
	})
	for _, event := range []bool{false, true} {
		t.Run(fmt.Sprintf("what came in between is seen, event index %v", event), func(t *testing.T) {
			r := newRig(t, virtqtest.DriverConfig{Size: 16, EventIdx: event})
			r.empty(t)
			if r.q.Pending() {
				t.Error("pending with an empty ring")
			}
			r.request()
			r.d.Offer(0)
			if !r.q.EnableKicks() || !r.q.Pending() {
				t.Error("a chain that came before is not seen")
			}
			r.pop(t)
			if r.q.EnableKicks() || r.q.Pending() {
				t.Error("more, with an empty ring")
			}
		})
	}
}

// What stands behind the event that we write is the guest's own.
func TestTheKickEventIsTwoBytesWide(t *testing.T) {
	r := newRig(t, virtqtest.DriverConfig{Size: 16, EventIdx: true})
	place := r.alloc(t, 4096)
	size := int(virtqueue.UsedSize(16))
	for i := range place.Bytes {
		place.Bytes[i] = 0xa5
	}
	clear(place.Bytes[64 : 64+size])
	r.start(t, func(c *virtqueue.Config) { c.Used = r.mem.UserAddr(place.Addr) + 64; c.Base = 0x1234 })
	r.d.SetAvailIdx(0x1234)
	r.q.EnableKicks()
	if e := place.Bytes[64+size-2:]; e[0] != 0x34 || e[1] != 0x12 {
		t.Errorf("event is %x %x", e[1], e[0])
	}
	for i, b := range place.Bytes {
		if (i < 64 || i >= 64+size) && b != 0xa5 {
			t.Fatalf("byte %d outside of the used ring was written", i-64)
		}
	}
}

func TestBarriersMoveTwoBytes(t *testing.T) {
	w := [4]uint16{0x1111, 0x2222, 0x3333, 0x4444}
	if v := virtqueue.LoadAcquire16(&w[1]); v != 0x2222 {
		t.Errorf("loaded %#x", v)
	}
	virtqueue.StoreRelease16(&w[2], 0xfedc)
	virtqueue.Fence()
	if w != [4]uint16{0x1111, 0x2222, 0xfedc, 0x4444} {
		t.Errorf("stored %#x", w)
	}
	if unsafe.Sizeof(virtqueue.Desc{}) != virtqueue.DescSize {
		t.Error("a descriptor is not 16 bytes")
	}
}

func TestMemoryThatVanishesIsARecoverableFault(t *testing.T) {
	for _, c := range []struct {
		name string
		call func(r *rig)
	}{
		{"Pop", func(r *rig) { _, _ = r.q.Pop(r.c) }},
		{"Push", func(r *rig) { r.q.Push(0, 0) }},
		{"EnableKicks", func(r *rig) { r.q.EnableKicks() }},
		{"DisableKicks", func(r *rig) { r.q.DisableKicks() }},
		{"Pending", func(r *rig) { r.q.Pending() }},
		{"New", func(r *rig) { _, _ = virtqueue.New(r.d.QueueConfig(r.m)) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, virtqtest.DriverConfig{Size: 16})
			r.request()
			r.d.Offer(0)
			r.pop(t)
			if err := sys.Ftruncate(r.mem.FD(), 0); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if p := recover(); !sys.IsFault(p) {
					t.Errorf("got %v, want a fault", p)
				}
			}()
			sys.SetPanicOnFault()
			c.call(r)
		})
	}
	t.Run("Publish", func(t *testing.T) {
		r := newRig(t, virtqtest.DriverConfig{Size: 16})
		r.request()
		r.d.Offer(0)
		r.pop(t)
		r.q.Push(0, 0)
		if err := sys.Ftruncate(r.mem.FD(), 0); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if p := recover(); !sys.IsFault(p) {
				t.Errorf("got %v, want a fault", p)
			}
		}()
		sys.SetPanicOnFault()
		r.q.Publish()
	})
}

func TestNoCallAllocates(t *testing.T) {
	for _, indirect := range []bool{false, true} {
		r := newRig(t, virtqtest.DriverConfig{Size: 64, EventIdx: true, Indirect: indirect})
		readable := []virtqtest.Segment{seg(r.buf.Addr, 16)}
		writable := []virtqtest.Segment{seg(r.buf.Addr+512, 512), seg(r.buf.Addr+1024, 1)}
		bad := []virtqtest.Segment{seg(1, 512), seg(r.buf.Addr+1024, 1)}
		if n := testing.AllocsPerRun(1000, func() {
			for range 8 {
				r.d.Add(readable, writable)
			}
			r.d.Add(readable, bad)
			r.d.Publish()
			r.q.DisableKicks()
			for {
				ok, err := r.q.Pop(r.c)
				if err != nil {
					t.Fatal(err)
				}
				if !ok {
					break
				}
				r.q.Push(r.c.Head, 513)
			}
			r.q.EnableKicks()
			r.q.Publish()
			for {
				if _, _, ok := r.d.Used(); !ok {
					break
				}
			}
			r.d.ArmCalls(1)
		}); n != 0 {
			t.Errorf("indirect %v: %v allocations a round", indirect, n)
		}
		if err := r.d.Err(); err != nil {
			t.Error(err)
		}
	}
}
