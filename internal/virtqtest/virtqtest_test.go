// SPDX-License-Identifier: Apache-2.0

package virtqtest

import (
	"encoding/binary"
	"testing"
)

// Goal: the driver notices a device that does what it must not, since other tests rely on its judgement. What it does
// with a device that behaves is tested with the virtqueue. Method: the test writes the used ring by hand.

func newDriver(t *testing.T, c DriverConfig) *Driver {
	t.Helper()
	m, err := NewMemory(0x1000, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	d, err := NewDriver(m, c)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// use plays the device: an element of the used ring, and the index.
func use(d *Driver, slot uint16, id, n uint32, idx uint16) {
	b := d.used.Bytes[4+8*int(slot):]
	binary.LittleEndian.PutUint32(b, id)
	binary.LittleEndian.PutUint32(b[4:], n)
	d.SetUsedIdx(idx)
}

func TestDriverNoticesADeviceThatMisbehaves(t *testing.T) {
	one := []Segment{{Addr: 0x1000, Len: 1}}
	for _, c := range []struct {
		name string
		id   uint32
		idx  uint16
		want bool // the completion is good
	}{
		{"what was offered", 0, 1, true},
		{"a head that is not out", 1, 1, false},
		{"a head behind the table", 8, 1, false},
		{"a head of more than 16 bits", 1 << 16, 1, false},
		{"more completions than chains", 0, 2, false},
		{"an index that moves back", 0, 0xffff, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newDriver(t, DriverConfig{Size: 8})
			if _, ok := d.Add(one, nil); !ok {
				t.Fatal("no room in an empty queue")
			}
			d.Publish()
			use(d, 0, c.id, 7, c.idx)
			_, n, ok := d.Used()
			if ok != c.want || (d.Err() == nil) != c.want || (ok && n != 7) {
				t.Errorf("taken %v with %d bytes, error %v; want %v", ok, n, d.Err(), c.want)
			}
			if _, ok := d.Add(one, nil); ok != c.want {
				t.Errorf("another chain is taken: %v", ok)
			}
		})
	}
}

func TestDriverNoticesACompletionThatComesTwice(t *testing.T) {
	d := newDriver(t, DriverConfig{Size: 8})
	one := []Segment{{Addr: 0x1000, Len: 1}}
	d.Add(one, nil)
	d.Add(one, nil)
	d.Publish()
	use(d, 0, 0, 0, 0)
	use(d, 1, 0, 0, 2)
	if _, _, ok := d.Used(); !ok {
		t.Fatal(d.Err())
	}
	if _, _, ok := d.Used(); ok || d.Err() == nil {
		t.Errorf("the second one is taken: %v, %v", ok, d.Err())
	}
	d.Reset()
	if d.Err() != nil || d.Free() != 8 || d.Out() != 0 {
		t.Errorf("after a reset: %v, %d free, %d out", d.Err(), d.Free(), d.Out())
	}
}

func TestDescriptorsComeBackToTheFreeList(t *testing.T) {
	for _, indirect := range []bool{false, true} {
		d := newDriver(t, DriverConfig{Size: 8, Indirect: indirect})
		three := make([]Segment, 3)
		for i := range three {
			three[i] = Segment{Addr: 0x1000, Len: 1}
		}
		want := 2 // of three descriptors each
		if indirect {
			want = 8
		}
		idx := uint16(0)
		for range 5 {
			var heads []uint16
			for {
				head, ok := d.Add(three[:1], three[1:])
				if !ok {
					break
				}
				heads = append(heads, head)
			}
			if len(heads) != want || d.Out() != want {
				t.Fatalf("indirect %v: room for %d chains, want %d", indirect, len(heads), want)
			}
			d.Publish()
			for i := range heads { // in the opposite order
				use(d, idx&7, uint32(heads[len(heads)-1-i]), 0, idx+1)
				idx++
				if _, _, ok := d.Used(); !ok {
					t.Fatal(d.Err())
				}
			}
			if d.Free() != 8 || d.Out() != 0 {
				t.Fatalf("indirect %v: %d free, %d out", indirect, d.Free(), d.Out())
			}
		}
		if _, ok := d.Add(nil, nil); ok {
			t.Error("a chain of nothing is taken")
		}
		if _, ok := d.Add(make([]Segment, 9), nil); ok {
			t.Error("a chain longer than a table or the queue is taken")
		}
	}
}

func TestMemoryIsHandedOutOnce(t *testing.T) {
	m, err := NewMemory(1<<32, 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	a, err := m.Alloc(10, 1)
	if err != nil {
		t.Fatal(err)
	}
	b, err := m.Alloc(4000, 64)
	if err != nil || b.Addr != a.Addr+64 || len(b.Bytes) != 4000 {
		t.Errorf("second piece at %#x, %d bytes, %v", b.Addr, len(b.Bytes), err)
	}
	b.Bytes[0] = 9
	if m.At(b.Addr, 1)[0] != 9 || m.End() != 1<<32+4096 {
		t.Error("addresses are not the buffers'")
	}
	if _, err := m.Alloc(100, 1); err == nil {
		t.Error("more was handed out than there is")
	}
	if _, err := NewDriver(m, DriverConfig{Size: 1024}); err == nil {
		t.Error("a queue was laid out in no room")
	}
}
