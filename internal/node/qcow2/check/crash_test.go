// SPDX-License-Identifier: Apache-2.0

package check

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/sluice-blk/sluice/internal/blocktest/memstore"
	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// recorder is a store that keeps what was written, in order.
type recorder struct {
	*memstore.Store
	log []func(s *memstore.Store) // nil is a flush
}

func (r *recorder) Write(p []byte, off int64) error {
	p = bytes.Clone(p)
	r.log = append(r.log, func(s *memstore.Store) { _ = s.Write(p, off) })
	return r.Store.Write(p, off)
}

func (r *recorder) Truncate(n int64) error {
	r.log = append(r.log, func(s *memstore.Store) { _ = s.Truncate(n) })
	return r.Store.Truncate(n)
}

func (r *recorder) Flush() error {
	r.log = append(r.log, nil)
	return r.Store.Flush()
}

// mapping is the active disk's tables, without the flags that a repair changes.
func mapping(t *testing.T, s *memstore.Store) []byte {
	t.Helper()
	h, err := qcow2.ReadHeader(s.Read)
	if err != nil {
		t.Fatal(err)
	}
	g := h.Geometry()
	l1, all := make([]byte, h.L1Entries*8), make([]byte, 0, 1<<16)
	_ = s.Read(l1, h.L1Offset)
	for i := range int(h.L1Entries) {
		table := make([]byte, g.ClusterSize)
		if off := qcow2.L1Entry(g.Entry(l1, i).Word).Offset(); off != 0 {
			_ = s.Read(table, off)
		}
		for j := range g.L2Entries() {
			g.PutEntry(table, j, g.Entry(table, j).WithCopied(false))
		}
		all = append(all, table...)
	}
	return all
}

// A repair that is cut off anywhere, with any part of the writes since the last flush on disk in any order, can be done
// again, and the disk is the same.
func TestRepairThatIsCutOff(t *testing.T) {
	for name, rebuild := range map[string]bool{"in place": false, "rebuilt": true} {
		t.Run(name, func(t *testing.T) {
			before := broken(t, rebuild)
			r := &recorder{Store: before.Clone()}
			if _, err := Run(r, &Options{Repair: Everything}); err != nil {
				t.Fatal(err)
			}
			want := mapping(t, r.Store)
			rng := rand.New(rand.NewPCG(1, 2))
			durable := before.Clone()
			var open []func(*memstore.Store)
			points := 0
			for _, op := range append(r.log, nil) {
				for range 20 {
					s := durable.Clone()
					for _, i := range rng.Perm(len(open)) {
						if rng.IntN(3) > 0 {
							open[i](s)
						}
					}
					points++
					_, _ = mustRun(t, s, Everything)
					if again, said := mustRun(t, s, Nothing); !again.Clean() {
						t.Fatalf("cut off after %d of %d steps: %+v\n%s", points/20, len(r.log), again, said)
					}
					if !bytes.Equal(mapping(t, s), want) {
						t.Fatalf("cut off after %d of %d steps: the disk has changed", points/20, len(r.log))
					}
				}
				if op != nil {
					open = append(open, op)
					continue
				}
				for _, o := range open {
					o(durable)
				}
				open = nil
			}
			if points < 100 {
				t.Fatalf("only %d points", points)
			}
		})
	}
}
