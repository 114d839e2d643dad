// SPDX-License-Identifier: Apache-2.0

package sparse

import (
	"errors"
	"math"
	"math/rand/v2"
	"syscall"
	"testing"
)

// Goal: Lookup is the longest run of one kind, cut to what was asked. Method: against a walk block by block.
func TestLookupAgainstWalk(t *testing.T) {
	const block, blocks = 4096, 3000
	size := int64(block*blocks - 1000)
	rng := rand.New(rand.NewPCG(7, 7))
	tab, err := NewTable(size, block, 1<<40)
	if err != nil {
		t.Fatal(err)
	}
	type cell struct {
		kind Kind
		host int64
	}
	model := make([]cell, blocks)
	host := int64(1 << 20)
	for i := 0; i < blocks; {
		run, kind := 1+rng.IntN(40), Kind(rng.IntN(3))
		if rng.IntN(4) == 0 {
			run, kind = 700, Hole // whole pages that are not kept
		}
		host += block * int64(rng.IntN(3))
		for ; run > 0 && i < blocks; run, i = run-1, i+1 {
			model[i] = cell{kind: kind}
			switch kind {
			case Zero:
				tab.SetZero(int64(i))
			case Data:
				model[i].host = host
				if err := tab.SetData(int64(i), host); err != nil {
					t.Fatal(err)
				}
				host += block
			}
		}
	}
	byteAt := func(off int64) cell {
		c := model[off/block]
		if c.kind == Data {
			c.host += off % block
		}
		return c
	}
	for range 2000 {
		off := rng.Int64N(size)
		n := 1 + rng.Int64N(size-off)
		e := tab.Lookup(off, n)
		first := byteAt(off)
		if e.Offset != off || e.Length < 1 || e.Length > n || e.Kind != first.kind || e.Host != first.host {
			t.Fatalf("lookup of %d+%d gives %+v, want %+v", off, n, e, first)
		}
		same := func(at int64) bool {
			c := byteAt(at)
			return c.kind == e.Kind && (c.kind != Data || c.host == e.Host+at-off)
		}
		for at := off; at < off+e.Length; at += block {
			if !same(at) {
				t.Fatalf("lookup of %d+%d gives %+v, and byte %d is another one", off, n, e, at)
			}
		}
		if e.Length < n && same(off+e.Length) {
			t.Fatalf("lookup of %d+%d gives %+v, and it goes on", off, n, e)
		}
	}
}

func TestRoomOfGrains(t *testing.T) {
	tab, err := NewTable(4*65536, 65536, 200<<10)
	if err != nil {
		t.Fatal(err)
	}
	for i, host := range []int64{1024, 5120, 512, 190 << 10} {
		if err := tab.SetDeflate(int64(i), host); err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range []int64{4096, 131072, 131072, 10 << 10} {
		e := tab.Lookup(int64(i)*65536+100, 1<<20)
		if e.Kind != Deflate || e.Room != want || e.Length != 65536-100 {
			t.Errorf("grain %d: %+v, want room %d", i, e, want)
		}
	}
}

func TestWhatATableRefuses(t *testing.T) {
	for _, c := range [][2]int64{{1 << 20, 0}, {1 << 20, 513}, {1 << 20, 256}, {-1, 512}, {math.MaxInt64, 512}, {math.MaxInt64, 1 << 20}, {MaxBlocks*512 + 1, 512}} {
		if _, err := NewTable(c[0], c[1], 1<<20); err == nil {
			t.Errorf("a disk of %d in blocks of %d is taken", c[0], c[1])
		}
	}
	tab, err := NewTable(10<<20, 1<<20, 5<<20+100)
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []int64{0, -512, 513, math.MinInt64, math.MaxInt64 &^ 511, 5 << 20, 4<<20 + 1024} {
		err := tab.SetData(0, host)
		var corrupt *CorruptError
		if !errors.As(err, &corrupt) || !errors.Is(err, syscall.EIO) {
			t.Errorf("a block at %d: %v", host, err)
		}
	}
	if err := tab.SetData(9, 4<<20+512); err != nil {
		t.Error(err) // the file's last sector is cut short
	}
}
