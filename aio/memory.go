// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"errors"
	"fmt"
	"time"
	"unsafe"

	"github.com/sluice-blk/sluice/uring"
)

const (
	// pinChunk is how much memory is pinned at a time. Pinning brings in what is not there yet, page by page: two
	// mebibytes take half a millisecond at most, and are as much as a huge page.
	pinChunk = 2 << 20
	// pinPlaces is how many chunks one loop can have pinned, sixteen gibibytes of them. The kernel takes twice that.
	pinPlaces = 8192
	// unpinsATurn bounds how long a turn is busy with memory that was given up.
	unpinsATurn = 16
	unpinAgain  = time.Millisecond
)

// PinCounters tell of registered memory.
type PinCounters struct {
	Fixed  uint64 // requests that named registered memory
	Pinned uint64 // bytes that are pinned now
	// Refused tells why no more is pinned; empty where nothing has been refused.
	Refused string
}

// pinner registers memory with the ring, so that the kernel need not look up and hold its pages at each request.
//
// Nothing is pinned before it is used: the chunk that a direct request lies in is registered at the end of the turn, one a
// turn, and serves from the next request on. So it costs nothing to tell of memory, of whatever size, and what a guest
// never uses for I/O stays where it is. The first refusal ends it, for all: a limit on locked memory is the process's.
type pinner struct {
	l       *Loop
	regions []*pinRegion
	last    *pinRegion // where the last request lay
	places  bool       // the ring has its table
	free    []uint16   // places that are empty
	stale   []uint16   // places that are to be emptied
	want    *pinRegion // of which chunk wantAt is to be pinned
	wantAt  int
	timer   *Timer
	one     [1]IOVec
	count   PinCounters
}

// pinRegion is memory that somebody told of.
type pinRegion struct {
	mem   IOVec
	users int
	place []uint16 // by chunk: one more than its place, 0 is not pinned
}

// RegisterMemory tells the loop of memory that requests will use again and again, such as a guest's. Where the loop was
// made with FixedBuffers, and the kernel allows it, the parts that direct requests use are pinned; else it does nothing.
// It returns at once. The same region may be registered by several; it must stay mapped until each has unregistered it.
//
// Pinned pages are those that the memory had when it was first used. Where its owner takes pages away, by punching holes
// or by a balloon, and touches the memory again, requests would go on to use the old ones.
//
// Must be called on the loop.
func (l *Loop) RegisterMemory(mem []IOVec) {
	l.assertOnLoop()
	if !l.opts.FixedBuffers {
		return
	}
	if l.pins == nil {
		l.pins = newPinner(l)
	}
	for _, v := range mem {
		l.pins.add(v)
	}
}

// UnregisterMemory takes back what RegisterMemory was told. Requests in flight keep the pages that they use; the others
// are let go soon after. Must be called on the loop.
func (l *Loop) UnregisterMemory(mem []IOVec) {
	l.assertOnLoop()
	if l.pins == nil {
		return
	}
	for _, v := range mem {
		l.pins.remove(v)
	}
}

func newPinner(l *Loop) *pinner {
	p := &pinner{l: l}
	if l.ring == nil {
		p.refuse(fmt.Errorf("%w: the loop's poller is %s", ErrNotSupported, l.poller.kind()))
		return p
	}
	if err := l.ring.RegisterBuffersSparse(pinPlaces); err != nil {
		p.refuse(err)
		return p
	}
	p.places = true
	p.free = make([]uint16, pinPlaces)
	for i := range p.free {
		p.free[i] = uint16(pinPlaces - 1 - i)
	}
	return p
}

func (p *pinner) refuse(err error) { p.count.Refused = err.Error() }

func (p *pinner) add(v IOVec) {
	for _, r := range p.regions {
		if r.mem == v {
			r.users++
			return
		}
	}
	chunks := (v.Len + pinChunk - 1) / pinChunk
	p.regions = append(p.regions, &pinRegion{mem: v, users: 1, place: make([]uint16, chunks)})
}

func (p *pinner) remove(v IOVec) {
	for i, r := range p.regions {
		if r.mem != v {
			continue
		}
		if r.users--; r.users > 0 {
			return
		}
		p.regions = append(p.regions[:i], p.regions[i+1:]...)
		p.last, p.want = nil, nil
		for c, place := range r.place {
			if place != 0 {
				p.stale = append(p.stale, place-1)
				p.count.Pinned -= r.chunk(c).Len
			}
		}
		p.hurry()
		return
	}
}

// hurry has the loop turn for what is stale, also when nothing else happens.
func (p *pinner) hurry() {
	switch {
	case len(p.stale) == 0:
	case p.timer == nil:
		p.timer = p.l.Timer(unpinAgain, p)
	default:
		p.timer.Reset(unpinAgain)
	}
}

// HandleTimer has nothing to do: the end of the turn does it.
func (p *pinner) HandleTimer(*Timer) {}

func (r *pinRegion) has(v IOVec) (at uint64, ok bool) {
	at = uint64(uintptr(unsafe.Pointer(v.Base)) - uintptr(unsafe.Pointer(r.mem.Base)))
	return at, at < r.mem.Len && v.Len <= r.mem.Len-at
}

// chunk is the memory of chunk c.
func (r *pinRegion) chunk(c int) IOVec {
	at := uint64(c) * pinChunk
	// SAFETY: a region has as many chunks as begin inside of it.
	base := (*byte)(unsafe.Add(unsafe.Pointer(r.mem.Base), at))
	return IOVec{Base: base, Len: min(pinChunk, r.mem.Len-at)}
}

// place is the registered buffer that holds v, or -1. What is not pinned yet will be.
func (p *pinner) place(v IOVec) int {
	r := p.last
	at, ok := uint64(0), false
	if r != nil {
		at, ok = r.has(v)
	}
	for i := 0; !ok && i < len(p.regions); i++ {
		r = p.regions[i]
		at, ok = r.has(v)
	}
	if !ok || v.Len == 0 {
		return -1
	}
	p.last = r
	c := at / pinChunk
	if (at+v.Len-1)/pinChunk != c {
		return -1
	}
	if place := r.place[c]; place != 0 {
		p.count.Fixed++
		return int(place) - 1
	}
	if p.count.Refused == "" && len(p.free) > 0 {
		p.want, p.wantAt = r, int(c)
	}
	return -1
}

// work pins and unpins a little at the end of a turn, once what is queued has been handed over: a place is emptied only
// when no entry that the kernel has not seen names it.
func (p *pinner) work() {
	if p.want == nil && len(p.stale) == 0 {
		return
	}
	p.l.note(p.l.poller.submit())
	if p.l.ring.SQPending() == 0 {
		p.unpin()
		p.pin()
	}
	p.hurry()
}

func (p *pinner) pin() {
	r := p.want
	p.want = nil
	if r == nil || r.place[p.wantAt] != 0 || p.count.Refused != "" {
		return
	}
	place := p.free[len(p.free)-1]
	p.one[0] = r.chunk(p.wantAt)
	if err := p.update(place); err != nil {
		p.refuse(err)
		return
	}
	p.free = p.free[:len(p.free)-1]
	r.place[p.wantAt] = place + 1
	p.count.Pinned += p.one[0].Len
}

func (p *pinner) unpin() {
	p.one[0] = IOVec{}
	for range min(len(p.stale), unpinsATurn) {
		place := p.stale[len(p.stale)-1]
		p.stale = p.stale[:len(p.stale)-1]
		if err := p.update(place); err != nil {
			p.refuse(err) // the place is lost
			continue
		}
		p.free = append(p.free, place)
	}
}

func (p *pinner) update(place uint16) error {
	n, err := p.l.ring.UpdateBuffers(uint32(place), p.one[:])
	if err == nil && n != 1 {
		err = errors.New("register memory: the kernel took none")
	}
	return err
}

// prepRead is SQE.PrepRead, by a registered buffer where there is one.
func (e *uringEngine) prepRead(sqe *uring.SQE, f *File, v IOVec, off uint64) {
	if i := e.fixed(f, v); i >= 0 {
		sqe.PrepReadFixed(f.fd, v.Bytes(), off, uint16(i))
		return
	}
	sqe.PrepRead(f.fd, v.Bytes(), off)
}

// prepWrite is SQE.PrepWrite, likewise.
func (e *uringEngine) prepWrite(sqe *uring.SQE, f *File, v IOVec, off uint64) {
	if i := e.fixed(f, v); i >= 0 {
		sqe.PrepWriteFixed(f.fd, v.Bytes(), off, uint16(i))
		return
	}
	sqe.PrepWrite(f.fd, v.Bytes(), off)
}

// fixed is the registered buffer for a transfer. Only direct ones hold pages; others copy.
func (e *uringEngine) fixed(f *File, v IOVec) int {
	if e.l.pins == nil || !f.direct {
		return -1
	}
	return e.l.pins.place(v)
}
