// SPDX-License-Identifier: Apache-2.0

package qcow2

import "encoding/binary"

// MaxRefcount is the largest count of an entry of 2^order bits.
func MaxRefcount(order uint32) uint64 {
	if order >= 6 {
		return 1<<64 - 1
	}
	return 1<<(1<<order) - 1
}

// Refcount reads entry i of a refcount block whose entries have 2^order bits (section Host cluster management). Entries
// of less than a byte begin at the least significant bit.
func Refcount(block []byte, order uint32, i int) uint64 {
	switch order {
	case 0, 1, 2:
		at := i << order
		return uint64(block[at>>3]>>(at&7)) & (1<<(1<<order) - 1)
	case 3:
		return uint64(block[i])
	case 4:
		return uint64(binary.BigEndian.Uint16(block[i*2:]))
	case 5:
		return uint64(binary.BigEndian.Uint32(block[i*4:]))
	default:
		return binary.BigEndian.Uint64(block[i*8:])
	}
}

// SetRefcount writes entry i. The count must fit: see MaxRefcount.
func SetRefcount(block []byte, order uint32, i int, count uint64) {
	switch order {
	case 0, 1, 2:
		at := i << order
		mask := byte(1<<(1<<order)-1) << (at & 7)
		block[at>>3] = block[at>>3]&^mask | byte(count)<<(at&7)&mask
	case 3:
		block[i] = byte(count)
	case 4:
		binary.BigEndian.PutUint16(block[i*2:], uint16(count))
	case 5:
		binary.BigEndian.PutUint32(block[i*4:], uint32(count))
	default:
		binary.BigEndian.PutUint64(block[i*8:], count)
	}
}
