// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"math/rand/v2"
	"os"
	"testing"
)

// soak is how often something is done: more in the long tests, less in the short ones.
func soak(n int) int {
	switch {
	case os.Getenv("SLUICE_SOAK") != "":
		return n * 100
	case testing.Short():
		return max(1, n/4)
	}
	return n
}

// TestAnyOperationsGiveTheDiskThatTheyOught makes random operations with each kind of image, and compares the disk with a
// plain array, now and then after opening the image anew; the image is then without a fault or a leak.
func TestAnyOperationsGiveTheDiskThatTheyOught(t *testing.T) {
	for _, sh := range shapes() {
		t.Run(sh.name, func(t *testing.T) {
			for seed := range uint64(soak(3)) {
				randomOperations(t, sh, seed, 400)
			}
		})
	}
}

func randomOperations(t *testing.T, sh shape, seed uint64, steps int) {
	r := rand.New(rand.NewPCG(seed, 1))
	s := newImage(t, &sh)
	m := mustOpen(t, s, &sh.open)
	g := newGuest(m, s)
	var ops []string
	defer func() {
		if t.Failed() {
			t.Logf("seed %d:\n%s", seed, tail(ops))
		}
	}()
	for i := range steps {
		op, err := g.step(r)
		ops = append(ops, op)
		if err != nil {
			t.Fatalf("%s: %v", op, err)
		}
		if i%20 == 0 {
			g.verify(t)
		}
		if i%100 == 99 {
			ops = append(ops, "reopen")
			if err := m.Close(); err != nil {
				t.Fatal(err)
			}
			wantClean(t, s, false, havePeer() && seed == 0)
			m = mustOpen(t, s, &sh.open)
			g.m = m
			g.verify(t)
		}
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	wantClean(t, s, false, havePeer())
	got, err := readAll(s)
	if err != nil {
		t.Fatal(err)
	}
	if i := firstDifference(got, g.disk); i >= 0 {
		t.Fatalf("disk differs at %#x after closing", i)
	}
}
