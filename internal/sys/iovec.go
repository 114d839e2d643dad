// SPDX-License-Identifier: Apache-2.0

package sys

import "unsafe"

// IOVec is the kernel's struct iovec: Len bytes at Base. An array of them can be handed to the kernel as it is.
//
// Base may point into guest memory, which the Go runtime does not know; it is a pointer all the same, so that a
// segment inside the Go heap stays alive for as long as somebody can reach the IOVec.
type IOVec struct {
	Base *byte
	Len  uint64
}

// IOVecOf describes the bytes of b. An empty b gives a segment of no bytes.
func IOVecOf(b []byte) IOVec {
	return IOVec{Base: unsafe.SliceData(b), Len: uint64(len(b))}
}

// Bytes is the segment as a slice over the same memory.
func (v IOVec) Bytes() []byte {
	// SAFETY: whoever made the IOVec owns Len bytes at Base for as long as the IOVec is in use.
	return unsafe.Slice(v.Base, int(v.Len))
}
