// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"testing"

	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

// A commit costs the guest two flushes of the disk. Only a cache that has to let tables go pays them unasked.
func TestCommitsThatNobodyAskedFor(t *testing.T) {
	for name, c := range map[string]struct {
		cache int64
		want  bool
	}{"all tables in the cache": {0, false}, "some tables in the cache": {64 * kib, true}} {
		t.Run(name, func(t *testing.T) {
			sh := shape{o: create.Options{Size: 32 << 20, ClusterSize: 512}}
			s := newImage(t, &sh)
			m := mustOpen(t, s, &Options{L2CacheBytes: c.cache, RefcountCacheBytes: 1 << 20})
			g := newGuest(m, s)
			for off := int64(0); off < m.Size(); off += 32 * kib {
				if err := g.write(g.fill(off, 512), off); err != nil {
					t.Fatal(err)
				}
			}
			if n := m.Stats().Commits; n > 0 != c.want {
				t.Errorf("%d commits, want some: %v", n, c.want)
			}
			g.verify(t)
			if err := m.Close(); err != nil {
				t.Fatal(err)
			}
			wantClean(t, s, false, false)
		})
	}
}
