// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"unsafe"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/sys"
)

// cursor is a place in the segments of a request. The segments may be guest memory, which can vanish: what touches it
// answers EFAULT then.
type cursor struct {
	mem []block.IOVec
	seg int
	off uint64 // in the segment
}

// take appends the segments of the next n bytes to dst, and moves on.
func (c *cursor) take(dst []block.IOVec, n int64) []block.IOVec {
	for n > 0 && c.seg < len(c.mem) {
		v := c.mem[c.seg]
		k := min(v.Len-c.off, uint64(n))
		if k > 0 {
			// SAFETY: off is less than v.Len, so the address is inside the segment.
			dst = append(dst, block.IOVec{Base: (*byte)(unsafe.Add(unsafe.Pointer(v.Base), c.off)), Len: k})
		}
		n -= int64(k)
		c.off += k
		if c.off == v.Len {
			c.seg, c.off = c.seg+1, 0
		}
	}
	return dst
}

// next gives the rest of the segment, at most n bytes of it, and moves on.
func (c *cursor) next(n int) []byte {
	for c.seg < len(c.mem) && c.off == c.mem[c.seg].Len {
		c.seg, c.off = c.seg+1, 0
	}
	if c.seg == len(c.mem) {
		return nil
	}
	b := c.mem[c.seg].Bytes()[c.off:]
	b = b[:min(len(b), n)]
	c.off += uint64(len(b))
	return b
}

// fill copies src to the memory, and moves on.
func (c *cursor) fill(src []byte) error {
	for len(src) > 0 {
		b := c.next(len(src))
		if len(b) == 0 {
			return block.ErrMalformed // there is less memory than the request says
		}
		if err := sys.CopyGuarded(b, src); err != nil {
			return err
		}
		src = src[len(b):]
	}
	return nil
}

// zero makes the next n bytes of the memory zero, as far as there are any, and moves on.
func (c *cursor) zero(n int64) error {
	return sys.Guarded(func() {
		for n > 0 {
			b := c.next(int(n))
			if len(b) == 0 {
				return
			}
			clear(b)
			n -= int64(len(b))
		}
	})
}

// zeroAll makes all of mem zero.
func zeroAll(mem []block.IOVec) error {
	return sys.Guarded(func() {
		for i := range mem {
			clear(mem[i].Bytes())
		}
	})
}
