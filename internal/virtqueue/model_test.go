// SPDX-License-Identifier: Apache-2.0

package virtqueue_test

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/virtqtest"
	"github.com/sluice-blk/sluice/internal/virtqueue"
)

// Goal: any sequence of calls by a well-behaved driver and device keeps what was offered, in order, and notifies exactly
// when it was asked for. Method: random calls against a model of plain lists and 64-bit counters; rapid shrinks what
// fails and prints its seed.

// offered is a chain as the model has it.
type offered struct {
	head               uint16
	readable, writable []virtqtest.Segment
}

// model is a driver, a queue and what they should have done.
type model struct {
	conf virtqtest.DriverConfig
	mem  *virtqtest.Memory
	m    *guestmem.Map
	d    *virtqtest.Driver
	q    *virtqueue.Queue
	c    *virtqueue.Chain

	added    []offered // not shown to the device
	ring     []offered // shown, not popped
	inFlight []offered
	pushed   []uint16 // heads in the order of pushes, not shown to the driver
	done     []uint16 // shown, not taken
	written  map[uint16]uint32

	popped    uint64 // all 64-bit counters of entries
	published uint64
	taken     uint64
	event     uint64 // the completion that the driver wants to be told of
	armed     bool   // flags: whether calls are wanted
	first     bool
}

func TestAnySequenceOfCallsKeepsTheModel(t *testing.T) {
	for range 10 { // rapid's hundred, ten times
		t.Run("", checkModel)
	}
}

func checkModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newModel(t)
		defer m.close()
		t.Repeat(map[string]func(*rapid.T){
			"add":      m.add,
			"show":     m.show,
			"pop":      m.pop,
			"push":     m.push,
			"publish":  m.publish,
			"take":     m.take,
			"arm":      m.arm,
			"look":     m.look,
			"restart":  m.restart,
			"remap":    m.remap,
			"turn off": func(*rapid.T) { m.q.DisableKicks() },
			"":         m.check,
		})
	})
}

func newModel(t *rapid.T) *model {
	m := &model{
		conf: virtqtest.DriverConfig{
			Size:      1 << rapid.IntRange(0, 5).Draw(t, "log size"),
			EventIdx:  rapid.Bool().Draw(t, "event index"),
			Indirect:  rapid.Bool().Draw(t, "indirect"),
			TableSize: 8,
		},
		c: virtqueue.NewChain(32), written: map[uint16]uint32{}, armed: true, first: true,
	}
	var err error
	if m.mem, err = virtqtest.NewMemory(guestBase, 256<<10); err != nil {
		t.Fatal(err)
	}
	if m.m, err = guestmem.NewMap([]guestmem.Region{m.mem.Region()}); err != nil {
		t.Fatal(err)
	}
	if m.d, err = virtqtest.NewDriver(m.mem, m.conf); err != nil {
		t.Fatal(err)
	}
	if m.q, err = virtqueue.New(m.d.QueueConfig(m.m)); err != nil {
		t.Fatal(err)
	}
	return m
}

func (m *model) close() {
	m.q.Close()
	m.m.Release()
	_ = m.mem.Close()
}

func segments(most int) *rapid.Generator[[]virtqtest.Segment] {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) virtqtest.Segment {
		at := rapid.Uint64Range(0, 200<<10).Draw(t, "at")
		return seg(guestBase+at, uint32(rapid.IntRange(1, 50<<10).Draw(t, "len")))
	}), 0, most)
}

func (m *model) add(t *rapid.T) {
	o := offered{readable: segments(3).Draw(t, "readable"), writable: segments(3).Draw(t, "writable")}
	n := len(o.readable) + len(o.writable)
	need := n
	if m.conf.Indirect && n > 1 {
		need = 1
	}
	want := n > 0 && need <= m.d.Free()
	head, ok := m.d.Add(o.readable, o.writable)
	if ok != want {
		t.Fatalf("add of %d segments with %d free: %v", n, m.d.Free(), ok)
	}
	if ok {
		o.head = head
		m.added = append(m.added, o)
	}
}

func (m *model) show(*rapid.T) {
	m.d.Publish()
	m.ring, m.added = append(m.ring, m.added...), nil
}

func (m *model) pop(t *rapid.T) {
	ok, err := m.q.Pop(m.c)
	if err != nil {
		t.Fatal(err)
	}
	if ok != (len(m.ring) > 0) {
		t.Fatalf("pop: %v with %d in the ring", ok, len(m.ring))
	}
	if !ok {
		return
	}
	o := m.ring[0]
	m.ring = m.ring[1:]
	m.popped++
	m.inFlight = append(m.inFlight, o)
	if m.c.Head != o.head || m.c.Err != nil {
		t.Fatalf("head %d (%v), want %d", m.c.Head, m.c.Err, o.head)
	}
	m.same(t, m.c.Readable, m.c.ReadableLen, o.readable)
	m.same(t, m.c.Writable, m.c.WritableLen, o.writable)
}

func (m *model) same(t *rapid.T, got []sys.IOVec, length int64, want []virtqtest.Segment) {
	if len(got) != len(want) {
		t.Fatalf("%d segments, want %d", len(got), len(want))
	}
	total := int64(0)
	for i, s := range want {
		b, err := m.m.Slice(s.Addr, uint64(s.Len))
		if err != nil || got[i] != sys.IOVecOf(b) {
			t.Fatalf("segment %d is not %+v", i, s)
		}
		total += int64(s.Len)
	}
	if total != length {
		t.Fatalf("length %d, want %d", length, total)
	}
}

func (m *model) push(t *rapid.T) {
	if len(m.inFlight) == 0 {
		return
	}
	i := rapid.IntRange(0, len(m.inFlight)-1).Draw(t, "which")
	n := rapid.Uint32().Draw(t, "written")
	o := m.inFlight[i]
	m.inFlight = append(m.inFlight[:i:i], m.inFlight[i+1:]...)
	m.q.Push(o.head, n)
	m.pushed = append(m.pushed, o.head)
	m.written[o.head] = n
}

func (m *model) publish(t *rapid.T) {
	from, to := m.published, m.published+uint64(len(m.pushed))
	want := false
	if to > from {
		if m.conf.EventIdx {
			want = (from <= m.event && m.event < to) || m.first
		} else {
			want = m.armed
		}
		m.first = false
	}
	if got := m.q.Publish(); got != want {
		t.Fatalf("publish from %d to %d with event %d, armed %v: notify %v, want %v", from, to, m.event, m.armed, got, want)
	}
	m.published = to
	m.done, m.pushed = append(m.done, m.pushed...), nil
}

func (m *model) take(t *rapid.T) {
	head, n, ok := m.d.Used()
	if err := m.d.Err(); err != nil {
		t.Fatal(err)
	}
	if ok != (len(m.done) > 0) {
		t.Fatalf("take: %v with %d done", ok, len(m.done))
	}
	if !ok {
		return
	}
	if head != m.done[0] || n != m.written[head] {
		t.Fatalf("took %d with %d bytes, want %d with %d", head, n, m.done[0], m.written[head])
	}
	m.done = m.done[1:]
	m.taken++
}

func (m *model) arm(t *rapid.T) {
	n := uint16(1)
	if m.conf.EventIdx {
		n = uint16(rapid.IntRange(1, int(m.conf.Size)).Draw(t, "after"))
	} else if m.armed = rapid.Bool().Draw(t, "on"); !m.armed {
		m.d.DisarmCalls()
		return
	}
	m.event = m.taken + uint64(n) - 1
	if got, want := m.d.ArmCalls(n), len(m.done) >= int(n); got != want {
		t.Fatalf("arm after %d with %d done: more %v", n, len(m.done), got)
	}
}

func (m *model) look(t *rapid.T) {
	want := len(m.ring) > 0
	if m.q.Pending() != want || m.q.EnableKicks() != want {
		t.Fatalf("pending and more should be %v", want)
	}
}

// restart puts a new queue in the old one's place, which can be done when it is idle.
func (m *model) restart(t *rapid.T) {
	if len(m.inFlight)+len(m.pushed) > 0 {
		return
	}
	c := m.d.QueueConfig(m.m)
	c.Base = m.q.LastAvail()
	m.q.Close()
	q, err := virtqueue.New(c)
	if err != nil {
		t.Fatal(err)
	}
	m.q, m.first = q, true
}

// remap moves the queue to another mapping of the same memory, with requests in flight or not.
func (m *model) remap(t *rapid.T) {
	m.publish(t)
	again, err := guestmem.NewMap([]guestmem.Region{m.mem.Region()})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.q.SetMem(again); err != nil {
		t.Fatal(err)
	}
	m.m.Release()
	m.m = again
}

func (m *model) check(t *rapid.T) {
	got := fmt.Sprint(m.q.LastAvail(), m.q.UsedIdx(), m.q.InFlight(), m.q.Err(), m.d.Out())
	want := fmt.Sprint(uint16(m.popped), uint16(m.published), len(m.inFlight), nil,
		len(m.added)+len(m.ring)+len(m.inFlight)+len(m.pushed)+len(m.done))
	if got != want {
		t.Fatalf("next, used, in flight, error, out: %s; want %s", got, want)
	}
}
