// SPDX-License-Identifier: Apache-2.0

package qcow2

import "math"

// RefcountClusters tells how many clusters the refcount table and the refcount blocks take in an image that has n other
// clusters, when they count these and themselves and nothing is left over.
func (g *Geometry) RefcountClusters(n int64) (table, blocks int64) {
	perBlock, perTable := g.RefcountBlockEntries(), g.RefcountTableEntries()
	for {
		b := max(1, ceilDiv(n+table+blocks, perBlock))
		t := ceilDiv(b, perTable)
		if b == blocks && t == table {
			return table, blocks
		}
		table, blocks = t, b
	}
}

// Sizes are what an image needs, in bytes.
type Sizes struct {
	Required       int64 // with the data that are there
	FullyAllocated int64 // when the whole disk is written to
	Bitmaps        int64 // on top of each, for the bitmaps that are carried along
}

// Measure tells how large a new image will be for a disk of size bytes, of which data bytes (whole clusters, or up to
// the disk's end) will be allocated. FullyAllocated is the most that the disk can ever need, since each guest cluster has
// one host cluster at most; snapshots, bitmaps and leaked clusters come on top. A disk that the geometry cannot describe
// is an error (EFBIG).
func (g *Geometry) Measure(size, data int64) (Sizes, error) {
	if size < 0 || size > g.MaxSize() {
		return Sizes{}, &limitError{"disk is too large for clusters of this size"}
	}
	clusters := g.Clusters(size)
	l2 := ceilDiv(clusters, int64(g.L2Entries()))
	l1 := g.Clusters(l2 * 8)
	other := 1 + l1 + l2 + clusters
	table, blocks := g.RefcountClusters(other)
	if table<<g.ClusterBits > MaxRefcountTableBytes || other+table+blocks > math.MaxInt64>>g.ClusterBits {
		return Sizes{}, &limitError{"disk is too large for refcounts of this width"}
	}
	full := (other + table + blocks) << g.ClusterBits
	return Sizes{Required: full - clusters<<g.ClusterBits + data, FullyAllocated: full}, nil
}

// MeasureBitmaps tells how many bytes the bitmaps of a disk of size bytes need when all their clusters are allocated,
// with their tables and their directory.
func (g *Geometry) MeasureBitmaps(size int64, all []Bitmap) int64 {
	var sum, dir int64
	for i := range all {
		m := &all[i]
		entries := g.BitmapTableEntries(size, m.GranularityBits)
		sum += entries + g.Clusters(entries*8)
		dir += int64((bitmapFixed + len(m.Extra) + len(m.Name) + 7) &^ 7)
	}
	return (sum + g.Clusters(dir)) << g.ClusterBits
}

func ceilDiv(n, by int64) int64 { return n/by + b2i(n%by != 0) }
