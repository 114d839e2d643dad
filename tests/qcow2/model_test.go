// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
)

// sources is what writes take their bytes from: each has other bytes at every place, the first half of them compresses.
// TestMain makes them.
var sources [][]byte

const (
	sourceCount = 16
	sourceBytes = 1 << 20
)

func makeSources() [][]byte {
	all := make([][]byte, sourceCount)
	for i := range all {
		all[i] = make([]byte, sourceBytes)
		rng := rand.New(rand.NewPCG(uint64(i), 99))
		for at := 0; at < sourceBytes; at += 16 {
			if i < sourceCount/2 {
				copy(all[i][at:], fmt.Sprintf("source%x %08x", i, at))
				continue
			}
			for k := range 16 {
				all[i][at+k] = byte(rng.Uint32())
			}
		}
	}
	return all
}

// sourced fills b from the beginning of a source, again and again.
func sourced(b []byte, source int) {
	for len(b) > 0 {
		b = b[copy(b, sources[source]):]
	}
}

// piece is a part of a file below that holds the beginning of a source.
type piece struct {
	off, len int64
	source   int
}

// pieces is what is written to a file below; between them are holes.
func pieces(b Base) []piece {
	var all []piece
	rng := rand.New(rand.NewPCG(b.Fill, 7))
	for at := int64(0); at < b.Size; {
		n := min(512*(1+rng.Int64N(max(1, b.Size/512/6))), b.Size-at)
		if rng.IntN(3) > 0 {
			all = append(all, piece{at, n, rng.IntN(sourceCount)})
		}
		at += n
	}
	return all
}

// over is the content of a file when it stands over another, whose content shows in the holes.
func over(b Base, below []byte) content {
	c := newContent(b.Size)
	copy(c.data, below)
	for _, p := range pieces(b) {
		sourced(c.data[p.off:p.off+p.len], p.source)
	}
	return c
}

// content is what a disk holds. A byte that may also read as zero is marked.
type content struct {
	data []byte
	zero []bool // the byte is data or zero: nobody promised which
	// tail is what a cut left of its last cluster behind the end: growing may show it again, or zeros.
	tail []byte
	// free marks bytes that a failed request may or may not have changed: nil until one failed.
	free []bool
}

func newContent(size int64) content {
	return content{data: make([]byte, size), zero: make([]bool, size)}
}

func (c content) clone() content {
	return content{slices.Clone(c.data), slices.Clone(c.zero), slices.Clone(c.tail), slices.Clone(c.free)}
}

// settle says that bytes are what data says.
func (c *content) settle(off, end int64) {
	clear(c.zero[off:end])
	if c.free != nil {
		clear(c.free[off:end])
	}
}

// doubt says that a request failed that would have changed bytes.
func (c *content) doubt(off, end int64) {
	if c.free == nil {
		c.free = make([]bool, len(c.data))
	}
	for at := off; at < end; at++ {
		c.free[at] = true
	}
}

// resize cuts or grows a disk that is made of clusters. Neither the format nor the tool promises that what was cut from a
// cluster that stays is gone.
func (c *content) resize(n, cluster int64) {
	old := int64(len(c.data))
	if n < old {
		all := append(c.data, c.tail...)
		edge := min((n+cluster-1)/cluster*cluster, int64(len(all)))
		c.tail = slices.Clone(all[n:edge])
		c.data, c.zero = c.data[:n:n], c.zero[:n:n]
		if c.free != nil {
			c.free = c.free[:n:n]
		}
		return
	}
	if c.free != nil {
		c.free = append(c.free, make([]bool, n-old)...)
	}
	c.data = append(c.data, make([]byte, n-old)...)
	c.zero = append(c.zero, make([]bool, n-old)...)
	shown := copy(c.data[old:], c.tail)
	for at := old; at < old+int64(shown); at++ {
		c.zero[at] = true
		if c.free != nil {
			c.free[at] = true
		}
	}
	c.tail = c.tail[shown:]
}

// differs finds the first byte of got, at offset, that the content does not allow; -1 is none.
func (c *content) differs(offset int64, got []byte) int64 {
	want := c.data[offset : offset+int64(len(got))]
	if bytes.Equal(want, got) {
		return -1
	}
	for i, v := range got {
		at := offset + int64(i)
		if v != c.data[at] && (v != 0 || !c.zero[at]) && (c.free == nil || !c.free[at]) {
			return at
		}
	}
	return -1
}

// compare is differs as an error that says what stands there.
func (c *content) compare(offset int64, got []byte) error {
	at := c.differs(offset, got)
	if at < 0 {
		return nil
	}
	end := min(int64(len(got)), at-offset+16)
	return fmt.Errorf("bytes at %d are %q, want %q", at, got[at-offset:end], c.data[at:offset+end])
}

// model is what an image and the files below it should hold. It knows no clusters but where the rules of the format need
// them: a discard reaches whole clusters only, and an image of version 2 cannot hide what lies below.
type model struct {
	content
	cluster   int64
	v3        bool
	raw       bool     // the data file is the disk by itself: entries do not hide what is in it
	backing   *content // nil without one
	others    []*content
	snapshots map[string]content
}

func newModel(l *List) *model {
	m := &model{content: newContent(l.Image.Size), cluster: l.Image.Cluster, v3: l.Image.v3(), raw: l.Data == "raw", snapshots: map[string]content{}}
	var below []byte
	for _, b := range slices.Backward(l.Backing) {
		c := over(b, below)
		m.backing, below = &c, c.data
	}
	for _, b := range l.Others {
		c := over(b, nil)
		m.others = append(m.others, &c)
	}
	copy(m.data, below)
	return m
}

// apply does what the operation says.
func (m *model) apply(o *Op) {
	end := o.Off + o.Len
	switch o.Kind {
	case Write, Compressed:
		sourced(m.data[o.Off:end], o.Source)
		m.settle(o.Off, end)
	case Zero:
		clear(m.data[o.Off:end])
		m.settle(o.Off, end)
	case Discard:
		m.discard(o.Off, end)
	case Resize:
		m.resize(o.Len, m.cluster)
	case Snapshot:
		m.snapshot(o.Verb, o.Name)
	case Commit:
		if len(m.backing.data) < len(m.data) {
			m.backing.resize(int64(len(m.data)), 1)
		}
		copy(m.backing.data, m.data)
		copy(m.backing.zero, m.zero)
	case Rebase:
		m.backing = nil
		if o.Target >= 0 {
			m.backing = m.others[o.Target]
		}
	}
}

// together does operations that are done at the same time. What several of them change is in doubt.
func (m *model) together(ops []Op) {
	for _, o := range ops {
		m.apply(&o)
	}
	for i, o := range ops {
		for _, p := range ops[:i] {
			if o.overlaps(&p) && o.Kind != Read && p.Kind != Read {
				m.doubt(max(o.Off, p.Off), min(o.Off+o.Len, p.Off+p.Len))
			}
		}
	}
}

// meets tells whether another of the operations changes what one reads.
func meets(ops []Op, i int) bool {
	for k, p := range ops {
		if k != i && p.Kind != Read && ops[i].overlaps(&p) {
			return true
		}
	}
	return false
}

// discard zeroes whole clusters; of others nobody knows.
func (m *model) discard(off, end int64) {
	if !m.v3 && m.backing != nil {
		return // what lies below would show
	}
	whole := (off + m.cluster - 1) / m.cluster * m.cluster
	last := end / m.cluster * m.cluster
	if end == int64(len(m.data)) {
		last = end
	}
	if whole >= last || m.raw {
		whole, last = end, end
	}
	for at := off; at < whole; at++ {
		m.zero[at] = true
	}
	clear(m.data[whole:last])
	m.settle(whole, last)
	for at := last; at < end; at++ {
		m.zero[at] = true
	}
}

func (m *model) snapshot(verb, name string) {
	switch verb {
	case "create":
		m.snapshots[name] = m.content.clone()
	case "apply":
		m.content = m.snapshots[name].clone()
	case "delete":
		delete(m.snapshots, name)
	}
}
