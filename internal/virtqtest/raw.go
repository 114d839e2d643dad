// SPDX-License-Identifier: Apache-2.0

package virtqtest

import (
	"encoding/binary"

	"github.com/sluice-blk/sluice/internal/virtqueue"
)

// The raw view of the rings. Slots are indices of which the low bits count.

// SetDesc writes a descriptor of the table.
func (d *Driver) SetDesc(i uint16, v virtqueue.Desc) { putDesc(d.desc.Bytes, int(i), v) }

// Desc reads a descriptor of the table.
func (d *Driver) Desc(i uint16) virtqueue.Desc {
	b := d.desc.Bytes[int(i)*virtqueue.DescSize:]
	return virtqueue.Desc{
		Addr: binary.LittleEndian.Uint64(b), Len: binary.LittleEndian.Uint32(b[8:]),
		Flags: binary.LittleEndian.Uint16(b[12:]), Next: binary.LittleEndian.Uint16(b[14:]),
	}
}

// PutTable writes descriptors to a buffer, as an indirect table.
func PutTable(b []byte, table ...virtqueue.Desc) {
	for i, v := range table {
		putDesc(b, i, v)
	}
}

func putDesc(b []byte, i int, v virtqueue.Desc) {
	b = b[i*virtqueue.DescSize : (i+1)*virtqueue.DescSize]
	binary.LittleEndian.PutUint64(b, v.Addr)
	binary.LittleEndian.PutUint64(b[8:], uint64(v.Len)|uint64(v.Flags)<<32|uint64(v.Next)<<48)
}

// Offer puts a head into the available ring and shows it at once, whatever it is.
func (d *Driver) Offer(head uint16) {
	d.SetAvail(d.availIdx, head)
	d.availIdx++
	d.SetAvailIdx(d.availIdx)
	d.published = d.availIdx
}

// SetAvail writes an entry of the available ring.
func (d *Driver) SetAvail(slot, head uint16) {
	*word(d.avail.Bytes, 4+2*int(slot&(d.conf.Size-1))) = head
}

// SetAvailIdx stores avail.idx, and nothing else: the driver's own count stays.
func (d *Driver) SetAvailIdx(idx uint16) { virtqueue.StoreRelease16(word(d.avail.Bytes, 2), idx) }

// AvailIdx is avail.idx.
func (d *Driver) AvailIdx() uint16 { return virtqueue.LoadAcquire16(word(d.avail.Bytes, 2)) }

// SetAvailFlags stores the flags of the available ring.
func (d *Driver) SetAvailFlags(f uint16) { virtqueue.StoreRelease16(word(d.avail.Bytes, 0), f) }

// SetUsedEvent stores used_event, behind the available ring.
func (d *Driver) SetUsedEvent(idx uint16) {
	virtqueue.StoreRelease16(word(d.avail.Bytes, 4+2*int(d.conf.Size)), idx)
}

// UsedIdx is used.idx.
func (d *Driver) UsedIdx() uint16 { return virtqueue.LoadAcquire16(word(d.used.Bytes, 2)) }

// SetUsedIdx stores used.idx, as what an earlier device left behind.
func (d *Driver) SetUsedIdx(idx uint16) { virtqueue.StoreRelease16(word(d.used.Bytes, 2), idx) }

// UsedFlags are the flags of the used ring.
func (d *Driver) UsedFlags() uint16 { return virtqueue.LoadAcquire16(word(d.used.Bytes, 0)) }

// UsedElem is an element of the used ring.
func (d *Driver) UsedElem(slot uint16) (id, written uint32) {
	b := d.used.Bytes[4+8*int(slot&(d.conf.Size-1)):]
	return binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])
}

// AvailEvent is avail_event, behind the used ring.
func (d *Driver) AvailEvent() uint16 {
	return virtqueue.LoadAcquire16(word(d.used.Bytes, 4+8*int(d.conf.Size)))
}
