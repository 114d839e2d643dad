// SPDX-License-Identifier: Apache-2.0

package virtqueue

import (
	"fmt"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/guestmem"
)

// Features of the transport that concern rings, as masks (virtio 1.3, section 6).
const (
	FeatureIndirect uint64 = 1 << 28 // VIRTIO_F_INDIRECT_DESC
	FeatureEventIdx uint64 = 1 << 29 // VIRTIO_F_EVENT_IDX
	FeatureVersion1 uint64 = 1 << 32 // VIRTIO_F_VERSION_1
)

// MaxSize is the largest queue that we serve, in descriptors, and the largest indirect table. The specification allows
// 32768; 1024 is what QEMU offers at most and the most segments that the kernel takes in one vectored call, and slots
// for a whole queue are made at start-up.
const MaxSize = 1024

// Flags of a descriptor and of the two rings (virtio 1.3, sections 2.7.5, 2.7.6, 2.7.8).
const (
	DescNext     = 1 << 0
	DescWrite    = 1 << 1
	DescIndirect = 1 << 2

	AvailNoInterrupt = 1 << 0
	UsedNoNotify     = 1 << 0
)

// DescSize is the size of a descriptor in bytes.
const DescSize = 16

// Desc is a descriptor as it lies in memory (section 2.7.5).
type Desc struct {
	Addr  uint64 // guest physical
	Len   uint32
	Flags uint16
	Next  uint16
}

// AvailSize and UsedSize are the sizes of the rings in bytes, with the event word at their end whether or not the event
// index is in use, so that a driver cannot lead us behind the memory by negotiating late.
func AvailSize(size uint16) uint64 { return 4 + 2*uint64(size) + 2 }

// UsedSize is described at [AvailSize].
func UsedSize(size uint16) uint64 { return 4 + 8*uint64(size) + 2 }

// NeedEvent tells whether a step from old to now passes the event index that the other side asked for (section
// 2.7.7.2 and 2.7.10): whether one of the entries old, old+1, ..., now-1 is the entry event.
func NeedEvent(event, now, old uint16) bool {
	return now-event-1 < now-old
}

// ring is where the three parts of a queue are mapped. All pointers are aligned as [resolve] checked, and good for the
// whole of the part, for as long as the map is held.
type ring struct {
	desc  unsafe.Pointer // size descriptors; the driver writes, we read
	avail unsafe.Pointer // the driver writes, we read: flags, idx, size heads, used_event
	used  unsafe.Pointer // we write, the driver reads: flags, idx, size elements, avail_event
	size  uint16
}

// resolve finds the parts of a queue in memory.
func resolve(m *guestmem.Map, c *Config) (ring, error) {
	r := ring{size: c.Size}
	var err error
	if r.desc, err = part(m, "descriptor table", c.Desc, DescSize*uint64(c.Size), 16); err != nil {
		return ring{}, err
	}
	if r.avail, err = part(m, "available ring", c.Avail, AvailSize(c.Size), 2); err != nil {
		return ring{}, err
	}
	if r.used, err = part(m, "used ring", c.Used, UsedSize(c.Size), 4); err != nil {
		return ring{}, err
	}
	return r, nil
}

// part resolves one part and checks the alignment that section 2.7 demands of it, in the front-end's address space and
// in ours: our 16-bit accesses would tear where a mapping moved them to an odd address.
func part(m *guestmem.Map, name string, userAddr, length, align uint64) (unsafe.Pointer, error) {
	b, err := m.UserSlice(userAddr, length)
	if err != nil {
		return nil, fmt.Errorf("find %s of %d bytes at %#x: %w", name, length, userAddr, err)
	}
	p := unsafe.Pointer(unsafe.SliceData(b))
	if (userAddr|uint64(uintptr(p)))&(align-1) != 0 {
		return nil, fmt.Errorf("%s at %#x is not aligned to %d bytes", name, userAddr, align)
	}
	return p, nil
}

// The accessors below take indices that the caller has masked or checked.

func (r *ring) availFlags() *uint16 { return (*uint16)(r.avail) }

func (r *ring) availIdx() *uint16 { return word(r.avail, 2) }

// usedEvent is the driver's word at the end of the ring that the driver writes.
func (r *ring) usedEvent() *uint16 { return word(r.avail, 4+2*uintptr(r.size)) }

func (r *ring) usedFlags() *uint16 { return (*uint16)(r.used) }

func (r *ring) usedIdx() *uint16 { return word(r.used, 2) }

// availEvent is our word at the end of the ring that we write. What stands behind its two bytes is the guest's own.
func (r *ring) availEvent() *uint16 { return word(r.used, 4+8*uintptr(r.size)) }

// head is the available ring's entry for the index i, of which the low bits count.
func (r *ring) head(i uint16) uint16 {
	return *word(r.avail, 4+2*uintptr(i&(r.size-1)))
}

// setUsed writes the used ring's element for the index i (section 2.7.8: id and length, 32 bits each).
func (r *ring) setUsed(i, head uint16, written uint32) {
	// SAFETY: the masked index is below size, so the element is inside the used ring; 8-byte elements follow a 4-byte
	// head in a 4-aligned ring, so both halves are aligned.
	e := (*[2]uint32)(unsafe.Add(r.used, 4+8*uintptr(i&(r.size-1))))
	e[0] = uint32(head)
	e[1] = written
}

// word is the 16-bit word at a byte offset.
func word(base unsafe.Pointer, offset uintptr) *uint16 {
	// SAFETY: the callers' offsets are inside the part that base begins, and even, and base is at least 2-aligned.
	return (*uint16)(unsafe.Add(base, offset))
}

// readDesc copies a descriptor. Whatever is checked is checked on the copy.
func readDesc(table unsafe.Pointer, i uint32) Desc {
	// SAFETY: the caller has checked i against the length of the table. Both architectures load from any alignment,
	// which an indirect table may have.
	p := (*[2]uint64)(unsafe.Add(table, DescSize*uintptr(i)))
	addr, rest := p[0], p[1]
	return Desc{Addr: addr, Len: uint32(rest), Flags: uint16(rest >> 32), Next: uint16(rest >> 48)}
}
