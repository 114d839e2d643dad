// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"

	"github.com/sluice-blk/sluice/internal/block"
)

// spanKind is what becomes of a span.
type spanKind uint8

const (
	spanKeep spanKind = iota // the target has it already
	spanZero                 // it reads as zeros
	spanData                 // it has to be read
)

// span is a stretch of the target that is handled in one way.
type span struct {
	off, n int64
	kind   spanKind
	// Where the data lie, for data of one stretch of a file; file is "" where that is unknown.
	file string
	host int64
}

// batch is what a worker does at a time.
type batch struct {
	start int64 // offset of the first span
	n     int64 // bytes of the target that are done with it, those that need nothing included
	spans []span
	bytes int64 // of the data in it
	work  int64 // bytes of the units of work that end in it
	// mayWrite is closed when the batch before this one has begun its writes, and written tells the one behind of its own.
	mayWrite <-chan struct{}
	written  chan struct{}
	passed   bool
}

// pass lets the batch behind this one write.
func (b *batch) pass() {
	if !b.passed {
		b.passed = true
		close(b.written)
	}
}

// planner cuts the sources into batches. It belongs to one goroutine.
type planner struct {
	c     *Convert
	out   chan<- *batch
	ctx   context.Context
	pace  pace
	total int64
	chunk int64

	unit    int64 // bytes of the unit of work that has not ended
	held    span  // not yet given to a batch: a neighbour may take some of it
	batch   *batch
	written chan struct{} // of the batch before
}

func newPlanner(c *Convert, out chan<- *batch) *planner {
	p := &planner{c: c, out: out, pace: pace{rate: c.Rate}, total: c.size(), chunk: c.chunk()}
	p.written = make(chan struct{})
	close(p.written)
	return p
}

// chunk is the size of a batch: whole grains.
func (c *Convert) chunk() int64 { return max(convertChunk, c.Grain) }

func (p *planner) run(ctx context.Context) error {
	p.ctx = ctx
	base := -p.c.Skip // where the source begins in the target
	for _, s := range p.c.Sources {
		from, to := max(0, -base), min(s.Size(), p.total-base)
		if from >= to {
			base += s.Size()
			continue
		}
		if err := p.source(s, base, from, to); err != nil {
			return err
		}
		base += s.Size()
	}
	return p.finish()
}

// salvageBlind is how much is taken for data where a map cannot be read.
const salvageBlind = 64 << 10

// source plans [from, to) of a source that begins at base.
func (p *planner) source(s *Disk, base, from, to int64) error {
	for from < to {
		err := s.Map(p.ctx, from, to-from, func(e block.Extent) error {
			from = e.Offset + e.Length
			return p.extent(base, e)
		})
		switch {
		case err == nil:
			return nil
		case p.ctx.Err() != nil:
			return context.Cause(p.ctx)
		}
		failed := Wordedf("error while reading block status at offset %d: %s", base+from, err)
		if p.c.Salvage == nil {
			return failed
		}
		p.c.Salvage(failed.Error())
		n := min(to-from, salvageBlind)
		if err := p.extent(base, block.Extent{Offset: from, Length: n, Data: true, Present: true, Host: -1}); err != nil {
			return err
		}
		from += n
	}
	return nil
}

// extent takes the next stretch of a source that begins at base.
func (p *planner) extent(base int64, e block.Extent) error {
	s := span{off: base + e.Offset, n: e.Length, kind: p.c.kindOf(e)}
	if s.kind == spanData && e.Data && !e.Compressed && e.Host >= 0 {
		s.file, s.host = e.File, e.Host
	}
	return p.add(s)
}

// kindOf is what has to be done for an extent of a source.
func (c *Convert) kindOf(e block.Extent) spanKind {
	switch {
	case c.OnlyTop && (!e.Present || e.Depth > 0), !e.Present && e.Offset < c.KeepAbsent:
		return spanKeep
	case !e.Zero && e.Present:
		return spanData
	}
	return spanZero
}

// add puts a span behind those before it. A grain of which any part is data is data.
func (p *planner) add(s span) error {
	if grain := p.c.Grain; grain > 1 {
		s = p.fit(s, grain)
		if s.n <= 0 {
			return nil
		}
	}
	if s.kind == p.held.kind && p.held.n > 0 && p.joins(s) {
		p.held.n += s.n
		return nil
	}
	if err := p.release(); err != nil {
		return err
	}
	p.held = s
	return nil
}

// joins tells whether s goes on where the held span ends, also in the file where it lies.
func (p *planner) joins(s span) bool {
	h := &p.held
	return p.c.CopyRange == nil || h.file == s.file && (s.file == "" || h.host+h.n == s.host)
}

// fit moves the bounds of a span to grains: data take from both neighbours what their grains need.
func (p *planner) fit(s span, grain int64) span {
	end := s.off + s.n
	from := p.held.off + p.held.n // up to here it has been said what is to be done
	if s.kind != spanData {
		s.off = max(s.off, from)
		s.n = end - s.off
		return s
	}
	start := s.off &^ (grain - 1)
	end = min((end+grain-1)&^(grain-1), p.total)
	if p.held.kind != spanData && p.held.n > 0 && start < from {
		start = max(start, p.held.off)
		p.held.n = start - p.held.off
	} else {
		start = max(start, from)
	}
	s.file = "" // what was taken in lies elsewhere
	s.off, s.n = start, end-start
	return s
}

// workUnit is how much work is told of at a time, or a whole extent that is less.
const workUnit = 2 << 20

// Work is how much there is to read, or to be made zeros, in bytes.
func (c *Convert) Work(ctx context.Context) (work int64, err error) {
	for _, s := range c.Sources {
		err := s.Map(ctx, 0, s.Size(), func(e block.Extent) error {
			if c.acts(c.kindOf(e)) {
				work += e.Length
			}
			return nil
		})
		if err != nil {
			return 0, err
		}
	}
	return work, nil
}

// advance tells that a batch is done.
func (c *Convert) advance(b *batch) {
	if c.ByWork {
		c.Advance(b.work)
	} else {
		c.Advance(b.n)
	}
}

// release gives the held span to batches.
func (p *planner) release() error {
	for s := p.held; s.n > 0; {
		if p.batch == nil {
			p.batch = &batch{start: s.off, mayWrite: p.written, written: make(chan struct{})}
		}
		b := p.batch
		piece := s
		switch s.kind {
		case spanData:
			piece.n = min(s.n, p.chunk-b.bytes, p.chunk-s.off%p.chunk)
			b.bytes += piece.n
		default:
			piece.n = min(s.n, zeroMax)
		}
		if p.c.acts(s.kind) {
			b.spans = append(b.spans, piece)
			if p.unit += piece.n; p.unit >= workUnit || piece.n == s.n {
				b.work, p.unit = b.work+p.unit, 0
			}
		}
		b.n += piece.n
		s.off, s.n, s.host = s.off+piece.n, s.n-piece.n, s.host+piece.n
		if b.bytes == p.chunk || len(b.spans) == batchSpans || b.n >= zeroMax {
			if err := p.send(); err != nil {
				return err
			}
		}
	}
	p.held = span{off: p.held.off + p.held.n, kind: spanKeep}
	return nil
}

// acts tells whether a worker has to do something for a span of this kind.
func (c *Convert) acts(k spanKind) bool {
	return k == spanData || k == spanZero && (!c.TargetZero || c.Sparse == 0 && !c.Exact)
}

// send hands the batch to a worker.
func (p *planner) send() error {
	b := p.batch
	p.batch = nil
	if len(b.spans) == 0 {
		p.c.advance(b)
		return nil
	}
	p.written = b.written
	if err := p.pace.wait(p.ctx, b.bytes); err != nil {
		return err
	}
	select {
	case p.out <- b:
		return nil
	case <-p.ctx.Done():
		return context.Cause(p.ctx)
	}
}

func (p *planner) finish() error {
	if err := p.release(); err != nil || p.batch == nil {
		return err
	}
	return p.send()
}
