// SPDX-License-Identifier: Apache-2.0

package virtqtest

import (
	"fmt"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/virtqueue"
)

// DriverConfig says how a Driver uses its queue. Size is needed.
type DriverConfig struct {
	Size     uint16 // descriptors, a power of two
	EventIdx bool
	Indirect bool // chains of more than one segment go into indirect tables
	// TableSize is the most segments of an indirect table; 0 means Size.
	TableSize int
}

// Segment is a buffer of a chain.
type Segment struct {
	Addr uint64 // guest physical
	Len  uint32
}

// Driver is the driver side of one queue. After an error nothing goes on: see Err.
type Driver struct {
	conf   DriverConfig
	desc   Buffer // size descriptors
	avail  Buffer // flags, idx, size heads, used_event; we write
	used   Buffer // flags, idx, size elements, avail_event; the device writes
	tables Buffer // an indirect table for each head
	mem    *Memory

	chain  []uint16 // for each descriptor the next one, free or in a chain; the device cannot change this copy
	length []uint16 // for each head out with the device: its direct descriptors; 0: not out
	free   uint16   // first free descriptor
	nfree  int

	availIdx  uint16 // of the next entry
	published uint16 // avail.idx as the device sees it
	nextUsed  uint16 // of the element to take next
	knownUsed uint16 // used.idx as last read
	out       int    // chains with the device
	err       error
}

// NewDriver lays out a queue in memory, empty, with both indices 0.
func NewDriver(m *Memory, c DriverConfig) (*Driver, error) {
	if c.TableSize == 0 {
		c.TableSize = int(c.Size)
	}
	d := &Driver{conf: c, mem: m, chain: make([]uint16, c.Size), length: make([]uint16, c.Size)}
	for _, part := range []struct {
		to            *Buffer
		length, align int
	}{
		{&d.desc, virtqueue.DescSize * int(c.Size), 16},
		{&d.avail, int(virtqueue.AvailSize(c.Size)), 2},
		{&d.used, int(virtqueue.UsedSize(c.Size)), 4},
	} {
		var err error
		if *part.to, err = m.Alloc(part.length, part.align); err != nil {
			return nil, fmt.Errorf("lay out queue: %w", err)
		}
	}
	if c.Indirect {
		var err error
		if d.tables, err = m.Alloc(virtqueue.DescSize*c.TableSize*int(c.Size), 16); err != nil {
			return nil, fmt.Errorf("lay out indirect tables: %w", err)
		}
	}
	d.Reset()
	return d, nil
}

// Reset forgets all chains and clears the rings, as a driver does that resets its device. The device must not be
// running.
func (d *Driver) Reset() {
	clear(d.desc.Bytes)
	clear(d.avail.Bytes)
	clear(d.used.Bytes)
	for i := range d.chain {
		d.chain[i] = uint16(i + 1)
		d.length[i] = 0
	}
	d.free, d.nfree = 0, len(d.chain)
	d.availIdx, d.published, d.nextUsed, d.knownUsed = 0, 0, 0, 0
	d.out, d.err = 0, nil
}

// QueueConfig is what a device needs to serve the queue from its beginning.
func (d *Driver) QueueConfig(mem *guestmem.Map) virtqueue.Config {
	desc, avail, used := d.Addrs()
	return virtqueue.Config{
		Size: d.conf.Size, Desc: desc, Avail: avail, Used: used, Mem: mem,
		EventIdx: d.conf.EventIdx, Indirect: d.conf.Indirect,
	}
}

// Addrs are the user addresses of the queue's three parts, as SET_VRING_ADDR wants them.
func (d *Driver) Addrs() (desc, avail, used uint64) {
	return d.mem.UserAddr(d.desc.Addr), d.mem.UserAddr(d.avail.Addr), d.mem.UserAddr(d.used.Addr)
}

// Err is what the device did wrong, or nil.
func (d *Driver) Err() error { return d.err }

// Size is the queue's size.
func (d *Driver) Size() uint16 { return d.conf.Size }

// Out is how many chains the device has.
func (d *Driver) Out() int { return d.out }

// Free is how many descriptors are free.
func (d *Driver) Free() int { return d.nfree }

// Add offers a chain: segments to read, then segments to write. It is false when the queue has no room for it, or there
// is no segment. The device may not see it before Publish. It does not allocate.
func (d *Driver) Add(readable, writable []Segment) (head uint16, ok bool) {
	n := len(readable) + len(writable)
	if n == 0 || d.err != nil {
		return 0, false
	}
	head = d.free
	if d.conf.Indirect && n > 1 {
		if d.nfree == 0 || n > d.conf.TableSize {
			return 0, false
		}
		d.fillTable(head, readable, writable)
		n = 1
	} else {
		if n > d.nfree {
			return 0, false
		}
		d.fillDirect(readable, writable)
	}
	last := head
	for range n - 1 {
		last = d.chain[last]
	}
	d.free = d.chain[last]
	d.nfree -= n
	d.length[head] = uint16(n)
	d.out++
	d.SetAvail(d.availIdx, head)
	d.availIdx++
	return head, true
}

// fillDirect writes the chain into the descriptors that are free first.
func (d *Driver) fillDirect(readable, writable []Segment) {
	i, left := d.free, len(readable)+len(writable)
	for _, s := range readable {
		left--
		d.SetDesc(i, link(s, 0, d.chain[i], left > 0))
		i = d.chain[i]
	}
	for _, s := range writable {
		left--
		d.SetDesc(i, link(s, virtqueue.DescWrite, d.chain[i], left > 0))
		i = d.chain[i]
	}
}

// fillTable writes the chain into the head's table, and the head.
func (d *Driver) fillTable(head uint16, readable, writable []Segment) {
	table := d.table(head)
	n := uint16(len(readable) + len(writable))
	i := uint16(0)
	for _, s := range readable {
		putDesc(table.Bytes, int(i), link(s, 0, i+1, i+1 < n))
		i++
	}
	for _, s := range writable {
		putDesc(table.Bytes, int(i), link(s, virtqueue.DescWrite, i+1, i+1 < n))
		i++
	}
	d.SetDesc(head, virtqueue.Desc{Addr: table.Addr, Len: uint32(n) * virtqueue.DescSize, Flags: virtqueue.DescIndirect})
}

// table is where the indirect table of a head lies.
func (d *Driver) table(head uint16) Buffer {
	size := virtqueue.DescSize * d.conf.TableSize
	at := size * int(head)
	return Buffer{Addr: d.tables.Addr + uint64(at), Bytes: d.tables.Bytes[at : at+size]}
}

func link(s Segment, flags, next uint16, more bool) virtqueue.Desc {
	if more {
		return virtqueue.Desc{Addr: s.Addr, Len: s.Len, Flags: flags | virtqueue.DescNext, Next: next}
	}
	return virtqueue.Desc{Addr: s.Addr, Len: s.Len, Flags: flags}
}

// Publish shows the device all the chains that were added, and tells whether it asked for a kick. With nothing added it
// does nothing.
func (d *Driver) Publish() (kick bool) {
	old, now := d.published, d.availIdx
	if old == now {
		return false
	}
	d.SetAvailIdx(now)
	d.published = now
	// Pairs with the device's fence between its store of avail_event or flags and its last look at avail.idx.
	virtqueue.Fence()
	if d.conf.EventIdx {
		return virtqueue.NeedEvent(d.AvailEvent(), now, old)
	}
	return d.UsedFlags()&virtqueue.UsedNoNotify == 0
}

// Used takes the next chain that the device is done with. It is false when there is none, and when the device did what
// it must not: see Err.
func (d *Driver) Used() (head uint16, written uint32, ok bool) {
	if d.err != nil {
		return 0, 0, false
	}
	if d.nextUsed == d.knownUsed {
		idx := d.UsedIdx()
		if int(idx-d.nextUsed) > d.out {
			d.err = fmt.Errorf("used index went from %d to %d with %d chains out", d.nextUsed, idx, d.out)
			return 0, 0, false
		}
		d.knownUsed = idx
		if idx == d.nextUsed {
			return 0, 0, false
		}
	}
	id, written := d.UsedElem(d.nextUsed)
	if id >= uint32(d.conf.Size) || d.length[id] == 0 {
		d.err = fmt.Errorf("used element %d names %d, which is not out", d.nextUsed, id)
		return 0, 0, false
	}
	d.nextUsed++
	d.release(uint16(id))
	return uint16(id), written, true
}

// release puts a chain's descriptors back on the free list.
func (d *Driver) release(head uint16) {
	n := d.length[head]
	d.length[head] = 0
	d.out--
	last := head
	for range n - 1 {
		last = d.chain[last]
	}
	d.chain[last] = d.free
	d.free = head
	d.nfree += int(n)
}

// ArmCalls asks the device for a notification once n more chains are done, and looks once more: true means that they are
// done already, so that none will come. Without the event index n is 1 to the device.
func (d *Driver) ArmCalls(n uint16) (more bool) {
	if d.conf.EventIdx {
		d.SetUsedEvent(d.nextUsed + n - 1)
	} else {
		d.SetAvailFlags(0)
	}
	// Pairs with the device's fence between its store of used.idx and its load of used_event or flags.
	virtqueue.Fence()
	return d.UsedIdx()-d.nextUsed >= n
}

// DisarmCalls asks for no notifications. It is a hint, and with the event index there is nothing to say.
func (d *Driver) DisarmCalls() {
	if !d.conf.EventIdx {
		d.SetAvailFlags(virtqueue.AvailNoInterrupt)
	}
}

// word is the 16-bit word at an even offset of a ring.
func word(b []byte, offset int) *uint16 {
	_ = b[offset+1]
	// SAFETY: the offset was checked, and rings are at even addresses.
	return (*uint16)(unsafe.Pointer(&b[offset]))
}
