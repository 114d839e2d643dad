// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/qcow2"
)

// ImageReport is what a disk in an image format counted, beside what passed its door.
type ImageReport struct {
	Format string `json:"format"`
	// Direct requests were handed on as they came, Indirect ones took a coroutine: tables to read, clusters to make.
	Direct   uint64 `json:"direct"`
	Indirect uint64 `json:"indirect"`
	// Of the tables of places, and how many bytes of the disk a full cache of them covers.
	L2Hits        uint64 `json:"l2_hits"`
	L2Misses      uint64 `json:"l2_misses"`
	L2CacheBytes  int64  `json:"l2_cache_bytes"`
	L2CacheCovers int64  `json:"l2_cache_covers_bytes"`
	L2Dirty       int64  `json:"l2_dirty_bytes"`

	RefcountHits   uint64 `json:"refcount_hits"`
	RefcountMisses uint64 `json:"refcount_misses"`

	Commits      uint64 `json:"commits"`
	FileFlushes  uint64 `json:"file_flushes"`
	Allocated    uint64 `json:"clusters_allocated"`
	Freed        uint64 `json:"clusters_freed"`
	Pending      int64  `json:"clusters_pending"` // let go, and not yet to be used anew
	UnpackHits   uint64 `json:"compressed_hits"`
	UnpackMisses uint64 `json:"compressed_misses"`
	Corrupt      bool   `json:"corrupt"`
}

// image is the image of the disk, below what may stand before it; nil for a disk that is none.
func (d *Disk) image() *qcow2.Node {
	n := d.handle.Node()
	for {
		switch x := n.(type) {
		case *qcow2.Node:
			return x
		case block.Filter:
			n = x.Below()
		default:
			return nil
		}
	}
}

// watch has damage of the image logged when it is met: from then on the guest's writes fail, and nothing else tells why.
func (d *Disk) watch(log *slog.Logger) {
	if n := d.image(); n != nil {
		n.OnDamage(func(why error) {
			go log.Error("the image is damaged and takes no more writes", "disk", d.Name(), "error", why) // the loop goes on
		})
	}
}

// imageReport is nil for a disk that is no image.
func (d *Disk) imageReport(ctx context.Context) (*ImageReport, error) {
	n := d.image()
	if n == nil {
		return nil, nil
	}
	s, err := n.Stats(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask image %s: %w", d.Name(), err)
	}
	m := &s.Tables
	return &ImageReport{
		Format: "qcow2", Direct: s.Direct, Indirect: s.Indirect, L2Hits: m.L2Hits, L2Misses: m.L2Misses, L2CacheBytes: m.L2CacheBytes,
		L2CacheCovers: m.L2CacheCovers, L2Dirty: m.L2Dirty, RefcountHits: m.RefcountHits, RefcountMisses: m.RefcountMisses,
		Commits: m.Commits, FileFlushes: s.FileFlushes, Allocated: m.Allocated, Freed: m.Freed, Pending: m.Pending,
		UnpackHits: s.CompressedHits, UnpackMisses: s.CompressedMisses, Corrupt: m.Corrupt,
	}, nil
}
