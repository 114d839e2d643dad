// SPDX-License-Identifier: Apache-2.0

package metadata

import "math/rand/v2"

// claims knows which host clusters hold tables, so that neither data nor another table is ever written upon one.
//
// It is a set of cluster numbers in open addressing, a few words for each cluster that is claimed: an image decides
// where its tables are, and must not decide how much memory that takes. The factor of the hash is random, so that no
// image can be made whose clusters all meet.
type claims struct {
	slots  []uint64 // cluster + 1, 0 for none; a power of two of them
	n      int
	factor uint64
	shift  uint32         // 64 - log2 of the slots
	twice  map[int64]bool // claimed by two tables: the image is damaged
}

// claim marks n clusters from c on.
func (k *claims) claim(c, n int64) {
	for ; n > 0; c, n = c+1, n-1 {
		if !k.add(uint64(c) + 1) {
			if k.twice == nil {
				k.twice = make(map[int64]bool)
			}
			k.twice[c] = true
		}
	}
}

// release takes the mark away. Clusters that were claimed twice stay claimed.
func (k *claims) release(c, n int64) {
	for ; n > 0; c, n = c+1, n-1 {
		if !k.twice[c] {
			k.remove(uint64(c) + 1)
		}
	}
}

func (k *claims) claimed(c int64) bool {
	return k.n > 0 && k.slots[k.find(uint64(c)+1)] != 0
}

// any tells whether one of n clusters from c on is claimed.
func (k *claims) any(c, n int64) bool {
	for ; n > 0; c, n = c+1, n-1 {
		if k.claimed(c) {
			return true
		}
	}
	return false
}

// contested tells whether one of n clusters from c on is claimed by two tables.
func (k *claims) contested(c, n int64) bool {
	if len(k.twice) == 0 {
		return false
	}
	for ; n > 0; c, n = c+1, n-1 {
		if k.twice[c] {
			return true
		}
	}
	return false
}

func (k *claims) home(key uint64) int { return int(key * k.factor >> k.shift) }

// find is the slot of a key, or the free one where it would be put.
func (k *claims) find(key uint64) int {
	i := k.home(key)
	for k.slots[i] != 0 && k.slots[i] != key {
		i = (i + 1) & (len(k.slots) - 1)
	}
	return i
}

// add is false when the key is there already.
func (k *claims) add(key uint64) bool {
	if 2*(k.n+1) > len(k.slots) {
		k.grow()
	}
	i := k.find(key)
	if k.slots[i] != 0 {
		return false
	}
	k.slots[i] = key
	k.n++
	return true
}

func (k *claims) grow() {
	old := k.slots
	size := max(64, 2*len(old))
	k.slots = make([]uint64, size)
	k.factor, k.shift = rand.Uint64()|1, 64
	for ; size > 1; size >>= 1 {
		k.shift--
	}
	for _, key := range old {
		if key != 0 {
			k.slots[k.find(key)] = key
		}
	}
}

// remove takes a key out and moves up those behind it that would not be found across the gap.
func (k *claims) remove(key uint64) {
	if k.n == 0 {
		return
	}
	mask := len(k.slots) - 1
	gap := k.find(key)
	if k.slots[gap] == 0 {
		return
	}
	k.n--
	for i := (gap + 1) & mask; k.slots[i] != 0; i = (i + 1) & mask {
		if home := k.home(k.slots[i]); (i-home)&mask >= (i-gap)&mask {
			k.slots[gap], gap = k.slots[i], i
		}
	}
	k.slots[gap] = 0
}
