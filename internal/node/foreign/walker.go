// SPDX-License-Identifier: Apache-2.0

package foreign

import (
	"unsafe"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/format/sparse"
	"github.com/sluice-blk/sluice/internal/sys"
)

// walker carries out one read that no single stretch of the file answers, piece by piece. It completes its request by way
// of the loop, so never inside Submit.
type walker struct {
	q      *queue
	child  block.Request
	parent *block.Request
	offset int64 // of the disk, where the next piece begins
	end    int64

	mem       []block.IOVec // the request's
	seg       int           // where in mem the next piece begins
	segOffset uint64

	piece   sparse.Extent // in flight
	packed  []byte        // of compressed images: memory for one grain
	skip    int64         // of packed, before the grain begins
	loading bool          // packed is being filled

	iov  *[walkSegments]block.IOVec // in the queue's memory: what it points to is kept alive by mem
	next *walker                    // free list
}

func (w *walker) begin(r *block.Request) {
	w.parent, w.mem, w.offset, w.end = r, r.Mem, r.Offset, r.Offset+r.Length
	w.seg, w.segOffset = 0, 0
	r.ForgetTimes()
	w.advance()
}

// advance does what needs no I/O, up to the first piece that does, or to the end.
func (w *walker) advance() {
	for w.offset < w.end {
		e := w.q.n.where.Lookup(w.offset, w.end-w.offset)
		var err error
		switch e.Kind {
		case sparse.Data:
			w.transfer(e)
			return
		case sparse.Deflate:
			grain := w.q.grains.find(e.Host)
			if grain == nil {
				w.load(e, e.Room)
				return
			}
			err = w.unpack(e, grain)
		default:
			err = w.zero(e.Length)
		}
		if err != nil {
			w.finish(err)
			return
		}
		w.offset += e.Length
	}
	w.finish(nil)
}

// transfer reads as much of an extent as one request takes, straight to the request's memory.
func (w *walker) transfer(e sparse.Extent) {
	iov := w.iov[:0]
	seg, off, room := w.seg, w.segOffset, uint64(e.Length)
	for ; room > 0 && len(iov) < w.q.maxSegments; seg, off = seg+1, 0 {
		v := w.mem[seg]
		n := min(v.Len-off, room)
		if n == 0 {
			continue
		}
		// SAFETY: off is less than v.Len, so the address is inside the segment.
		iov = append(iov, block.IOVec{Base: (*byte)(unsafe.Add(unsafe.Pointer(v.Base), off)), Len: n})
		room -= n
	}
	e.Length -= int64(room)
	w.piece = e
	w.submit(e.Host, e.Length, iov)
}

func (w *walker) submit(offset, length int64, iov []block.IOVec) {
	w.child.Op, w.child.Flags, w.child.Offset, w.child.Length, w.child.Mem = block.OpRead, 0, offset, length, iov
	w.child.ForgetTimes()
	w.q.below.Submit(&w.child)
}

// load reads room bytes of a compressed grain, its marker included, in the blocks that the file is read in.
func (w *walker) load(e sparse.Extent, room int64) {
	align := int64(w.q.n.align)
	start := e.Host &^ (align - 1)
	w.skip = e.Host - start
	length := min((w.skip+room+align-1)&^(align-1), int64(len(w.packed)), w.q.belowSize-start)
	w.piece, w.loading = e, true
	w.iov[0] = sys.IOVecOf(w.packed[:length])
	w.submit(start, length, w.iov[:1])
}

// Complete is the end of a piece.
func (w *walker) Complete(_ *block.Request, err error) {
	w.parent.AdoptTimes(&w.child)
	if err != nil {
		w.loading = false
		w.finish(err)
		return
	}
	if w.loading {
		w.loading = false
		if !w.inflate() {
			return
		}
	} else {
		w.consume(w.piece.Length)
	}
	w.offset += w.piece.Length
	w.advance()
}

// inflate turns what was loaded into the grain, and copies what the request wants of it. It answers false when the walk
// goes on elsewhere: more has to be read, or it has ended.
func (w *walker) inflate() bool {
	grain, more, err := w.q.grains.inflate(w.packed[w.skip:w.child.Length], w.piece, w.q.n.grain)
	switch {
	case more > w.piece.Room && w.piece.Host+more <= w.q.fileSize && w.skip+more <= int64(len(w.packed)):
		w.piece.Room = more
		w.load(w.piece, more)
		return false
	case more > 0:
		err = block.Corruptf("the compressed grain at %d has %d bytes, and there is no room for them", w.piece.Host, more)
	}
	if err == nil {
		err = w.unpack(w.piece, grain)
	}
	if err != nil {
		w.finish(err)
		return false
	}
	return true
}

// unpack copies the part of a grain that an extent is to the request's memory.
func (w *walker) unpack(e sparse.Extent, grain []byte) error {
	from := e.Offset % w.q.n.grain
	if from+e.Length > int64(len(grain)) {
		return block.Corruptf("the compressed grain at %d holds %d bytes, and %d at %d were asked for", e.Host, len(grain), e.Length, from)
	}
	return w.fill(grain[from : from+e.Length])
}

var zeros [64 << 10]byte

func (w *walker) zero(n int64) error {
	for n > 0 {
		k := min(n, int64(len(zeros)))
		if err := w.fill(zeros[:k]); err != nil {
			return err
		}
		n -= k
	}
	return nil
}

// fill copies b to the request's segments from where it stands, and goes on behind it. The segments may be guest memory,
// which can vanish: then it answers EFAULT.
func (w *walker) fill(b []byte) error {
	for len(b) > 0 {
		v := w.mem[w.seg].Bytes()[w.segOffset:]
		n := min(len(v), len(b))
		if err := sys.CopyGuarded(v[:n], b[:n]); err != nil {
			return err
		}
		b = b[n:]
		w.consume(int64(n))
		if n == 0 {
			w.seg, w.segOffset = w.seg+1, 0 // an empty segment
		}
	}
	return nil
}

// consume moves the place in the segments on.
func (w *walker) consume(n int64) {
	for rest := uint64(n); rest > 0; {
		k := min(rest, w.mem[w.seg].Len-w.segOffset)
		rest -= k
		w.segOffset += k
		if w.segOffset == w.mem[w.seg].Len {
			w.seg, w.segOffset = w.seg+1, 0
		}
	}
}

// finish gives everything back and answers the request.
func (w *walker) finish(err error) {
	q, r := w.q, w.parent
	w.parent, w.mem, w.child.Mem = nil, nil, nil
	// The collector does not look into the queue's memory, but a store there tells it of what is overwritten. That must not
	// be an address which has been given back meanwhile.
	clear(w.iov[:])
	q.loop.CompleteLater(r, err)
	q.give(w)
}
