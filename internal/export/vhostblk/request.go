// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"errors"
	"syscall"

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

// slot is one request's place: the chain it came as, the request it became, and the status it is answered with. Slots
// are made when the queue starts and used again and again.
type slot struct {
	q     *queue
	chain virtqueue.Chain
	req   block.Request
	mem   *memory
	next  *slot

	status    *byte // in guest memory; nil when the chain has no place for it
	code      virtioblk.Status
	kind      virtioblk.RequestType
	written   uint32 // the used length
	ranges    [maxRangeSegments]virtioblk.DiscardRange
	nranges   int
	atRange   int
	immediate bool // answered without asking the handle
}

func (s *slot) init(q *queue, segments []sys.IOVec) {
	s.q = q
	s.chain.SetStorage(segments)
	s.req.Done = s
}

// parse turns the chain into a request (virtio 1.3, 5.2.6). The framing is the driver's choice: header, data and status
// are found by counting bytes, not descriptors. It reads guest memory: header and ranges are copied once, here.
func (s *slot) parse() {
	s.status, s.written, s.nranges, s.atRange = nil, 0, 0, 0
	s.code, s.immediate = virtioblk.StatusIOErr, true
	s.kind = noRequest
	if !s.takeStatus() || s.chain.Err != nil {
		return
	}
	var raw [virtioblk.HeaderSize]byte
	if !s.takeReadable(raw[:]) {
		return
	}
	h, _ := virtioblk.DecodeHeader(raw[:])
	s.kind = h.Type
	s.req.Flags = 0
	switch h.Type {
	case virtioblk.TypeIn:
		s.parseData(block.OpRead, h, s.chain.Writable, s.chain.WritableLen)
	case virtioblk.TypeOut:
		s.parseData(block.OpWrite, h, s.chain.Readable, s.chain.ReadableLen)
	case virtioblk.TypeFlush:
		s.req.Op, s.req.Offset, s.req.Length, s.req.Mem = block.OpFlush, 0, 0, nil
		s.immediate = false
	case virtioblk.TypeGetID:
		s.answerID()
	case virtioblk.TypeDiscard, virtioblk.TypeWriteZeroes:
		s.parseRanges()
	default:
		s.code = virtioblk.StatusUnsupp
	}
}

// takeStatus cuts the last byte off the device-writable part: that is where the status goes. The used length of a sound
// chain is that whole part, since the status is its last byte; of a faulty one it is nothing, as virtqueue tells.
func (s *slot) takeStatus() bool {
	w := s.chain.Writable
	if len(w) == 0 {
		return false
	}
	if s.chain.Err == nil {
		s.written = uint32(s.chain.WritableLen)
	}
	last := &w[len(w)-1]
	b := last.Bytes()
	s.status = &b[len(b)-1]
	if last.Len--; last.Len == 0 {
		w = w[:len(w)-1]
	}
	s.chain.Writable = w
	s.chain.WritableLen--
	return true
}

// takeReadable moves len(p) bytes from the front of the device-readable part to p, across segments.
func (s *slot) takeReadable(p []byte) bool {
	if s.chain.ReadableLen < int64(len(p)) {
		return false
	}
	s.chain.ReadableLen -= int64(len(p))
	r := s.chain.Readable
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
	s.chain.Readable = r
	return true
}

func (s *slot) parseData(op block.Op, h virtioblk.Header, mem []sys.IOVec, length int64) {
	offset, status := h.Range(length, s.q.dev.capacity)
	if status != virtioblk.StatusOK || length == 0 {
		return
	}
	s.req.Op, s.req.Offset, s.req.Length, s.req.Mem = op, offset, length, mem
	s.immediate = false
}

// parseRanges reads the segments of a discard or write of zeroes and checks all of them before any is begun, so that a
// refused request has no partial effect.
func (s *slot) parseRanges() {
	dev := s.q.dev
	if dev.offered&featureOf(s.kind) == 0 {
		if !dev.info.ReadOnly { // a read-only disk has the operation and refuses it
			s.code = virtioblk.StatusUnsupp
		}
		return
	}
	n, ok := virtioblk.RangeCount(s.chain.ReadableLen, maxRangeSegments)
	if !ok {
		return
	}
	var raw [virtioblk.DiscardRangeSize]byte
	for i := range n {
		s.takeReadable(raw[:])
		r, _ := virtioblk.DecodeDiscardRange(raw[:])
		if s.code = r.Check(s.kind, dev.capacity, maxRangeSectors); s.code != virtioblk.StatusOK {
			return
		}
		s.ranges[i] = r
	}
	s.nranges = n
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
	r := s.ranges[s.atRange]
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
func (s *slot) answerID() {
	id := virtioblk.EncodeID(s.q.dev.opts.Serial)
	p := id[:]
	for _, v := range s.chain.Writable {
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
	st := &s.q.stats
	switch s.kind {
	case virtioblk.TypeIn:
		st.Reads++
		st.BytesRead += uint64(s.chain.WritableLen)
	case virtioblk.TypeOut:
		st.Writes++
		st.BytesWritten += uint64(s.chain.ReadableLen)
	case virtioblk.TypeFlush:
		st.Flushes++
	case virtioblk.TypeDiscard, virtioblk.TypeWriteZeroes:
		st.Discards++
	}
	if s.code != virtioblk.StatusOK {
		st.Errors++
	}
	s.q.completed(s)
}

// answer writes the status byte into guest memory, where the chain has a place for it, and tells the used length.
func (s *slot) answer() uint32 {
	if s.status != nil {
		*s.status = byte(s.code)
	}
	return s.written
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
