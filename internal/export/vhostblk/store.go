// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"fmt"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
)

// vector is room for the segments of one long chain, or of one merged request. It is a page.
type vector [maxSegments]sys.IOVec

// ranges is the same memory as the ranges of a discard, which has no segments.
func (v *vector) ranges() *[maxRangeSegments]virtioblk.DiscardRange {
	// SAFETY: the array is smaller than the vector, needs no more alignment, has no pointers, and the memory is not the
	// garbage collector's, who would have to know which of the two it is.
	return (*[maxRangeSegments]virtioblk.DiscardRange)(unsafe.Pointer(v))
}

// store is a queue's vectors, as many as can ever be needed at once. They lie outside of the Go heap in memory that costs
// nothing before it is touched: most requests need none, and an idle queue none at all. Must be used on the queue's loop.
type store struct {
	memory []byte
	free   []*vector // a stack: the one used last is still in the processor's cache
}

func newStore(vectors int) (*store, error) {
	const size = int(unsafe.Sizeof(vector{}))
	memory, err := sys.MmapAnon(vectors * size)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes for segments: %w", vectors*size, err)
	}
	st := &store{memory: memory, free: make([]*vector, vectors)}
	for i := range st.free {
		// SAFETY: the mapping holds so many vectors and begins on a page. Segments in it point to guest memory only, which
		// is not the collector's either.
		st.free[len(st.free)-1-i] = (*vector)(unsafe.Pointer(&memory[i*size]))
	}
	return st, nil
}

func (st *store) take() *vector {
	n := len(st.free) - 1
	v := st.free[n]
	st.free = st.free[:n]
	return v
}

func (st *store) give(v *vector) { st.free = append(st.free, v) } // never beyond what it once held

func (st *store) close() {
	err := sys.Munmap(st.memory)
	_ = err // of a mapping of our own: there is nothing that could be done
	st.memory, st.free = nil, nil
}
