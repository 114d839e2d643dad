// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"fmt"
	"math/rand/v2"
	"slices"
)

// generator makes lists. What it makes is valid: every operation would succeed on a perfect image.
type generator struct {
	*rand.Rand
	l *List
	// What an operation needs to know of those before it.
	size      int64
	backed    bool
	snapshots []string
	made      int              // snapshots ever made, for names
	sizes     map[string]int64 // of snapshots
	touched   map[int64]bool   // clusters that may be allocated
	full      bool             // all may be
	small     bool
	only      bool // requests
	verbs     bool // more of what is done to the whole image
}

// Generate makes the list of a seed.
func Generate(seed uint64) *List { return generate(seed, false, false) }

// GenerateSmall makes a list on a small disk, for those who look at the image thousands of times.
func GenerateSmall(seed uint64) *List { return generate(seed, true, false) }

// GenerateRequests makes a list on a small disk with requests of a guest alone.
func GenerateRequests(seed uint64) *List { return generate(seed, true, true) }

func generate(seed uint64, small, requests bool) *List {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 2)), l: new(List), sizes: map[string]int64{}, touched: map[int64]bool{}}
	g.small, g.only = small, requests
	g.options()
	g.size, g.backed = g.l.Image.Size, len(g.l.Backing) > 0
	g.verbs = g.chance(25)
	for range 5 + g.IntN(40) {
		g.op()
	}
	return g.l
}

func pick[T any](g *generator, of ...T) T { return of[g.IntN(len(of))] }

func (g *generator) chance(percent int) bool { return g.IntN(100) < percent }

// options chooses an image, and what lies below it.
func (g *generator) options() {
	i := &g.l.Image
	*i = Image{Cluster: 1 << pick(g, 9, 9, 10, 11, 12, 12, 13, 14, 15, 16, 16, 16, 17, 18, 21), Compat: "1.1", Refcount: 16}
	if g.small {
		i.Cluster = 1 << pick(g, 9, 9, 9, 10, 10, 11, 12, 14)
	}
	i.By, i.Seed = pick(g, "ours", "theirs"), g.Uint64N(1<<30)
	i.Size = g.diskSize(i.Cluster)
	if g.chance(15) {
		i.Compat = "0.10"
	} else {
		i.Refcount = pick(g, 1, 2, 4, 8, 16, 16, 32, 64)
		i.ExtL2 = i.Cluster >= 16<<10 && g.chance(40)
		i.Lazy = g.chance(20)
		i.Compression = pick(g, "", "", "zstd")
	}
	i.Overlap = g.chance(20) && !g.small // those who look closely want to know what is where
	switch {
	case g.chance(45):
		g.chain()
	case i.v3() && g.chance(25):
		g.l.Data = pick(g, "plain", "raw")
	}
	if len(g.l.Backing) == 0 && g.chance(20) && i.Size > 0 {
		i.Prealloc = pick(g, "metadata", "falloc", "full")
	}
}

// diskSize is mostly small, a few clusters and a bit, and so that small clusters need several tables.
func (g *generator) diskSize(cluster int64) int64 {
	n := pick[int64](g, 256<<10, 1<<20, 1<<20, 2<<20, 4<<20) + g.Int64N(8)*cluster
	if g.small {
		n = pick[int64](g, 32<<10, 64<<10, 128<<10) + g.Int64N(8)*cluster
	}
	n = max(n, 3*cluster)
	n = min(n, 16<<20)
	if g.chance(40) {
		n += 512 * g.Int64N(max(2, cluster/512))
	}
	return n
}

func (g *generator) chain() {
	for range pick(g, 1, 1, 1, 2, 3) {
		g.l.Backing = append(g.l.Backing, g.base())
		if last := &g.l.Backing[len(g.l.Backing)-1]; last.Format == "raw" {
			break
		}
	}
	for k := range g.l.Backing[:len(g.l.Backing)-1] {
		g.l.Backing[k].Compressed = false // compressed files are made by converting, and stand alone
	}
	for range g.IntN(3) {
		g.l.Others = append(g.l.Others, g.base())
	}
}

func (g *generator) base() Base {
	b := Base{Format: pick(g, "raw", "qcow2", "qcow2"), Fill: g.Uint64N(1 << 30)}
	b.Size = pick[int64](g, g.l.Image.Size, g.l.Image.Size/2, g.l.Image.Size*3/2, 65536) &^ 511
	if b.Format == "qcow2" {
		b.Cluster = 1 << pick(g, 9, 12, 16, 16, 18)
		b.Compressed = g.chance(30)
	}
	return b
}

// op adds one operation, or a few that belong together.
func (g *generator) op() {
	k := g.IntN(100)
	if g.verbs && g.chance(50) {
		k = 74 + g.IntN(26)
	}
	switch {
	case k < 45:
		g.requests()
	case k < 52:
		g.add(g.rangedOp(Zero))
	case k < 62:
		g.add(g.rangedOp(Discard))
	case k < 69:
		g.add(Op{Kind: Flush})
	case k < 74:
		g.compressed()
	case g.only:
		g.requests()
	case k < 84:
		g.snapshot()
	case k < 90:
		g.resize()
	case k < 94:
		g.add(Op{Kind: Reopen})
	case k < 97 && g.backed && len(g.snapshots) == 0 && !g.l.Image.Overlap:
		g.commit()
	case g.backed && len(g.snapshots) == 0:
		g.rebase()
	default:
		g.requests()
	}
}

// requests adds what a guest sends, often several at the same time and close to one another.
func (g *generator) requests() {
	near := g.offset()
	for k := range pick(g, 1, 1, 2, 4, 8, 12) {
		o := g.rangedOp(pick(g, Write, Write, Write, Write, Read, Read, Zero, Discard))
		if g.chance(60) && near+o.Len+o.Off%8192 <= g.size {
			o.Off = near&^511 + o.Off%8192
		}
		o.With = k > 0
		g.add(o)
		if g.chance(5) || g.small && g.chance(10) {
			g.add(Op{Kind: Flush, With: true})
		}
	}
}

// offset is mostly close to the edge of a cluster, or of what a table covers.
func (g *generator) offset() int64 {
	unit := g.l.Image.Cluster
	if g.chance(10) {
		unit = min(unit*unit/8, g.size)
	}
	at := g.Int64N(g.size/unit+1) * unit
	switch g.IntN(4) {
	case 0:
		at += g.Int64N(unit)
	case 1:
		at += g.Int64N(1024) - 512
	}
	if g.chance(80) {
		at &^= 511
	}
	return min(max(at, 0), g.size-1)
}

// rangedOp makes a request somewhere.
func (g *generator) rangedOp(k Kind) Op {
	o := Op{Kind: k, Off: g.offset(), Source: g.IntN(sourceCount)}
	cluster := g.l.Image.Cluster
	n := pick[int64](g, 1+g.Int64N(1024), 512, 4096, cluster/2, cluster, cluster, cluster*g.Int64N(5), cluster+512, g.Int64N(g.size/4+1))
	if g.chance(80) {
		n = (n + 511) &^ 511
	}
	if (k == Discard || k == Zero) && g.chance(50) {
		o.Off -= o.Off % cluster
		n = cluster * (1 + g.Int64N(6))
		o.Unmap = k == Zero && g.chance(50)
	}
	o.Len = min(max(n, 1), g.size-o.Off)
	return o
}

// add notes what the operation does to the clusters.
func (g *generator) add(o Op) {
	g.l.Ops = append(g.l.Ops, o)
	if o.Kind != Write && o.Kind != Zero && o.Kind != Compressed && o.Kind != Discard {
		return
	}
	for c := o.Off / g.l.Image.Cluster; c*g.l.Image.Cluster < o.Off+o.Len; c++ {
		g.touched[c] = true
	}
}

// compressed writes whole clusters that hold nothing yet, as the tool does that compresses.
func (g *generator) compressed() {
	i := &g.l.Image
	if g.l.Data != "" || i.Prealloc != "" || g.full || g.made > 0 && i.Refcount < 16 {
		return
	}
	c := g.Int64N((g.size + i.Cluster - 1) / i.Cluster)
	n, most := int64(0), pick[int64](g, 1, 2, 5)
	for n < most && !g.touched[c+n] && (c+n)*i.Cluster < g.size {
		n++
	}
	if n == 0 {
		return
	}
	end := min((c+n)*i.Cluster, g.size)
	g.add(Op{Kind: Compressed, Off: c * i.Cluster, Len: end - c*i.Cluster, Source: g.IntN(sourceCount)})
}

func (g *generator) snapshot() {
	switch k := g.IntN(3); {
	case k == 0 || len(g.snapshots) == 0:
		if len(g.snapshots) < g.l.snapshotsMax() {
			name := fmt.Sprintf("s%d", g.made)
			g.made++
			g.snapshots = append(g.snapshots, name)
			g.sizes[name] = g.size
			g.add(Op{Kind: Snapshot, Verb: "create", Name: name})
		}
	case k == 1:
		name := pick(g, g.snapshots...)
		g.size = g.sizes[name]
		g.add(Op{Kind: Snapshot, Verb: "apply", Name: name})
	default:
		name := pick(g, g.snapshots...)
		g.snapshots = slices.DeleteFunc(g.snapshots, func(s string) bool { return s == name })
		g.add(Op{Kind: Snapshot, Verb: "delete", Name: name})
	}
}

// resize keeps away from what version 2 cannot do: with snapshots, or hiding what lies below.
func (g *generator) resize() {
	if !g.l.Image.v3() && (len(g.snapshots) > 0 || g.backed) {
		return
	}
	n := pick(g, g.size/2, g.size+g.Int64N(g.size+1), g.size-512*g.Int64N(64), g.size+512*g.Int64N(g.size/256+1), g.diskSize(g.l.Image.Cluster))
	n = min(max(n, 512), 24<<20) &^ 511
	g.size = n
	g.add(Op{Kind: Resize, Len: n})
}

func (g *generator) commit() { g.add(Op{Kind: Commit}) }

func (g *generator) rebase() {
	target := g.IntN(len(g.l.Others)+1) - 1
	g.add(Op{Kind: Rebase, Target: target})
	g.backed = target >= 0
	g.full = true
}
