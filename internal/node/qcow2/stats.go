// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"context"

	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// Counters count what an image did since it came to its loop.
type Counters struct {
	Direct           uint64 // requests that were carried out as they came
	Indirect         uint64 // requests that took a coroutine
	FileFlushes      uint64 // of the files below, for the tables and for the guest
	CompressedHits   uint64 // compressed clusters that were at hand
	CompressedMisses uint64 // that were read and unpacked
}

// Stats are the counters of an open image: of its requests and of its tables.
type Stats struct {
	Counters
	Tables metadata.Stats
}

// Stats asks the image's loop, so it must not be called on one. Otherwise safe for concurrent use.
func (n *Node) Stats(ctx context.Context) (Stats, error) {
	var s Stats
	err := n.control(ctx, func() error {
		s = Stats{n.home.count, n.view.Stats()}
		return nil
	})
	return s, err
}
