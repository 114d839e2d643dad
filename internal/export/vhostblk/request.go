// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"errors"
	"syscall"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/virtqueue"
)

// segMax is the number of data segments offered to the driver: with header and status a chain of 128, which is the
// smallest queue in use. maxSegments is what a slot has room for: a segment that crosses the border of two memory
// regions counts twice.
const (
	segMax      = 126
	maxSegments = 2 * (segMax + 2)
)

// noRequest marks a slot whose chain held no header that could be read.
const noRequest = virtioblk.RequestType(^uint32(0))

// inlineSegments is how many segments of data a slot holds itself: a page or a buffer in one piece is what most requests
// are. Longer ones keep a vector of the queue's store.
const inlineSegments = 4

// slot is one request's place: what became of the chain, the request, and the status it is answered with. Slots are made
// when the queue starts and used again and again. They are kept small, since a busy queue walks through all of them.
type slot struct {
	q    *queue
	next *slot
	mem  *memory

	status    *byte       // in guest memory; nil when the chain has no place for it
	data      []sys.IOVec // what is read or written, in guest memory
	offset    int64       // of data on the disk, bytes
	length    int64       // of data
	found     int64       // moments on the loop's clock: see StageRing
	popped    int64
	written   uint32 // the used length
	kind      virtioblk.RequestType
	head      uint16 // names the chain to the driver
	code      virtioblk.Status
	immediate bool // answered without asking the handle
	nranges   uint8
	atRange   uint8

	vector  *vector  // holds data, or the ranges, when they are many
	members slotList // the requests that go out with this one, see merge.go
	joined  *vector  // holds the segments of all of them

	inline [inlineSegments]sys.IOVec
	req    block.Request
}

func (s *slot) init(q *queue) {
	s.q = q
	s.req.Done = s
}

// parse turns the chain into a request (virtio 1.3, 5.2.6). The framing is the driver's choice: header, data and status
// are found by counting bytes, not descriptors. It reads guest memory: header and ranges are copied once, here. Of the
// chain nothing is used afterwards.
func (s *slot) parse(c *virtqueue.Chain) {
	s.head, s.status, s.written, s.length, s.nranges, s.atRange = c.Head, nil, 0, 0, 0, 0
	s.code, s.immediate = virtioblk.StatusIOErr, true
	s.kind = noRequest
	if !s.takeStatus(c) || c.Err != nil {
		return
	}
	h, ok := takeHeader(c)
	if !ok {
		return
	}
	s.kind = h.Type
	switch h.Type {
	case virtioblk.TypeIn:
		s.parseData(h, c.Writable, c.WritableLen)
	case virtioblk.TypeOut:
		s.parseData(h, c.Readable, c.ReadableLen)
	case virtioblk.TypeFlush:
		s.req.Op, s.req.Flags, s.req.Offset, s.req.Length, s.req.Mem = block.OpFlush, 0, 0, 0, nil
		s.immediate = false
	case virtioblk.TypeGetID:
		s.answerID(c)
	case virtioblk.TypeDiscard, virtioblk.TypeWriteZeroes:
		s.parseRanges(c)
	default:
		s.code = virtioblk.StatusUnsupp
	}
}

// takeStatus cuts the last byte off the device-writable part: that is where the status goes. The used length of a sound
// chain is that whole part, since the status is its last byte; of a faulty one it is nothing, as virtqueue tells.
func (s *slot) takeStatus(c *virtqueue.Chain) bool {
	w := c.Writable
	if len(w) == 0 {
		return false
	}
	if c.Err == nil {
		s.written = uint32(c.WritableLen)
	}
	last := &w[len(w)-1]
	last.Len--
	// SAFETY: no segment is empty, so its last byte is inside it.
	s.status = (*byte)(unsafe.Add(unsafe.Pointer(last.Base), last.Len))
	if last.Len == 0 {
		w = w[:len(w)-1]
	}
	c.Writable = w
	c.WritableLen--
	return true
}

// takeHeader cuts the header off the device-readable part. It mostly is a descriptor of its own.
func takeHeader(c *virtqueue.Chain) (h virtioblk.Header, ok bool) {
	var raw [virtioblk.HeaderSize]byte
	if r := c.Readable; len(r) > 0 && r[0].Len == virtioblk.HeaderSize {
		raw = [virtioblk.HeaderSize]byte(r[0].Bytes())
		c.Readable = r[1:]
		c.ReadableLen -= virtioblk.HeaderSize
	} else if !takeReadable(c, raw[:]) {
		return h, false
	}
	return virtioblk.DecodeHeader(raw[:])
}

// takeReadable moves len(p) bytes from the front of the device-readable part to p, across segments.
func takeReadable(c *virtqueue.Chain, p []byte) bool {
	if c.ReadableLen < int64(len(p)) {
		return false
	}
	c.ReadableLen -= int64(len(p))
	r := c.Readable
	for len(p) > 0 {
		b := r[0].Bytes()
		n := copy(p, b)
		p = p[n:]
		if n == len(b) {
			r = r[1:]
			continue
		}
		r[0] = sys.IOVecOf(b[n:])
	}
	c.Readable = r
	return true
}

// parseData keeps the segments: a few in the slot, many where they are, which costs the queue a new place to pop to.
func (s *slot) parseData(h virtioblk.Header, mem []sys.IOVec, length int64) {
	s.length = length
	offset, status := h.Range(length, s.q.dev.capacity)
	if status != virtioblk.StatusOK || length == 0 {
		return
	}
	s.offset, s.immediate = offset, false
	switch {
	case len(mem) == 1:
		s.inline[0] = mem[0]
		s.data = s.inline[:1]
	case len(mem) <= len(s.inline):
		s.data = s.inline[:copy(s.inline[:], mem)]
	default:
		s.data, s.vector = mem, s.q.swapScratch()
	}
	s.setData()
}

// setData makes the request that reads or writes this slot's own data.
func (s *slot) setData() {
	op := block.OpRead
	if s.kind == virtioblk.TypeOut {
		op = block.OpWrite
	}
	s.req.Op, s.req.Flags, s.req.Offset, s.req.Length, s.req.Mem = op, 0, s.offset, s.length, s.data
}

// parseRanges reads the segments of a discard or write of zeroes and checks all of them before any is begun, so that a
// refused request has no partial effect.
func (s *slot) parseRanges(c *virtqueue.Chain) {
	dev := s.q.dev
	if dev.offered&featureOf(s.kind) == 0 {
		if !dev.info.ReadOnly { // a read-only disk has the operation and refuses it
			s.code = virtioblk.StatusUnsupp
		}
		return
	}
	n, ok := virtioblk.RangeCount(c.ReadableLen, maxRangeSegments)
	if !ok {
		return
	}
	s.vector = s.q.store.take()
	ranges := s.vector.ranges()
	var raw [virtioblk.DiscardRangeSize]byte
	for i := range n {
		takeReadable(c, raw[:])
		r, _ := virtioblk.DecodeDiscardRange(raw[:])
		if s.code = r.Check(s.kind, dev.capacity, maxRangeSectors); s.code != virtioblk.StatusOK {
			return
		}
		ranges[i] = r
	}
	s.nranges = uint8(n)
	s.immediate = false
	s.setRange()
}

func featureOf(kind virtioblk.RequestType) uint64 {
	if kind == virtioblk.TypeWriteZeroes {
		return virtioblk.FeatureWriteZeroes
	}
	return virtioblk.FeatureDiscard
}

func (s *slot) setRange() {
	r := s.vector.ranges()[s.atRange]
	s.req.Op, s.req.Flags = block.OpDiscard, 0
	if s.kind == virtioblk.TypeWriteZeroes {
		s.req.Op = block.OpWriteZeroes
		if r.Flags&virtioblk.RangeUnmap != 0 {
			s.req.Flags = block.FlagUnmap
		}
	}
	s.req.Offset, s.req.Length = r.Bytes()
	s.req.Mem = nil
}

// answerID copies the serial, padded with zeros to 20 bytes or cut to what the driver has room for.
func (s *slot) answerID(c *virtqueue.Chain) {
	id := virtioblk.EncodeID(s.q.dev.opts.Serial)
	p := id[:]
	for _, v := range c.Writable {
		p = p[copy(v.Bytes(), p):]
	}
	s.code = virtioblk.StatusOK
}

// submit hands the request to the handle. An answer that is known already takes the same way back, at the pace of the
// loop, so that a guest which sends nothing but nonsense cannot keep a turn from ending.
func (s *slot) submit() {
	s.q.inflight++
	if s.immediate {
		s.q.loop.CompleteLater(&s.req, nil)
		return
	}
	s.q.face.Submit(&s.req)
}

// Complete hears from the handle. A request of several ranges goes on with the next until one fails.
func (s *slot) Complete(_ *block.Request, err error) {
	if s.immediate {
		s.settle()
		return
	}
	if s.joined != nil {
		s.part(err)
		return
	}
	if err == nil && s.atRange+1 < s.nranges {
		s.atRange++
		s.setRange()
		s.q.face.Submit(&s.req)
		return
	}
	s.code = statusOf(err)
	s.settle()
}

// settle counts the outcome and gives the slot to the queue for publication.
func (s *slot) settle() {
	s.q.completed(s)
}

// answer writes the status byte into guest memory, where the chain has a place for it, and tells the used length.
func (s *slot) answer() uint32 {
	if s.status != nil {
		*s.status = byte(s.code)
	}
	return s.written
}

// clean gives back what the request held, when it has been answered.
func (s *slot) clean() {
	s.mem.drop()
	s.mem = nil
	if s.vector != nil {
		s.q.store.give(s.vector)
		s.vector = nil
	}
}

// statusOf is the one place where an error becomes what the guest sees (virtio 1.3, 5.2.6).
func statusOf(err error) virtioblk.Status {
	switch {
	case err == nil:
		return virtioblk.StatusOK
	case errors.Is(err, syscall.EOPNOTSUPP):
		return virtioblk.StatusUnsupp
	default:
		return virtioblk.StatusIOErr
	}
}

// slotList is a first-in, first-out list of slots, linked through the slots themselves.
type slotList struct{ head, tail *slot }

func (l *slotList) push(s *slot) {
	s.next = nil
	if l.tail == nil {
		l.head = s
	} else {
		l.tail.next = s
	}
	l.tail = s
}

func (l *slotList) pop() *slot {
	s := l.head
	if s == nil {
		return nil
	}
	l.head = s.next
	if l.head == nil {
		l.tail = nil
	}
	s.next = nil
	return s
}
