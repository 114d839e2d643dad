// SPDX-License-Identifier: Apache-2.0

package metadata

// claims knows which host clusters hold tables, so that neither data nor another table is ever written upon one: one bit
// a cluster, in chunks that exist only where there are tables.
type claims struct {
	chunks []*[chunkWords]uint64
	far    map[int64]bool // clusters that no file of ours reaches: only a damaged image names them
	twice  map[int64]bool // claimed by two tables: the image is damaged
}

const (
	chunkBits  = 15 // 4 KiB, for 2 GiB of clusters of 64 KiB
	chunkWords = 1 << chunkBits / 64
	// maxChunks bounds what a damaged offset can make us allocate: 1 MiB of pointers, 2^32 clusters.
	maxChunks = 1 << 17
)

// claim marks n clusters from c on.
func (k *claims) claim(c, n int64) {
	for ; n > 0; c, n = c+1, n-1 {
		if k.claimed(c) {
			if k.twice == nil {
				k.twice = make(map[int64]bool)
			}
			k.twice[c] = true
			continue
		}
		i := c >> chunkBits
		if i >= maxChunks {
			if k.far == nil {
				k.far = make(map[int64]bool)
			}
			k.far[c] = true
			continue
		}
		for int64(len(k.chunks)) <= i {
			k.chunks = append(k.chunks, nil)
		}
		if k.chunks[i] == nil {
			k.chunks[i] = new([chunkWords]uint64)
		}
		k.chunks[i][c>>6&(chunkWords-1)] |= 1 << (c & 63)
	}
}

// release takes the mark away. Clusters that were claimed twice stay claimed.
func (k *claims) release(c, n int64) {
	for ; n > 0; c, n = c+1, n-1 {
		if k.twice[c] {
			continue
		}
		delete(k.far, c)
		if i := c >> chunkBits; i < int64(len(k.chunks)) && k.chunks[i] != nil {
			k.chunks[i][c>>6&(chunkWords-1)] &^= 1 << (c & 63)
		}
	}
}

func (k *claims) claimed(c int64) bool {
	i := c >> chunkBits
	if i < int64(len(k.chunks)) {
		return k.chunks[i] != nil && k.chunks[i][c>>6&(chunkWords-1)]>>(c&63)&1 != 0
	}
	return k.far != nil && k.far[c]
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
