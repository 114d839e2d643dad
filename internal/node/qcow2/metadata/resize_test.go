// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

// TestACrashWhileTheDiskOrItsBitmapsChange cuts off resizes and changes of bitmaps at each write. The image has leaks at worst, the
// disk is as large as before or after, and what lies in both sizes is there.
func TestACrashWhileTheDiskOrItsBitmapsChange(t *testing.T) {
	for _, sh := range []shape{
		{"512", create.Options{Size: 96 * kib, ClusterSize: 512}, Options{}},
		{"4k", create.Options{Size: 4096 * kib, ClusterSize: 4096, RefcountBits: 8}, Options{}},
		{"lazy", create.Options{Size: 96 * kib, ClusterSize: 1024, LazyRefcounts: true}, Options{}},
		{"extended", create.Options{Size: 1024 * kib, ClusterSize: 16 * kib, ExtendedL2: true}, Options{}},
	} {
		t.Run(sh.name, func(t *testing.T) {
			n := 0
			for seed := range uint64(soak(4)) {
				n += changes(t, sh, seed)
			}
			t.Logf("%d crash points", n)
		})
	}
}

// changes makes one image after the other, and tells how many crashes it looked at.
func changes(t *testing.T, sh shape, seed uint64) (n int) {
	r := rand.New(rand.NewPCG(seed, 12))
	s := newImage(t, &sh)
	g := newGuest(mustOpen(t, s, &sh.open), s)
	for i := range 10 {
		for range 6 {
			_, err := g.step(r)
			must(t, err)
		}
		must(t, g.m.Commit())
		start := append([]byte(nil), s.data...)
		s.logged, s.log = true, nil
		old := append([]byte(nil), g.disk...)
		what := g.change(t, r, i, sh.o.Size)
		s.logged = false
		n += cuts(t, fmt.Sprintf("seed %d: %s", seed, what), start, s.log, old, g.m.Size(), r)
		g.verify(t)
	}
	must(t, g.m.Close())
	wantClean(t, s, false, false)
	return n
}

// change resizes the disk or changes its bitmaps.
func (g *guest) change(t *testing.T, r *rand.Rand, i int, size int64) string {
	name := fmt.Sprintf("b%d", r.IntN(3))
	switch k := r.IntN(5); k {
	case 0, 1:
		to := size/4&^511 + r.Int64N(size*6/512)*512
		old := g.m.Size()
		must(t, g.m.Resize(to, true))
		disk := make([]byte, to)
		copy(disk, g.disk)
		g.disk = disk
		cluster := g.m.Geometry().ClusterSize
		if rest := min(to, (old+cluster-1)&^(cluster-1)) - old; rest > 0 {
			// not part of what is cut off: the rest of a cluster that the caller zeroes
			log := g.s.(*memStore).log
			must(t, g.write(make([]byte, rest), old), g.m.Commit())
			g.s.(*memStore).log = log
		}
		return fmt.Sprintf("resize from %d to %d", old, to)
	case 2:
		if g.m.bitmapNamed(name) < 0 {
			must(t, g.m.AddBitmap(name, 512, r.IntN(2) == 0))
		}
	case 3:
		if g.m.bitmapNamed(name) >= 0 {
			must(t, g.m.RemoveBitmap(name))
		}
	case 4:
		if k, err := g.m.usableBitmap(name); err == nil {
			must(t, g.m.ClearBitmap(name), g.m.EnableBitmap(name, k%2 == 0), g.m.MergeBitmap(name, g.m, name))
		}
	}
	return "bitmaps"
}

// cuts looks at what crashes leave of a change, of which everything before was flushed.
func cuts(t *testing.T, what string, start []byte, log []event, disk []byte, size int64, r *rand.Rand) (n int) {
	t.Helper()
	st := &story{}
	base, since := append([]byte(nil), start...), 0
	for at := 0; at <= len(log); at++ {
		for v := range 3 {
			s := st.disk(base, log[since:at], v, r)
			n++
			c, err := check.Run(s.clone(), &check.Options{})
			if err != nil {
				t.Fatalf("%s: check before event %d: %v", what, at, err)
			}
			m, err := Open(s, &Options{})
			if err != nil {
				t.Fatalf("%s: open before event %d: %v", what, at, err)
			}
			if c.Corruptions+c.CheckErrors > 0 && !m.h.IsDirty() && !m.h.IsLazy() {
				t.Fatalf("%s: check before event %d, choice %d: %+v\n%s", what, at, v, c, s.save(t))
			}
			if m.Size() != size && m.Size() != int64(len(disk)) {
				t.Fatalf("%s: size is %d, neither %d nor %d", what, m.Size(), size, len(disk))
			}
			p := make([]byte, min(size, int64(len(disk))))
			must(t, (&guest{m: m, s: s}).read(p, 0))
			if i := firstDifference(p, disk[:len(p)]); i >= 0 {
				t.Fatalf("%s: disk differs at %#x before event %d", what, i, at)
			}
		}
		if at < len(log) && log[at].data == nil {
			for _, e := range log[since:at] {
				base = putAt(base, e.data, e.off)
			}
			since = at + 1
		}
	}
	return n
}
