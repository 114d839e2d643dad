// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"math/rand/v2"
	"testing"

	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

// tight is an image whose refcount table is full at 2 MiB of file: 64 blocks of 64 clusters of 512 bytes.
func tight() shape {
	return shape{"tight", create.Options{Size: 3 << 20, ClusterSize: 512, RefcountBits: 64}, Options{}}
}

// TestRefcountTableGrows fills an image from end to end, so that its refcount table has to move, more than once where
// there is room for little.
func TestRefcountTableGrows(t *testing.T) {
	sh := tight()
	s := newImage(t, &sh)
	m := mustOpen(t, s, &sh.open)
	g := newGuest(m, s)
	before := m.Header().RefcountTableOffset
	for off := int64(0); off < m.Size(); off += 5 << 10 {
		if err := g.write(g.fill(off, min(5<<10, m.Size()-off)), off); err != nil {
			t.Fatal(err)
		}
		if off%(100<<10) == 0 {
			if err := m.Commit(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if m.Header().RefcountTableOffset == before {
		t.Error("refcount table has not moved")
	}
	g.verify(t)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	wantClean(t, s, false, havePeer())
	g.m = mustOpen(t, s, &sh.open)
	g.verify(t)
}

// TestACrashWhileTheRefcountTableMoves is crash enumeration around the place where an image outgrows its table.
func TestACrashWhileTheRefcountTableMoves(t *testing.T) {
	for seed := range uint64(soak(1)) {
		st := nearlyFull(t)
		m := mustOpen(t, st.s, &Options{})
		g := newGuest(m, st.s)
		if err := g.read(g.disk, 0); err != nil {
			t.Fatal(err)
		}
		g.log = st.log
		r := rand.New(rand.NewPCG(seed, 8))
		moved := m.Header().RefcountTableOffset
		for at := int64(1 << 20); m.Header().RefcountTableOffset == moved || r.IntN(4) > 0; at += 4 << 10 {
			if err := g.write(g.fill(at, 4<<10), at); err != nil {
				t.Fatal(err)
			}
			if r.IntN(3) == 0 {
				if err := g.flush(); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		st.flushed()
		n := st.crashes(t, seed, 6)
		t.Logf("%d crash points", n)
	}
}

// nearlyFull is an image whose file is a little shorter than what its refcount table can count; its story begins there.
func nearlyFull(t testing.TB) *story {
	sh := tight()
	s := newImage(t, &sh)
	m := mustOpen(t, s, &sh.open)
	g := newGuest(m, s)
	for at := int64(0); len(s.data) < 2<<20-24<<10; at += 4 << 10 {
		if at == 1<<20 {
			at = 2 << 20
		}
		if err := g.write(g.fill(at, 4<<10), at); err != nil {
			t.Fatal(err)
		}
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	st := newStory(t, sh)
	st.s = s
	s.logged, s.log = true, nil
	st.start = append([]byte(nil), s.data...)
	return st
}
