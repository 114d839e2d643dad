// SPDX-License-Identifier: Apache-2.0

package virtqueue

import (
	"errors"
	"fmt"
	"math"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
)

// What Chain.Err is set to. The values themselves, never wrapped: a chain's error must cost nothing to make.
var (
	ErrAddress = errors.New("descriptor outside of guest memory")
	ErrOrder   = errors.New("device-readable descriptor behind a device-writable one")
	ErrTooLong = errors.New("descriptor chain too long")
)

// BrokenError tells why a queue can no longer be trusted. It is the driver's fault, and only the driver can mend it, by
// resetting the device or setting the queue up anew.
type BrokenError struct {
	Queue  int    // Config.Index
	Reason string // what was found
}

func (e *BrokenError) Error() string {
	return fmt.Sprintf("queue %d is broken: %s", e.Queue, e.Reason)
}

// Chain is one request of the driver: the buffers that its descriptors name, those to read and those to write. The
// caller owns it and lends it to [Queue.Pop], which overwrites it whole.
type Chain struct {
	Head     uint16      // names the chain in Push
	Err      error       // nil, ErrAddress, ErrOrder or ErrTooLong: see the package's table
	Readable []sys.IOVec // what the device may read, in order, no empty ones; may lie in storage until the next Pop
	Writable []sys.IOVec // what the device may write, likewise

	ReadableLen int64 // bytes in Readable
	WritableLen int64 // bytes in Writable

	storage []sys.IOVec // of length 0: what Readable and then Writable are cut from
}

// NewChain makes a chain with room for so many segments, both directions together. A buffer that runs from one region
// of memory into the next takes a segment in each.
func NewChain(segments int) *Chain {
	c := new(Chain)
	c.SetStorage(make([]sys.IOVec, segments))
	return c
}

// SetStorage lends memory for the segments to the chain, for an owner who makes many chains from one array. Its length
// is the most segments that Pop will put there. What the chain held is void.
func (c *Chain) SetStorage(s []sys.IOVec) {
	*c = Chain{storage: s[:0:len(s)]}
}

// walker is the state of a walk along a chain's descriptors.
type walker struct {
	mem       *guestmem.Map
	window    *guestmem.Window
	segs      []sys.IOVec // as many as its capacity allows
	readable  int         // segments that were found before the first writable one
	writable  bool        // a writable descriptor was found
	err       error       // the first fault in the contents
	readLen   int64
	writeLen  int64
	lastAddr  uint64 // the last byte of the last writable descriptor
	lastValid bool
}

// walk follows the chain from head and fills c. It returns a reason when the structure is broken, "" otherwise.
// It looks at no more than the queue's and one indirect table's descriptors.
func (q *Queue) walk(c *Chain, head uint16) string {
	w := walker{mem: q.mem, window: &q.window, segs: c.storage[:0:min(q.maxSegments, cap(c.storage))]}
	table, size := q.ring.desc, uint32(q.ring.size)
	for i, left, indirect := uint32(head), size, false; ; {
		d := readDesc(table, i)
		if d.Flags&DescIndirect != 0 {
			if reason := q.checkIndirect(&d, indirect); reason != "" {
				return reason
			}
			b, err := q.mem.Slice(d.Addr, uint64(d.Len))
			if err != nil {
				w.fail(ErrAddress)
				break
			}
			table, size, indirect = unsafe.Pointer(unsafe.SliceData(b)), d.Len/DescSize, true
			i, left = 0, size
			continue
		}
		if d.Len != 0 {
			w.add(&d)
		}
		if d.Flags&DescNext == 0 {
			break
		}
		if left--; left == 0 {
			return "the chain loops"
		}
		if i = uint32(d.Next); i >= size {
			return "next is behind the end of the table"
		}
	}
	w.finish(c)
	return ""
}

// checkIndirect checks a descriptor that refers to a table, found inside of another one or not.
func (q *Queue) checkIndirect(d *Desc, inside bool) string {
	switch {
	case !q.indirect:
		return "an indirect table, which was not negotiated"
	case inside:
		return "an indirect table inside an indirect table"
	case d.Flags&DescNext != 0:
		return "a descriptor with both INDIRECT and NEXT"
	case d.Len == 0:
		return "an indirect table of no bytes"
	case d.Len%DescSize != 0:
		return "an indirect table that is no whole number of descriptors"
	case d.Len > MaxSize*DescSize:
		return "an indirect table with too many descriptors"
	}
	return ""
}

// add takes a descriptor of at least one byte into the chain.
func (w *walker) add(d *Desc) {
	if d.Flags&DescWrite != 0 {
		if !w.writable {
			w.writable = true
			w.readable = len(w.segs)
		}
		w.writeLen += int64(d.Len)
		// A sum that wraps is no address either way; an overflowing range fails below as well.
		w.lastAddr = d.Addr + uint64(d.Len) - 1
		w.lastValid = w.lastAddr >= d.Addr
	} else {
		if w.writable {
			w.fail(ErrOrder)
		}
		w.readLen += int64(d.Len)
	}
	if w.err != nil {
		return
	}
	if v, ok := w.window.Piece(d.Addr, d.Len); ok && len(w.segs) < cap(w.segs) {
		w.segs = append(w.segs, v)
		return
	}
	w.elsewhere(d)
}

// elsewhere is add for a buffer that is not in the window, which moves there: a guest's buffers mostly lie in one region.
func (w *walker) elsewhere(d *Desc) {
	*w.window = w.mem.Window(d.Addr)
	segs, err := w.mem.PutIOVec(w.segs, d.Addr, d.Len)
	switch {
	case err == nil:
		w.segs = segs
	case errors.Is(err, guestmem.ErrNoRoom):
		w.fail(ErrTooLong)
	default:
		w.fail(ErrAddress)
	}
}

// fail notes the first fault.
func (w *walker) fail(err error) {
	if w.err == nil {
		w.err = err
	}
}

// finish hands what was found to the chain.
func (w *walker) finish(c *Chain) {
	if !w.writable {
		w.readable = len(w.segs)
	}
	if w.readLen > math.MaxUint32 || w.writeLen > math.MaxUint32 {
		w.fail(ErrTooLong)
	}
	c.Err = w.err
	if w.err != nil {
		w.salvage(c)
		return
	}
	c.Readable = w.segs[:w.readable:w.readable]
	c.Writable = w.segs[w.readable:]
	c.ReadableLen, c.WritableLen = w.readLen, w.writeLen
}

// salvage leaves of a faulty chain its last writable byte, where a device may have to put a status.
func (w *walker) salvage(c *Chain) {
	c.Readable, c.Writable = nil, nil
	c.ReadableLen, c.WritableLen = 0, 0
	if !w.lastValid || cap(c.storage) == 0 {
		return
	}
	if b, err := w.mem.Slice(w.lastAddr, 1); err == nil {
		c.Writable = append(c.storage[:0], sys.IOVecOf(b))
		c.WritableLen = 1
	}
}
