// SPDX-License-Identifier: Apache-2.0

package raw_test

import (
	"bytes"
	"errors"
	"math"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/node/raw"
)

func memory(t *testing.T, size int64) block.Node {
	t.Helper()
	n, err := mem.New(mem.Options{Size: size})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestConformance(t *testing.T) {
	for name, o := range map[string]raw.Options{"whole": {}, "window": {Offset: 12288, Size: blocktest.DiskSize}, "rest": {Offset: 4096}} {
		t.Run(name, func(t *testing.T) {
			blocktest.Conform(t, blocktest.Subject{Open: func(t *testing.T, size int64) block.Node {
				below := size + o.Offset
				if o.Size != 0 {
					below += 8192
				}
				n, err := raw.New(memory(t, below), &o)
				if err != nil {
					t.Fatal(err)
				}
				return n
			}})
		})
	}
}

// What is beside the window is neither read nor written.
func TestWindowKeepsToItself(t *testing.T) {
	whole := memory(t, 16384)
	outer := block.NewHandle(whole, nil)
	l := blocktest.Loop(t, nil)
	d := blocktest.Guarded(t, l, outer)
	model := make([]byte, 16384)
	blocktest.Pattern(model, 0, 1)
	if err := d.Write(0, model); err != nil {
		t.Fatal(err)
	}
	n, err := raw.New(whole, &raw.Options{Offset: 1000, Size: 5000})
	if err != nil {
		t.Fatal(err)
	}
	window := block.NewHandle(n, nil)
	w := blocktest.Guarded(t, l, window)
	b := make([]byte, 5000)
	if err := w.Read(0, b); err != nil || !bytes.Equal(b, model[1000:6000]) {
		t.Errorf("the window shows other bytes, or %v", err)
	}
	for _, at := range []int64{5000, 4999, -1, math.MaxInt64 - 999} {
		if err := w.Write(at, make([]byte, 2)); !errors.Is(err, block.ErrRange) {
			t.Errorf("at %d: %v", at, err)
		}
	}
	if err := w.Zero(0, 5000, block.FlagUnmap); err != nil {
		t.Fatal(err)
	}
	clear(model[1000:6000])
	got := make([]byte, len(model))
	if err := d.Read(0, got); err != nil || !bytes.Equal(got, model) {
		t.Errorf("something beside the window changed, or %v", err)
	}
	w.Close()
	d.Close()
	if err := window.Close(); err != nil {
		t.Error(err)
	}
}

func TestWindowsThatDoNotFit(t *testing.T) {
	below := blocktest.NewShape(t, memory(t, 1<<20), func(i *block.Info) { i.Align = 512 })
	defer below.Close()
	for _, o := range []raw.Options{
		{Offset: -512}, {Size: -512}, {Offset: 1<<20 + 512}, {Size: 1<<20 + 512}, {Offset: 512, Size: 1 << 20},
		{Offset: math.MaxInt64 &^ 511, Size: math.MaxInt64 &^ 511}, {Offset: 100}, {Size: 100},
	} {
		if _, err := raw.New(below, &o); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	if n, err := raw.New(below, &raw.Options{Offset: 1 << 20}); err != nil || n.Info().Size != 0 {
		t.Errorf("an empty window: %v", err)
	}
}
