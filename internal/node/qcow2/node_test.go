// SPDX-License-Identifier: Apache-2.0

package qcow2_test

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

func TestConformanceInMemory(t *testing.T) {
	for i, g := range geometries {
		if raced && i%3 != 0 {
			continue
		}
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

// An image whose clusters lie in a file of their own.
func TestConformanceWithDataFile(t *testing.T) {
	for _, o := range []create.Options{
		{DataFile: "d"},
		{DataFile: "d", ExtendedL2: true, ClusterSize: 16384},
		{DataFile: "d", DataFileRaw: true},
	} {
		t.Run(fmt.Sprintf("raw=%v,extended=%v", o.DataFileRaw, o.ExtendedL2), func(t *testing.T) {
			blocktest.Conform(t, blocktest.Subject{Open: func(t *testing.T, size int64) block.Node {
				data, err := mem.New(mem.Options{Size: 16 << 20, Growable: true})
				if err != nil {
					t.Fatal(err)
				}
				n := open(t, inMemory(t, newImage(t, o, size), mem.Options{}), nil)
				if !n.NeedsDataFile() {
					t.Fatal("it needs no data file")
				}
				l := blocktest.Loop(t, nil)
				if err := blocktest.On(t, l, func() error { _, err := n.Queue(l); return err }); !errors.Is(err, syscall.ENOENT) {
					t.Fatalf("without its data file: %v", err)
				}
				if err := n.SetDataFile(data); err != nil {
					t.Fatal(err)
				}
				return n
			}})
		})
	}
}
