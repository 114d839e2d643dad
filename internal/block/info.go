// SPDX-License-Identifier: Apache-2.0

package block

import "fmt"

// Capability tells how something is done.
type Capability uint8

const (
	// None: not at all. It must not be offered to anybody.
	None Capability = iota
	// Emulated: by other means, correct and slower.
	Emulated
	// Native: by the thing itself.
	Native
)

// String is "none", "emulated" or "native".
func (c Capability) String() string {
	names := [...]string{"none", "emulated", "native"}
	if int(c) < len(names) {
		return names[c]
	}
	return fmt.Sprintf("capability(%d)", uint8(c))
}

// Info is what a node, or a handle, says about itself. Sizes, offsets and limits are bytes; a limit of 0 is no limit.
type Info struct {
	Name     string // for people and messages
	Size     int64  // a multiple of Align
	ReadOnly bool

	// Align is the granularity that offset, length and the length of each segment must have; MemAlign is the one of the
	// segments' addresses. 1 means bytes. Both are powers of two, and 1 in what a handle says.
	Align    int
	MemAlign int

	OptimalIO     int // preferred size and alignment of requests, 0 unknown
	LogicalBlock  int // smallest unit that a guest should be told of
	PhysicalBlock int // unit that the medium writes without reading

	MaxTransfer    int64 // of one read or write
	MaxSegments    int
	MaxDiscard     int64
	MaxWriteZeroes int64
	DiscardAlign   int64 // granularity below which a discard frees nothing
	SpaceAlign     int64 // granularity of WriteZeroes and Discard where it is coarser than Align; 0 where not, and for a handle

	Flush, FUA, Discard, WriteZeroes Capability

	// WriteCache tells that a completed write may be lost when power fails until a flush made it durable.
	WriteCache bool
	// SingleLoop tells that all queues must be on one loop: state is kept there that no other loop may touch.
	SingleLoop bool

	Durability string // one sentence: what flush and FUA mean here
	Engine     string // for people: which engine serves it, and why
}
