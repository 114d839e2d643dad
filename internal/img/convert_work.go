// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"errors"
)

// transferRequests is how many requests reach a disk at a time: enough for a chunk of which every second page is zeros.
const transferRequests = 128

// convertWorker does one batch after the other. It belongs to one goroutine.
type convertWorker struct {
	c       *Convert
	buf     []byte
	reads   []*transfer // one for each source
	writes  *transfer
	packer  *packer
	packing []packed
	packs   *packTransfer
}

func newConvertWorker(c *Convert) *convertWorker {
	w := &convertWorker{c: c, buf: make([]byte, c.chunk()), writes: newTransfer(transferRequests)}
	for range c.Sources {
		w.reads = append(w.reads, newTransfer(batchSpans))
	}
	if c.Compress != nil {
		w.packs = newPackTransfer()
		w.packer = &packer{o: c.Compress, sparse: c.Sparse > 0}
	}
	return w
}

// do carries a batch out. Whatever happens, the batch behind it may go on afterwards.
func (w *convertWorker) do(ctx context.Context, b *batch) error {
	defer b.pass()
	if ctx.Err() != nil {
		return errStopped
	}
	copied := false
	if w.c.CopyRange != nil {
		var err error
		if copied, err = w.copyRange(ctx, b); err != nil {
			return err
		}
	}
	if !copied {
		if err := w.read(b); err != nil {
			return err
		}
		if err := w.write(ctx, b); err != nil {
			return err
		}
	}
	w.c.advance(b)
	return nil
}

// read fills the buffer with the data of all spans, one behind the other.
func (w *convertWorker) read(b *batch) error {
	at := w.buf
	for _, s := range b.spans {
		if s.kind == spanData {
			w.want(at[:s.n], s.off)
			at = at[s.n:]
		}
	}
	for i, t := range w.reads {
		t.start(w.c.Sources[i])
	}
	var failed error
	for _, t := range w.reads {
		if err := t.wait(); err != nil && failed == nil {
			failed = err
		}
	}
	switch {
	case failed == nil:
		return nil
	case w.c.Salvage != nil:
		return w.salvage(b)
	}
	return failedAt(convertReadText, b.start, failed)
}

// want asks the sources that [off, off+len(p)) of the target comes from for their parts.
func (w *convertWorker) want(p []byte, off int64) {
	base := -w.c.Skip
	for i, s := range w.c.Sources {
		if from, to := max(off, base), min(off+int64(len(p)), base+s.Size()); from < to {
			w.reads[i].read(p[from-off:to-off], from-base)
		}
		base += s.Size()
	}
}

// salvageUnit is what is given up around a byte that cannot be read.
const salvageUnit = 512

// salvage reads a batch again in small pieces, with zeros for those that fail.
func (w *convertWorker) salvage(b *batch) error {
	at := w.buf
	for _, s := range b.spans {
		if s.kind != spanData {
			continue
		}
		for done := int64(0); done < s.n; done += salvageUnit {
			p := at[done:min(done+salvageUnit, s.n)]
			if err := w.readPiece(p, s.off+done); err != nil {
				w.c.Salvage(Wordedf("error while reading offset %d: %s", s.off+done, err).Error())
				clear(p)
			}
		}
		at = at[s.n:]
	}
	return nil
}

func (w *convertWorker) readPiece(p []byte, off int64) (err error) {
	w.want(p, off)
	for i, t := range w.reads {
		if failed := t.run(w.c.Sources[i]); failed != nil {
			err = failed
		}
	}
	var t *transferError
	if errors.As(err, &t) {
		return t.err
	}
	return err
}

// write stores a batch, when it is its turn.
func (w *convertWorker) write(ctx context.Context, b *batch) error {
	if w.packer != nil {
		w.packing = w.packer.pack(w.packing[:0], b, w.buf)
	}
	if err := w.turn(ctx, b); err != nil {
		return err
	}
	if w.packer != nil {
		return w.writePacked(b)
	}
	at := w.buf
	for _, s := range b.spans {
		var err error
		switch s.kind {
		case spanData:
			err = w.store(at[:s.n], s.off)
			at = at[s.n:]
		case spanZero:
			err = w.zeros(s.off, s.n)
		}
		if err != nil {
			return failedAt(convertWriteText, s.off, err)
		}
	}
	w.writes.start(w.c.Target)
	b.pass()
	if err := w.writes.wait(); err != nil {
		return failedAt(convertWriteText, b.start, err)
	}
	return nil
}

// turn waits until the batch before this one has written, unless the order does not matter.
func (w *convertWorker) turn(ctx context.Context, b *batch) error {
	if w.c.OutOfOrder {
		return nil
	}
	select {
	case <-b.mayWrite:
		return nil
	case <-ctx.Done():
		return errStopped
	}
}

// store adds writes of p, without the zeros in it.
func (w *convertWorker) store(p []byte, off int64) error {
	if w.c.Sparse == 0 || w.c.Exact {
		return w.room(func() { w.writes.write(p, off) })
	}
	for start := 0; start < len(p); {
		n, zero := zeroRun(p[start:], off+int64(start), w.c.Sparse)
		at := off + int64(start)
		piece := p[start : start+n]
		start += n
		switch {
		case !zero:
			if err := w.room(func() { w.writes.write(piece, at) }); err != nil {
				return err
			}
		case !w.c.TargetZero:
			if err := w.room(func() { w.writes.zero(at, int64(n), true) }); err != nil {
				return err
			}
		}
	}
	return nil
}

// zeros adds what makes a span zero: really written ones where nothing may be sparse.
func (w *convertWorker) zeros(off, n int64) error {
	if w.c.Sparse > 0 || w.c.Exact {
		return w.room(func() { w.writes.zero(off, n, true) })
	}
	for end := off + n; off < end; {
		p := zeroPage[:min(end-off, int64(len(zeroPage)))]
		at := off
		if err := w.room(func() { w.writes.write(p, at) }); err != nil {
			return err
		}
		off += int64(len(p))
	}
	return nil
}

// room adds a request, after those before it have been carried out when there are many.
func (w *convertWorker) room(add func()) error {
	if w.writes.full() {
		if err := w.writes.run(w.c.Target); err != nil {
			return err
		}
	}
	add()
	return nil
}
