// SPDX-License-Identifier: Apache-2.0

package qcow2_test

import (
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/node/mem"
)

func TestConformanceInMemory(t *testing.T) {
	for _, g := range geometries {
		t.Run(g.name, func(t *testing.T) {
			blocktest.Conform(t, blocktest.Subject{Open: func(t *testing.T, size int64) block.Node {
				return open(t, inMemory(t, newImage(t, g.o, size), mem.Options{}), nil)
			}})
		})
	}
}

func TestConformanceOnFiles(t *testing.T) {
	for _, c := range []struct {
		kind  aio.EngineKind
		cache block.CacheMode
		g     geometry
	}{
		{aio.EngineIOUring, block.CacheDefault, geometries[0]},
		{aio.EngineLinuxAIO, block.CacheDefault, geometries[0]},
		{aio.EngineThreads, block.CacheWriteback, geometries[2]},
	} {
		t.Run(c.kind.String()+"/"+c.g.name, func(t *testing.T) {
			s := blocktest.Subject{Open: func(t *testing.T, size int64) block.Node {
				return open(t, onFile(t, c.g.o, size, file.Options{Engine: c.kind, Cache: c.cache, Lock: true}), nil)
			}}
			if c.kind == aio.EngineIOUring {
				s.Loop = &aio.LoopOptions{Poller: aio.PollerIOUring}
			}
			blocktest.Conform(t, s)
		})
	}
}
