// SPDX-License-Identifier: Apache-2.0

package img

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"

	"github.com/sluice-blk/sluice/internal/block"
)

// Outcomes of a comparison, which are the exit statuses of the verb.
const (
	CompareSame       = 0
	CompareDiffer     = 1
	CompareOpenFailed = 2
	CompareMapFailed  = 3
	CompareReadFailed = 4
)

// Limits of a comparison.
const (
	compareChunk   = 512 << 10
	compareWorkers = 8
	compareSector  = 512 // offsets that are told are multiples of it
)

// Compare tells whether two disks hold the same.
type Compare struct {
	A, B *Disk
	// Strict wants the same size, and the same kind of storage everywhere.
	Strict bool
	// Say hears what is found, line by line.
	Say      func(text string)
	Progress *Progress
}

// difference is what was found at an offset, with the outcome that it means.
type difference struct {
	outcome int
	text    string
}

func (d *difference) Error() string { return d.text }

// Run compares. The outcome is one of those above; an error goes with those that are failures.
func (c *Compare) Run(ctx context.Context) (int, error) {
	a, b := c.A.Size(), c.B.Size()
	if c.Strict && a != b {
		c.Say("Strict mode: Image size mismatch!")
		return CompareDiffer, nil
	}
	c.Progress.Expect(max(a, b))
	for _, part := range []struct{ from, to int64 }{{0, min(a, b)}, {min(a, b), max(a, b)}} {
		if part.from == part.to {
			continue
		}
		if part.from > 0 || min(a, b) == 0 {
			c.Say("Warning: Image size mismatch!")
		}
		if outcome, err := c.stretch(ctx, part.from, part.to); outcome != CompareSame || err != nil {
			return outcome, err
		}
	}
	c.Progress.Done()
	c.Say("Images are identical.")
	return CompareSame, nil
}

// stretch compares [from, to), where the shorter disk reads as zeros behind its end.
func (c *Compare) stretch(ctx context.Context, from, to int64) (int, error) {
	work, stop := context.WithCancel(ctx)
	defer stop()
	pieces := make(chan comparePiece)
	var workers sync.WaitGroup
	var found firstError
	for range compareWorkers {
		workers.Go(func() {
			w := compareWorker{c: c, bufs: [2][]byte{make([]byte, compareChunk), make([]byte, compareChunk)}, t: [2]*transfer{newTransfer(1), newTransfer(1)}}
			for p := range pieces {
				// Pieces are handed out in their order: all before the one that differs are at work already.
				if at, err := w.do(p); err != nil {
					found.note(at, err)
					stop()
				}
				c.Progress.Advance(p.n)
			}
		})
	}
	at, err := c.plan(work, from, to, pieces)
	close(pieces)
	workers.Wait()
	if ctx.Err() != nil {
		return CompareReadFailed, context.Cause(ctx)
	}
	if err != nil && !errors.Is(err, context.Canceled) {
		found.note(at, err)
	}
	var d *difference
	switch {
	case found.err == nil:
		return CompareSame, nil
	case !errors.As(found.err, &d):
		return CompareMapFailed, found.err
	case d.outcome == CompareDiffer:
		c.Say(d.text)
		return CompareDiffer, nil
	}
	return d.outcome, Wordedf("%s", d.text)
}

// comparePiece is a stretch of which at least one disk has to be read.
type comparePiece struct {
	off, n int64
	read   [2]bool
}

// plan walks both maps side by side. It tells how far it came when something stands in the way.
func (c *Compare) plan(ctx context.Context, from, to int64, out chan<- comparePiece) (int64, error) {
	var walks [2]*mapWalk
	for i, d := range []*Disk{c.A, c.B} {
		walks[i] = walkMap(ctx, d, from, min(d.Size(), to))
		defer walks[i].stop()
	}
	for off := from; off < to; {
		p := comparePiece{off: off, n: to - off}
		var status [2]extentStatus
		for i, w := range walks {
			e, err := w.at(off)
			if err != nil {
				return off, err
			}
			p.read[i] = e.Present && !e.Zero
			status[i] = statusOf(e, w.end)
			if e.Length > 0 {
				p.n = min(p.n, e.Offset+e.Length-off)
			}
		}
		if c.Strict && status[0] != status[1] {
			return off, &difference{CompareDiffer, fmt.Sprintf("Strict mode: Offset %d block status mismatch!", off)}
		}
		off += p.n
		if !p.read[0] && !p.read[1] {
			c.Progress.Advance(p.n)
			continue
		}
		if err := p.send(ctx, out); err != nil {
			return off, err
		}
	}
	return to, nil
}

// send hands a stretch to the workers in pieces that they can hold.
func (p comparePiece) send(ctx context.Context, out chan<- comparePiece) error {
	for end := p.off + p.n; p.off < end; p.off += p.n {
		p.n = min(end-p.off, compareChunk-p.off%compareChunk)
		select {
		case out <- p:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// extentStatus is what strict mode wants to be the same.
type extentStatus struct{ data, zero, present, compressed, mapped, last bool }

func statusOf(e block.Extent, end int64) extentStatus {
	return extentStatus{e.Data, e.Zero, e.Present, e.Compressed, e.Host >= 0, e.Offset+e.Length == end}
}

// mapWalk gives the extents of a disk one after the other, those of a kind in one.
type mapWalk struct {
	next func() (block.Extent, error, bool)
	stop func()
	end  int64
	// byDepth keeps apart what is stored at different depths.
	byDepth bool
	cur     block.Extent
	held    block.Extent // the one behind cur, Length 0 when it has not been asked for
}

func walkMap(ctx context.Context, d *Disk, from, to int64) *mapWalk {
	w := &mapWalk{end: to, cur: block.Extent{Offset: from}}
	w.next, w.stop = iter.Pull2(func(yield func(block.Extent, error) bool) {
		if from >= to {
			return
		}
		enough := errors.New("enough")
		err := d.Map(ctx, from, to-from, func(e block.Extent) error {
			if !yield(e, nil) {
				return enough
			}
			return nil
		})
		if err != nil && err != enough {
			yield(block.Extent{}, fmt.Errorf("map %s: %w", d.name, err))
		}
	})
	return w
}

// at gives the extent that off lies in. Offsets do not go back. Behind the end it is one without a length.
func (w *mapWalk) at(off int64) (block.Extent, error) {
	if off >= w.end {
		return block.Extent{}, nil
	}
	for w.cur.Offset+w.cur.Length <= off {
		w.cur = w.held
		w.held = block.Extent{}
		for {
			e, err, ok := w.next()
			if err != nil {
				return e, err
			}
			if !ok {
				break
			}
			if w.cur.Length > 0 && !w.alike(e) {
				w.held = e
				break
			}
			if w.cur.Length == 0 {
				w.cur = e
			} else {
				w.cur.Length += e.Length
			}
		}
		if w.cur.Length == 0 {
			return w.cur, fmt.Errorf("no extent at %d", off)
		}
	}
	return w.cur, nil
}

// alike tells whether an extent goes on where cur ends.
func (w *mapWalk) alike(e block.Extent) bool {
	return statusOf(e, -1) == statusOf(w.cur, -1) && (!w.byDepth || e.Depth == w.cur.Depth)
}

// compareWorker reads and compares pieces. It belongs to one goroutine.
type compareWorker struct {
	c    *Compare
	bufs [2][]byte
	t    [2]*transfer
}

// do compares a piece. Where it differs, or cannot be read, it tells the offset.
func (w *compareWorker) do(p comparePiece) (int64, error) {
	disks := [2]*Disk{w.c.A, w.c.B}
	data := [2][]byte{zeroPage[:p.n], zeroPage[:p.n]}
	for i, d := range disks {
		if p.read[i] {
			data[i] = w.bufs[i][:p.n]
			w.t[i].read(data[i], p.off)
			w.t[i].start(d)
		}
	}
	var failed error
	for i, d := range disks {
		if !p.read[i] {
			continue
		}
		if err := w.t[i].wait(); err != nil && failed == nil {
			var t *transferError
			errors.As(err, &t)
			failed = &difference{CompareReadFailed, fmt.Sprintf("Error while reading offset %d of %s: %s", p.off, d.name, Strerror(t.err))}
		}
	}
	if failed != nil {
		return p.off, failed
	}
	if bytes.Equal(data[0], data[1]) {
		return 0, nil
	}
	at := p.off
	for !differs(data, at-p.off) {
		at += compareSector
	}
	return at, &difference{CompareDiffer, fmt.Sprintf("Content mismatch at offset %d!", at)}
}

// differs tells whether the sector at i is not the same.
func differs(data [2][]byte, i int64) bool {
	end := min(i+compareSector, int64(len(data[0])))
	return !bytes.Equal(data[0][i:end], data[1][i:end])
}
