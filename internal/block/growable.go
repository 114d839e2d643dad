// SPDX-License-Identifier: Apache-2.0

package block

import (
	"fmt"
	"math"
	"syscall"
)

// Unbounded is the size in the Info of a node that grows when it is written beyond its end. What was never written reads as
// zeros, however far away. It is a multiple of every alignment.
const Unbounded = math.MaxInt64 &^ (1<<30 - 1)

// Growable is a node whose size is Unbounded, and that has a length all the same: up to its last byte that takes space, as a
// file has one. Image formats stand on such nodes.
type Growable interface {
	// Length is the length now, in bytes. A write in flight beyond it may or may not count. Safe for concurrent use, also on
	// a loop.
	Length() (int64, error)
	// Truncate makes the length n. What is cut off is gone. Nothing may be in flight beyond n. It may take a while, so it is
	// called on a loop only when the loop has nothing better to do. Otherwise safe for concurrent use.
	Truncate(n int64) error
}

// Length is the length of a node that has one of its own, and the size of any other.
func Length(n Node) (int64, error) {
	if g, ok := n.(Growable); ok {
		return g.Length()
	}
	return n.Info().Size, nil
}

// Truncate sets the length of a node that has one of its own.
func Truncate(n Node, length int64) error {
	if g, ok := n.(Growable); ok {
		return g.Truncate(length)
	}
	return fmt.Errorf("set the length of %s to %d: %w", n.Info().Name, length, syscall.ENOTSUP)
}
