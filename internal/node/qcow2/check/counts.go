// SPDX-License-Identifier: Apache-2.0

package check

import (
	"bytes"
	"encoding/binary"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// pieceBytes is the most that a piece of the counts has: small enough that single references far apart cost little.
const pieceBytes = 4096

// counts are refcounts of all clusters in the form of refcount blocks, cut into pieces, of which only those exist that
// hold something.
type counts struct {
	order  uint32
	max    uint64
	bytes  int   // of a piece; a refcount block is a whole number of pieces
	per    int64 // entries of a piece
	pieces map[int64][]byte

	near   int64 // the piece that was asked for last: neighbours follow
	nearBy []byte
}

func newCounts(g *qcow2.Geometry) *counts {
	n := int(min(g.ClusterSize, pieceBytes))
	return &counts{
		order: g.RefcountOrder, max: g.MaxRefcount(), bytes: n, per: int64(n) * 8 >> g.RefcountOrder,
		pieces: make(map[int64][]byte),
		near:   -1,
	}
}

// piece is the piece with this number, nil when it does not exist.
func (c *counts) piece(i int64) []byte {
	if i != c.near {
		c.near, c.nearBy = i, c.pieces[i]
	}
	return c.nearBy
}

func (c *counts) setPiece(i int64, p []byte) {
	c.pieces[i] = p
	c.near, c.nearBy = i, p
}

func (c *counts) get(cluster int64) uint64 {
	p := c.piece(cluster / c.per)
	if p == nil {
		return 0
	}
	return qcow2.Refcount(p, c.order, int(cluster%c.per))
}

func (c *counts) set(cluster int64, n uint64) {
	p := c.piece(cluster / c.per)
	if p == nil {
		if n == 0 {
			return
		}
		p = make([]byte, c.bytes)
		c.setPiece(cluster/c.per, p)
	}
	qcow2.SetRefcount(p, c.order, int(cluster%c.per), n)
}

// add counts n references more, as far as the width allows, and tells how many it does not.
func (c *counts) add(cluster int64, n uint64) (lost uint64) {
	have := c.get(cluster)
	room := c.max - have
	if n > room {
		n, lost = room, n-room
	}
	c.set(cluster, have+n)
	return lost
}

// highest is the largest cluster that counts something, -1 when none does.
func (c *counts) highest() int64 {
	last := int64(-1)
	for i := range c.pieces {
		if (i+1)*c.per-1 > last {
			for j := c.per - 1; j >= 0 && i*c.per+j > last; j-- {
				if c.get(i*c.per+j) != 0 {
					last = i*c.per + j
				}
			}
		}
	}
	return last
}

// block copies the counts of refcount block i to b and tells whether there are any.
func (c *counts) block(i int64, b []byte) bool {
	any := false
	n := int64(len(b) / c.bytes)
	for j := range n {
		part := b[j*int64(c.bytes):][:c.bytes]
		p := c.pieces[i*n+j]
		if p == nil {
			clear(part)
			continue
		}
		copy(part, p)
		any = true
	}
	return any
}

// setBlock takes the counts of refcount block i from b.
func (c *counts) setBlock(i int64, b []byte) {
	n := int64(len(b) / c.bytes)
	for j := range n {
		part := b[j*int64(c.bytes):][:c.bytes]
		if !allZero(part) {
			c.setPiece(i*n+j, bytes.Clone(part))
		}
	}
}

// blocks are the numbers of the refcount blocks, of so many bytes each, that hold something.
func (c *counts) blocks(size int64) map[int64]bool {
	set := make(map[int64]bool)
	per := size / int64(c.bytes)
	for p := range c.pieces {
		set[p/per] = true
	}
	return set
}

func allZero(b []byte) bool {
	for len(b) >= 8 {
		if binary.NativeEndian.Uint64(b) != 0 {
			return false
		}
		b = b[8:]
	}
	return true
}
