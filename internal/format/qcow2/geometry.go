// SPDX-License-Identifier: Apache-2.0

package qcow2

// Geometry is what follows from the header for all addresses and tables of an image. It is small and copied by value.
type Geometry struct {
	Version       uint32
	ClusterBits   uint32
	ClusterSize   int64
	RefcountOrder uint32
	Extended      bool // extended L2 entries
	DataFile      bool // guest clusters lie in an external file

	L2EntrySize int    // bytes of one L2 entry: 8 or 16
	L2Bits      uint32 // log2 of the entries of an L2 table

	Subclusters    int    // of a cluster: 1 or 32
	SubclusterBits uint32 // log2 of the size of a subcluster; ClusterBits where there are none

	RefcountBlockBits uint32 // log2 of the entries of a refcount block

	compressedShift uint32 // x of section Cluster mapping: where the sector count of a compressed entry begins
}

// Geometry of an image with this header.
func (h *Header) Geometry() Geometry {
	return NewGeometry(h.Version, h.ClusterBits, h.RefcountOrder, h.IsExtendedL2(), h.HasDataFile())
}

// NewGeometry of an image with these properties, which must be in bounds.
func NewGeometry(version, clusterBits, refcountOrder uint32, extended, dataFile bool) Geometry {
	g := Geometry{
		Version: version, ClusterBits: clusterBits, ClusterSize: int64(1) << clusterBits,
		RefcountOrder: refcountOrder, Extended: extended, DataFile: dataFile,
		L2EntrySize: 8, L2Bits: clusterBits - 3,
		Subclusters: 1, SubclusterBits: clusterBits,
		RefcountBlockBits: clusterBits + 3 - refcountOrder,
		compressedShift:   62 - (clusterBits - 8),
	}
	if extended {
		g.L2EntrySize, g.L2Bits = 16, clusterBits-4
		g.Subclusters, g.SubclusterBits = 32, clusterBits-5
	}
	return g
}

// L2Entries is the number of entries of an L2 table.
func (g *Geometry) L2Entries() int { return 1 << g.L2Bits }

// RefcountBlockEntries is the number of clusters that one refcount block counts.
func (g *Geometry) RefcountBlockEntries() int64 { return int64(1) << g.RefcountBlockBits }

// RefcountTableEntries is the number of entries in one cluster of the refcount table.
func (g *Geometry) RefcountTableEntries() int64 { return g.ClusterSize / 8 }

// MaxRefcount is the largest count that an entry of a refcount block can hold.
func (g *Geometry) MaxRefcount() uint64 { return MaxRefcount(g.RefcountOrder) }

// L2Coverage is how many bytes of the disk one L2 table describes.
func (g *Geometry) L2Coverage() int64 { return int64(1) << (g.L2Bits + g.ClusterBits) }

// Split tells which entry of which L2 table describes the guest offset, and where it lies in the cluster.
func (g *Geometry) Split(off int64) (l1, l2 int, in int64) {
	return int(off >> (g.L2Bits + g.ClusterBits)), int(off>>g.ClusterBits) & (1<<g.L2Bits - 1), off & (g.ClusterSize - 1)
}

// Guest is the guest offset of the cluster that entry l2 of table l1 describes.
func (g *Geometry) Guest(l1, l2 int) int64 {
	return int64(l1)<<(g.L2Bits+g.ClusterBits) + int64(l2)<<g.ClusterBits
}

// Subcluster is the number of the subcluster in its cluster that holds the offset.
func (g *Geometry) Subcluster(off int64) int {
	return int(off>>g.SubclusterBits) & (g.Subclusters - 1)
}

// SplitRefcount tells which entry of the refcount table names the block that counts the host cluster at off, and which
// entry of this block.
func (g *Geometry) SplitRefcount(off int64) (table int64, entry int) {
	c := off >> g.ClusterBits
	return c >> g.RefcountBlockBits, int(c & (1<<g.RefcountBlockBits - 1))
}

// Clusters is the number of clusters that hold n bytes.
func (g *Geometry) Clusters(n int64) int64 {
	return n>>g.ClusterBits + b2i(n&(g.ClusterSize-1) != 0)
}

// Aligned tells whether off is at the start of a cluster.
func (g *Geometry) Aligned(off int64) bool { return off&(g.ClusterSize-1) == 0 }

// L1EntriesFor is the number of L1 entries that a disk of size bytes needs.
func (g *Geometry) L1EntriesFor(size int64) int64 {
	return size>>(g.L2Bits+g.ClusterBits) + b2i(size&(g.L2Coverage()-1) != 0)
}

// MaxSize is the largest disk that the geometry can describe within the limit of the L1 table, in bytes.
func (g *Geometry) MaxSize() int64 {
	return int64(MaxL1Bytes/8) << (g.L2Bits + g.ClusterBits) // 2^61 at most
}

func b2i(b bool) int64 {
	if b {
		return 1
	}
	return 0
}
