// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"math/rand/v2"
	"testing"
)

// TestClaimsAreASet compares the set with a map, for clusters near each other and far apart.
func TestClaimsAreASet(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	var k claims
	want := make(map[int64]bool)
	for range 200000 {
		c := r.Int64N(3000)
		if c%3 == 0 {
			c <<= 35
		}
		switch {
		case r.IntN(2) == 0 && !want[c]:
			k.claim(c, 1)
			want[c] = true
		case want[c]:
			k.release(c, 1)
			delete(want, c)
		}
		if probe := r.Int64N(3000); k.claimed(probe) != want[probe] {
			t.Fatalf("cluster %d: claimed %v, want %v", probe, k.claimed(probe), want[probe])
		}
	}
	if k.n != len(want) || k.contested(0, 3000) {
		t.Errorf("%d claims, want %d", k.n, len(want))
	}
	k.claim(5, 3)
	k.claim(7, 1)
	k.release(7, 1)
	if !k.contested(5, 3) || !k.any(7, 1) {
		t.Error("a cluster that two claimed is not told")
	}
}
