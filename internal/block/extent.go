// SPDX-License-Identifier: Apache-2.0

package block

import (
	"context"
	"fmt"
	"syscall"
)

// Extent is a stretch of a node that is of one kind.
type Extent struct {
	Offset, Length int64 // bytes of the node that was asked

	// Data tells that something is stored there; Zero that it reads as zeros. Data that happens to be zeros is Data alone,
	// space that was reserved and reads as zeros is both or Zero alone, as the store tells it.
	Data, Zero bool
	// Present tells that this node, or one of those behind it, has something to say of the stretch. Without it nobody does,
	// and it reads as zeros.
	Present bool
	// Depth is how many nodes behind the one that was asked it is stored: 0 is itself, 1 its backing node.
	Depth int
	// Compressed data has no bytes of its own in File.
	Compressed bool
	// Host is where in File the stretch begins, -1 where that is unknown or says nothing.
	Host int64
	File string
}

// Mapper is a node that can tell how its contents are stored.
type Mapper interface {
	// Map calls each for the stretches of [off, off+n), in order and without gaps; two of a kind may stand side by side. The
	// range is within the node. It ends with the first error of each. Control plane: it may wait for files and for loops, so it
	// must not be called on one. Otherwise safe for concurrent use.
	Map(ctx context.Context, off, n int64, each func(Extent) error) error
}

// Map calls each for the stretches of [off, off+n) of a node, as Mapper says. A node that cannot tell is one stretch of
// data. The same rules of threads hold.
func Map(ctx context.Context, node Node, off, n int64, each func(Extent) error) error {
	i := node.Info()
	if off < 0 || n < 0 || off > i.Size || n > i.Size-off {
		return fmt.Errorf("map %d bytes at %d of %s: it has %d: %w", n, off, i.Name, i.Size, syscall.EINVAL)
	}
	if n == 0 {
		return nil
	}
	if m, ok := node.(Mapper); ok {
		return m.Map(ctx, off, n, each)
	}
	if err := context.Cause(ctx); err != nil {
		return err
	}
	return each(Extent{Offset: off, Length: n, Data: true, Present: true, Host: -1, File: i.Name})
}
