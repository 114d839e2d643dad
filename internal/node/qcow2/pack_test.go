// SPDX-License-Identifier: Apache-2.0

package qcow2_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	format "github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/node/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

var kinds = map[string]uint8{"zlib": format.CompressionZlib, "zstd": format.CompressionZstd}

// What is packed is unpacked the same, in whatever sector it ends.
func TestPackedClustersComeBack(t *testing.T) {
	for name, kind := range kinds {
		t.Run(name, func(t *testing.T) {
			p, err := qcow2.NewPacker(kind)
			if err != nil {
				t.Fatal(err)
			}
			u, err := qcow2.NewUnpacker(kind)
			if err != nil {
				t.Fatal(err)
			}
			defer u.Close()
			rng := rand.New(rand.NewPCG(1, 2))
			for size := 4096; size <= 2<<20; size *= 8 {
				src, dst := make([]byte, size), make([]byte, size)
				for i := range src {
					src[i] = byte(rng.IntN(1 + i%7))
				}
				packed, ok := p.Pack(nil, src)
				if !ok || len(packed) >= size {
					t.Fatalf("%d bytes became %d", size, len(packed))
				}
				cut := packed[: len(packed)/3 : len(packed)/3]
				packed = append(packed, bytes.Repeat([]byte{0xa5}, 511)...)
				if err := u.Unpack(dst, packed); err != nil || !bytes.Equal(dst, src) {
					t.Fatalf("%d bytes come back otherwise, or %v", size, err)
				}
				if err := u.Unpack(dst, cut); !errors.Is(err, block.ErrCorrupt) {
					t.Errorf("cut off: %v", err)
				}
				for i := range src {
					src[i] = byte(rng.Uint32())
				}
				if _, ok := p.Pack(nil, src); ok {
					t.Errorf("%d bytes of noise became shorter", size)
				}
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	if _, err := qcow2.NewPacker(7); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Error(err)
	}
	if _, err := qcow2.NewUnpacker(7); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Error(err)
	}
}

// Bytes that nobody packed neither panic nor take memory.
func FuzzUnpack(f *testing.F) {
	for _, kind := range kinds {
		p, err := qcow2.NewPacker(kind)
		if err != nil {
			f.Fatal(err)
		}
		packed, _ := p.Pack(nil, make([]byte, 4096))
		f.Add(kind, packed)
		f.Add(kind, packed[:len(packed)/2])
	}
	f.Fuzz(func(t *testing.T, kind uint8, b []byte) {
		u, err := qcow2.NewUnpacker(kind & 1)
		if err != nil {
			t.Fatal(err)
		}
		defer u.Close()
		_ = u.Unpack(make([]byte, 4096), b) // an error is as good as none
	})
}

// An image filled with compressed clusters, many at a time, read while it is written, and overwritten in part.
func TestCompressedWriter(t *testing.T) {
	for _, g := range []geometry{
		{"64k", create.Options{}},
		{"zstd", create.Options{CompressionType: format.CompressionZstd}},
		{"512", create.Options{ClusterSize: 512}},
		{"2M", create.Options{ClusterSize: 2 << 20}},
		{"extended", create.Options{ExtendedL2: true, ClusterSize: 16384}},
	} {
		t.Run(g.name, func(t *testing.T) {
			cluster := g.o.ClusterSize
			if cluster == 0 {
				cluster = 65536
			}
			size := min(100*cluster, 20<<20)
			n := open(t, inMemory(t, newImage(t, g.o, size), mem.Options{}), nil)
			h := block.NewHandle(n, nil)
			l := blocktest.Loop(t, nil)
			d := blocktest.Guarded(t, l, h)
			want := make([]byte, size)
			for i := range want {
				want[i] = byte(i / 100 % 251)
			}
			writeCompressed(t, n, d, want, cluster)
			got := make([]byte, size)
			if err := d.Read(0, got); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("other bytes, or %v", err)
			}
			for at := cluster / 3; at+700 < size; at += cluster*2 + 512 {
				blocktest.Pattern(want[at:at+700], at, 9)
				if err := d.Write(at, want[at:at+700]); err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(d.Flush(), d.Read(0, got)); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("other bytes, or %v", err)
			}
			d.Close()
			if err := h.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

func writeCompressed(t *testing.T, n *qcow2.Node, d *blocktest.Disk, want []byte, cluster int64) {
	t.Helper()
	p, err := qcow2.NewPacker(n.Header().CompressionType)
	if err != nil {
		t.Fatal(err)
	}
	var w *qcow2.CompressedWriter
	err = blocktest.On(t, d.Loop, func() (err error) {
		w, err = n.CompressedWriter(d.Loop)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	submit := func(off int64, data []byte, check func(err error)) {
		all.Add(1)
		c := &qcow2.CompressedWrite{Offset: off, Data: data, Done: func(err error) {
			check(err)
			all.Done()
		}}
		d.Loop.Post(func() { w.Submit(c) })
	}
	for at := int64(0); at < int64(len(want)); at += cluster {
		packed, ok := p.Pack(nil, want[at:at+cluster])
		if !ok {
			t.Fatal("it does not become shorter")
		}
		submit(at, packed, func(err error) {
			if err != nil {
				t.Error(err)
			}
		})
	}
	for _, at := range []int64{1, -cluster, int64(len(want))} {
		submit(at, []byte{1}, func(err error) {
			if !errors.Is(err, syscall.EINVAL) {
				t.Errorf("at %d: %v", at, err)
			}
		})
	}
	all.Wait()
	if err := blocktest.On(t, d.Loop, w.Close); err != nil {
		t.Error(err)
	}
}
