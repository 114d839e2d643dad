// SPDX-License-Identifier: Apache-2.0

package qcow2_test

import (
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/node/qcow2"
)

// Goal: whenever the power fails, in the middle of many requests too, what was flushed is there, and the image has lost
// space at worst. Method: the file is in memory and remembers what was not flushed; a clone gets a random half of its
// sectors, torn writes among them, and is opened, read and checked. Where refcounts are lazy, opening counts them anew first.
func TestPowerFails(t *testing.T) {
	crashes := 8
	switch {
	case testing.Short() || raced:
		crashes = 3
	case os.Getenv("SLUICE_SOAK") != "":
		crashes = 500
	}
	for _, g := range geometries {
		t.Run(g.name, func(t *testing.T) {
			size := int64(3 << 20)
			below := inMemory(t, newImage(t, g.o, size), mem.Options{Journal: true, Size: 48 << 20})
			n := open(t, below, &qcow2.Options{L2CacheBytes: 8192})
			h := block.NewHandle(n, nil)
			l := blocktest.Loop(t, nil)
			d := blocktest.Guarded(t, l, h)
			seed := seedOf(t)
			v := newVerifier(t, d, size, seed)
			rng := rand.New(rand.NewPCG(seed, 3))
			durable := newVerifier(t, nil, size, 0) // what is flushed; bytes that were touched since are not known
			for range crashes {
				for range 1 + rng.IntN(3) {
					v.run(16)
					durable.touched(v.last)
				}
				if rng.IntN(3) > 0 {
					if err := d.Flush(); err != nil {
						t.Fatal(err)
					}
					copy(durable.want, v.want)
					copy(durable.known, v.known)
				}
				calls := v.calls(24)
				durable.touched(calls)
				batch := d.Start(calls...)
				chance := rng.IntN(5)
				clone, err := below.CrashClone(func(int64) bool { return rng.IntN(4) < chance })
				if err != nil {
					t.Fatal(err)
				}
				if err := batch.Wait(t); err != nil {
					t.Fatal(err)
				}
				for _, c := range calls {
					v.settle(c)
				}
				afterCrash(t, clone, durable, g.name == "lazy")
			}
			d.Close()
			if err := h.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// touched forgets what requests may have changed.
func (v *verifier) touched(calls []*blocktest.Call) {
	for _, c := range calls {
		if c.Op == block.OpRead || c.Op == block.OpFlush {
			continue
		}
		n := c.Length
		for _, b := range c.Bufs {
			n += int64(len(b))
		}
		v.know(c.Offset, n, false)
	}
}

// afterCrash opens what a crash left. Leaks are as they should be.
func afterCrash(t *testing.T, left *mem.Node, durable *verifier, lazy bool) {
	t.Helper()
	below := &checked{Node: left, t: t, leaky: true}
	if !lazy { // as it was left, before anybody opens it
		below.check()
	}
	n := open(t, below, nil)
	h := block.NewHandle(n, nil)
	d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
	v := &verifier{t: t, d: d, want: slices.Clone(durable.want), known: slices.Clone(durable.known), unit: 512, rng: rand.New(rand.NewPCG(1, 1))}
	v.all()
	// It goes on from there.
	for i := range v.known {
		v.known[i] = false
	}
	v.run(16)
	v.all()
	d.Close()
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
}
