// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// crash looks at an image as a power cut would leave it, at many points of a run. What a flush made durable is there; of
// what came after, any sectors may be there and any not.
type crash struct {
	*rand.Rand
	events []event // in the order of their beginning
	steps  []step  // likewise
	extras int     // random states of the disk at each point, besides all and nothing

	stable [2][]byte    // what is durable at the point that is looked at: the image, and its data file
	done   map[int]bool // the events that are in stable

	durable *model       // what the guest was promised
	inside  map[int]bool // the steps that are in durable

	backing []byte

	// judge looks at one state beyond what is looked at here.
	judge  func(files [2][]byte, n *naive) error
	points int
}

// sector is what a disk writes whole.
const sector = 512

// run looks at each flush that ended, at the moment before, and at some moments between.
func (c *crash) run(end int) error {
	c.done, c.inside = map[int]bool{}, map[int]bool{}
	var times []int
	for _, e := range c.events {
		if e.kind == flushed && e.end > 0 {
			times = append(times, e.end-1, e.end)
		} else if c.IntN(8) == 0 {
			times = append(times, e.start)
		}
	}
	times = append(times, end)
	slices.Sort(times)
	for _, now := range slices.Compact(times) {
		c.advance(now)
		if err := c.at(now); err != nil {
			return fmt.Errorf("crash at time %d of %d: %w\n%s", now, end, err, c.lately(now))
		}
	}
	return nil
}

// lately tells what happened last.
func (c *crash) lately(now int) string {
	var lines []string
	for i, e := range c.events {
		if e.start <= now {
			lines = append(lines, fmt.Sprintf("%d-%d file %d %v %#x+%#x durable=%v", e.start, e.end, e.of, e.kind, e.off, e.n, c.done[i]))
		}
	}
	for _, s := range c.steps {
		if s.start <= now && (s.end == 0 || s.end > now-60) {
			lines = append(lines, fmt.Sprintf("%d-%d %s %v", s.start, s.end, s.op, s.err))
		}
	}
	return strings.Join(lines[max(len(lines)-40, 0):], "\n")
}

// advance makes durable what the flushes that ended by now cover, of the disk and of the guest.
func (c *crash) advance(now int) {
	var cover [2]int
	for _, e := range c.events {
		if e.kind == flushed && e.end > 0 && e.end <= now {
			cover[e.of] = max(cover[e.of], e.start)
		}
	}
	for i := range c.events {
		e := &c.events[i]
		if !c.done[i] && e.end > 0 && e.end <= cover[e.of] {
			c.done[i] = true
			c.stable[e.of] = apply(c.stable[e.of], e, nil, c.IntN(2) == 0)
		}
	}
	promised := 0
	for _, s := range c.steps {
		switch {
		case s.err != nil || s.end == 0 || s.end > now:
		case s.op.Kind == Flush:
			promised = max(promised, s.start)
		case !s.op.io() && s.op.Kind != Compressed:
			promised = max(promised, s.end)
		}
	}
	for i, s := range c.steps {
		if !c.inside[i] && s.end > 0 && s.end <= promised {
			c.inside[i] = true
			c.durable.apply(&s.op)
		}
	}
}

// apply does an event to a file. keep says for each sector whether it reached the disk; nil is all of them. What is
// discarded may become garbage.
func apply(file []byte, e *event, keep func() bool, spoils bool) []byte {
	if e.kind == flushed {
		return file
	}
	if e.kind == truncated {
		if keep != nil && !keep() {
			return file
		}
		if e.n <= int64(len(file)) {
			return file[:e.n:e.n]
		}
		return append(file, make([]byte, e.n-int64(len(file)))...)
	}
	for at := int64(0); at < e.n; {
		end := min((e.off+at)/sector*sector+sector-e.off, e.n)
		if keep == nil || keep() {
			if e.kind != discarded {
				if more := e.off + end - int64(len(file)); more > 0 {
					file = append(file, make([]byte, more)...)
				}
			}
			switch {
			case e.kind == wrote:
				copy(file[e.off+at:], e.data[at:end])
			case e.kind == zeroed:
				clear(file[e.off+at : e.off+end])
			case spoils:
				spoil(file, e.off+at, end-at)
			}
		}
		at = end
	}
	return file
}

// at looks at what a crash now may leave: of what was not flushed everything, nothing, or some, by requests or by sectors.
func (c *crash) at(now int) error {
	always := func(keep bool) func() bool { return func() bool { return keep } }
	if err := c.state(now, "all of what was not flushed", func() func() bool { return always(true) }); err != nil {
		return err
	}
	if err := c.state(now, "nothing of what was not flushed", func() func() bool { return always(false) }); err != nil {
		return err
	}
	for range c.extras {
		most := 1 + c.IntN(7)
		some := func() bool { return c.IntN(8) < most }
		of, each := "requests", func() func() bool { return always(some()) }
		if c.IntN(2) == 0 {
			of, each = "sectors", func() func() bool { return some }
		}
		if err := c.state(now, "some "+of+" of what was not flushed", each); err != nil {
			return err
		}
	}
	return nil
}

// state makes the files as a crash leaves them when keep tells for each request which sectors reached the disk.
func (c *crash) state(now int, name string, keep func() func() bool) error {
	files := [2][]byte{slices.Clone(c.stable[0]), slices.Clone(c.stable[1])}
	for i := range c.events {
		if e := &c.events[i]; !c.done[i] && e.start <= now {
			files[e.of] = apply(files[e.of], e, keep(), c.IntN(2) == 0)
		}
	}
	if err := c.look(now, files); err != nil {
		return fmt.Errorf("with %s: %w", name, err)
	}
	return nil
}

// look judges one state.
func (c *crash) look(now int, files [2][]byte) error {
	c.points++
	n, err := openNaive(files[0], files[1], c.backing)
	if err != nil {
		return err
	}
	if err := c.sound(n); err != nil {
		return err
	}
	if err := c.holds(now, n); err != nil {
		return err
	}
	if err := c.recovers(files, n); err != nil {
		return err
	}
	return c.judge(files, n)
}

// sound wants leaks at worst: clusters that count more uses than they have. A flag may then say of such a cluster that it
// is used once, for that is so. In an image that says that its refcounts are not to be trusted, they may be wrong.
func (c *crash) sound(n *naive) error {
	const dirty = 1
	if n.incompatible&dirty != 0 {
		return nil
	}
	if v := n.check(); len(v.errors)+len(v.shared) > 0 {
		return fmt.Errorf("the image is not consistent:\n%s", &v)
	}
	return nil
}

// pending are the steps that began by now and were not promised to last.
func (c *crash) pending(now int) (ops []Op, alone *Op) {
	for i, s := range c.steps {
		switch {
		case c.inside[i] || s.start > now:
		case s.op.io() || s.op.Kind == Compressed:
			ops = append(ops, s.op)
		default:
			alone = &s.op
		}
	}
	return ops, alone
}

// holds compares what the guest reads with what it was promised. While something is done to the whole image, it may
// have been done already.
func (c *crash) holds(now int, n *naive) error {
	ops, alone := c.pending(now)
	err := c.same(n, c.durable, ops)
	if err == nil || alone == nil {
		return err
	}
	if alone.Kind == Resize {
		// What is to be cut may be gone already, and what is to be there may not have been hidden yet.
		if c.same(n, c.resizing(ops, alone), ops) == nil {
			return nil
		}
	}
	after := c.durable.clone()
	for _, o := range ops {
		after.apply(&o)
	}
	after.apply(alone)
	if again := c.same(n, after, nil); again != nil {
		return errors.Join(err, fmt.Errorf("and as after %s: %w", alone, again))
	}
	return nil
}

// resizing is the disk while its size changes.
func (c *crash) resizing(ops []Op, o *Op) *model {
	m := c.durable.clone()
	old := int64(len(m.data))
	if o.Len < old {
		m.doubt(o.Len, old)
		return m
	}
	for _, p := range ops {
		m.apply(&p)
	}
	m.apply(o)
	m.doubt(old, o.Len)
	return m
}

func (c *crash) same(n *naive, m *model, ops []Op) error {
	if n.size != int64(len(m.data)) {
		return fmt.Errorf("disk has %d bytes, want %d", n.size, len(m.data))
	}
	got, err := n.content(n.l1Offset, n.l1Size, n.size)
	if err != nil {
		return err
	}
	if err := allowed(got, &m.content, ops); err != nil {
		return err
	}
	if len(n.snapshots) != len(m.snapshots) {
		return fmt.Errorf("image has %d snapshots, want %d", len(n.snapshots), len(m.snapshots))
	}
	for _, s := range n.snapshots {
		want, ok := m.snapshots[s.name]
		if !ok {
			return fmt.Errorf("image has a snapshot %q", s.name)
		}
		got, err := n.content(s.l1Offset, s.l1Size, int64(len(want.data)))
		if err == nil {
			err = want.compare(0, got)
		}
		if err != nil {
			return fmt.Errorf("snapshot %s: %w", s.name, err)
		}
	}
	return nil
}

// allowed wants each byte to be what was promised, or what one of the operations makes of it.
func allowed(got []byte, want *content, ops []Op) error {
	if bytes.Equal(got, want.data) {
		return nil
	}
	for i, v := range got {
		at := int64(i)
		if v == want.data[i] || v == 0 && want.zero[i] || want.free != nil && want.free[i] || slices.ContainsFunc(ops, func(o Op) bool { return makes(&o, at, v) }) {
			continue
		}
		end := min(i+16, len(got))
		return fmt.Errorf("bytes at %d are %q, want %q as flushed, or what a later write made of them", at, got[i:end], want.data[i:end])
	}
	return nil
}

// makes tells whether the operation may have made the byte what it is.
func makes(o *Op, at int64, b byte) bool {
	if !o.ranged() || o.Kind == Read || at < o.Off || at >= o.Off+o.Len {
		return false
	}
	if o.Kind == Write || o.Kind == Compressed {
		return sources[o.Source][(at-o.Off)%sourceBytes] == b
	}
	return b == 0
}

// clone copies what apply changes.
func (m *model) clone() *model {
	c := *m
	c.content = m.content.clone()
	c.snapshots = map[string]content{}
	for name, s := range m.snapshots {
		c.snapshots[name] = s
	}
	return &c
}
