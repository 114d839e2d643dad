// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"github.com/sluice-blk/sluice/internal/sys"
)

// advance gives the segments of the transfer that follows the first moved bytes of mem: at most [sys.IOV_MAX] of them.
//
// Where moved ends inside a segment the transfer is what is left of that one, and the next continues with whole
// segments. So nothing but that one segment is ever copied: it is put into dst, whose capacity of one is enough, and
// everything else is a part of mem.
func advance(dst, mem []IOVec, moved int64) []IOVec {
	for i := range mem {
		n := int64(mem[i].Len)
		switch {
		case moved >= n:
			moved -= n
		case moved > 0:
			return append(dst[:0], IOVecOf(mem[i].Bytes()[moved:]))
		default:
			return mem[i:min(len(mem), i+sys.IOV_MAX)]
		}
	}
	return nil
}

// zeroRest fills everything behind the first moved bytes of mem with zeros. Memory that went away meanwhile, as a
// guest's may, gives EFAULT.
func zeroRest(mem []IOVec, moved int64) error {
	return sys.Guarded(func() {
		for i := range mem {
			n := int64(mem[i].Len)
			if moved < n {
				clear(mem[i].Bytes()[moved:])
			}
			moved = max(0, moved-n)
		}
	})
}
