// SPDX-License-Identifier: Apache-2.0

package virtqueue_test

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/virtqtest"
	"github.com/sluice-blk/sluice/internal/virtqueue"
)

// Goal: the rules of the rings: what a queue needs, indices, heads, notifications, and memory that moves or goes away.
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

func TestAQueueHoldsTheMemoryItIsIn(t *testing.T) {
	mappings := func() int {
		b, err := os.ReadFile("/proc/self/maps")
		if err != nil {
			t.Skipf("needs /proc/self/maps to see mappings: %v", err)
		}
		return strings.Count(string(b), "memfd:guest-memory ")
	}
	r := newRig(t, virtqtest.DriverConfig{Size: 16})
	before := mappings() - 1 // without the map's
	again, err := guestmem.NewMap([]guestmem.Region{r.mem.Region()})
	if err != nil {
		t.Fatal(err)
	}
	q, err := virtqueue.New(r.d.QueueConfig(again))
	if err != nil {
		t.Fatal(err)
	}
	again.Release()
	if n := mappings(); n != before+2 {
		t.Errorf("%d mappings, want %d: the queue's memory", n, before+2)
	}
	if err := q.SetMem(r.m); err != nil {
		t.Fatal(err)
	}
	if n := mappings(); n != before+1 {
		t.Errorf("%d mappings after the queue left one, want %d", n, before+1)
	}
	q.Close()
	if n := mappings(); n != before+1 {
		t.Errorf("%d mappings with the rig's own, want %d", n, before+1)
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

// A queue is set up by the control plane, which takes no faults: there it is an error, and costs no reference.
func TestNewInMemoryThatVanishedIsAnError(t *testing.T) {
	r := newRig(t, virtqtest.DriverConfig{Size: 16})
	if err := sys.Ftruncate(r.mem.FD(), 0); err != nil {
		t.Fatal(err)
	}
	if _, err := virtqueue.New(r.d.QueueConfig(r.m)); !errors.Is(err, syscall.EFAULT) {
		t.Errorf("got %v, want EFAULT", err)
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
