// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"math/rand/v2"
	"testing"

	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

// nowhere is a store that keeps the first bytes, which are the tables, and forgets the rest.
type nowhere struct{ *memStore }

func (s nowhere) Write(p []byte, off int64) error {
	if off > 4<<20 {
		return nil
	}
	return s.memStore.Write(p, off)
}

// BenchmarkLookup translates single blocks of a disk whose tables are in memory.
func BenchmarkLookup(b *testing.B) {
	_, g := usual(b, create.Options{Size: 256 << 20}, Options{})
	for off := int64(0); off < 256<<20; off += 1 << 20 {
		var a Allocation
		must(b, g.m.BeginWrite(&a, off, 1<<20))
		g.m.Link(&a)
	}
	r := rand.New(rand.NewPCG(1, 1))
	var offs [1024]int64
	for i := range offs {
		offs[i] = r.Int64N(256<<20) &^ 4095
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		t := g.m.Enter()
		if x, ok := g.m.Lookup(offs[i&1023], 4096); !ok || !x.InPlace {
			b.Fatal(x)
		}
		g.m.Exit(t)
	}
}

// BenchmarkAllocate finds clusters for random writes into an empty disk, a commit for every 64 of them.
func BenchmarkAllocate(b *testing.B) {
	sh := shape{"", create.Options{Size: 1 << 40}, Options{}}
	s := nowhere{newImage(b, &sh)}
	m := mustOpen(b, s, &sh.open)
	r := rand.New(rand.NewPCG(1, 1))
	var a Allocation
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		off := r.Int64N(8<<30) &^ 4095
		must(b, m.BeginWrite(&a, off, 4096))
		m.Link(&a)
		if i%64 == 63 {
			must(b, m.Commit())
		}
	}
}
