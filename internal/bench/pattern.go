// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/binary"
	"fmt"
)

// pattern tells what a block must hold: every 8-byte word is a mix of the run's seed, its place on the disk and the
// generation of the write, so that a lost, torn, doubled or misplaced write cannot go unseen.
type pattern struct {
	seed       uint64
	bs         int64
	generation []uint32 // of each block; 0: not written in this run, so its content is not known
	busy       []bool   // a request on the block is out: another one would race with it
}

func newPattern(seed uint64, size int64, bs int) *pattern {
	n := size / int64(bs)
	return &pattern{seed: seed, bs: int64(bs), generation: make([]uint32, n), busy: make([]bool, n)}
}

func mix(x uint64) uint64 { // the finalizer of splitmix64
	x ^= x >> 30
	x *= 0xbf58476d1ce4e5b9
	x ^= x >> 27
	x *= 0x94d049bb133111eb
	return x ^ x>>31
}

func (p *pattern) base(offset int64, generation uint32) uint64 {
	return mix(p.seed^uint64(offset)<<20) + uint64(generation)*0x9e3779b97f4a7c15
}

func (p *pattern) fill(b []byte, offset int64, generation uint32) {
	base := p.base(offset, generation)
	for i := 0; i+8 <= len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], mix(base+uint64(i)))
	}
}

// check compares a block that was read; unknown ones pass.
func (p *pattern) check(b []byte, offset int64) error {
	generation := p.generation[offset/p.bs]
	if generation == 0 {
		return nil
	}
	base := p.base(offset, generation)
	for i := 0; i+8 <= len(b); i += 8 {
		if got, want := binary.LittleEndian.Uint64(b[i:]), mix(base+uint64(i)); got != want {
			return fmt.Errorf("verify: bad data at byte %d: read %#016x, want %#016x (generation %d)", offset+int64(i), got, want, generation)
		}
	}
	return nil
}
