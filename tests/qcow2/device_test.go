// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"iter"
	"math/rand/v2"
	"slices"
	"syscall"
)

// scheduler runs routines one at a time and chooses by its seed who goes on, so that an interleaving can be repeated.
type scheduler struct {
	*rand.Rand
	all     []*routine
	current *routine
	*log
}

type routine struct {
	resume func() (struct{}, bool)
	stop   func()
	yield  func(struct{}) bool
	ready  func() bool // nil unless it waits
}

// start makes a routine that runs when the scheduler does.
func (s *scheduler) start(fn func()) {
	r := &routine{}
	r.resume, r.stop = iter.Pull(func(yield func(struct{}) bool) {
		r.yield = yield
		fn()
	})
	s.all = append(s.all, r)
}

// run lets the routines go on until all have ended.
func (s *scheduler) run() error {
	for len(s.all) > 0 {
		var able []int
		for i, r := range s.all {
			if r.ready == nil || r.ready() {
				able = append(able, i)
			}
		}
		if len(able) == 0 {
			return fmt.Errorf("all %d requests wait for each other", len(s.all))
		}
		i := able[s.IntN(len(able))]
		s.current = s.all[i]
		s.current.ready = nil
		_, more := s.current.resume()
		s.current = nil
		if !more {
			s.all = slices.Delete(s.all, i, i+1)
		}
	}
	return nil
}

// pause lets others run.
func (s *scheduler) pause() {
	if s.current != nil {
		s.current.yield(struct{}{})
	}
}

// Wait implements metadata.Waiter.
func (s *scheduler) Wait(ready func() bool) {
	for !ready() {
		if s.current == nil {
			panic("the only user waits: nobody will wake it")
		}
		s.current.ready = ready
		s.pause()
	}
}

// event is one thing that was done to a device.
type event struct {
	of         int // which device
	kind       eventKind
	off, n     int64
	data       []byte
	start, end int // times of the scheduler; an end of 0 is never
}

type eventKind uint8

const (
	wrote eventKind = iota
	zeroed
	discarded
	truncated
	flushed
	looked
)

func (k eventKind) String() string {
	return [...]string{"write", "zero", "discard", "truncate", "flush", "read"}[k]
}

// device is a file in memory under an image. Each call takes a while, in which others run. It notes all that happens for
// those who want to know what a crash would leave, and it is as unkind as a disk may be: what is discarded becomes
// garbage, and a write may land at any time between its beginning and its end.
type device struct {
	s      *scheduler
	of     int // 0 is the image, 1 its data file
	file   []byte
	fault  func(kind string) error // asked before each call; nil never fails
	failed int
	limit  int64 // most bytes the file may have; 0 is any
	flying []event
}

var garbage = bytes.Repeat([]byte{0xdb, 0x5a, 0x81}, 1<<20)

// begin notes that something is sent to the device. It gives the time, by which done finds it again.
func (d *device) begin(kind string, e event) (int, error) {
	e.of = d.of
	if d.fault != nil {
		if err := d.fault(kind); err != nil {
			d.failed++
			d.s.pause()
			return 0, err
		}
	}
	e.start = d.s.begin(e)
	d.meets(&e)
	d.flying = append(d.flying, e)
	return e.start, nil
}

// meets complains of two that are in flight to the same bytes, unless both read: nobody knows what they find or leave.
func (d *device) meets(e *event) {
	for _, f := range d.flying {
		both := e.n > 0 && f.n > 0 && e.off < f.off+f.n && f.off < e.off+e.n
		if both && (e.kind != looked || f.kind != looked) {
			d.s.complain("%v of %d bytes at %#x while %v of %d bytes at %#x is in flight on file %d", e.kind, e.n, e.off, f.kind, f.n, f.off, d.of)
		}
	}
}

// done ends the event that began at a time.
func (d *device) done(start int) {
	d.flying = slices.DeleteFunc(d.flying, func(e event) bool { return e.start == start })
	d.s.done(start)
}

// begin notes an event and gives its time.
func (l *log) begin(e event) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now++
	e.start = l.now
	if l.record && e.kind != looked {
		l.events = append(l.events, e)
	}
	return e.start
}

// done notes that the event that began at a time has ended.
func (l *log) done(start int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now++
	for i := len(l.events) - 1; i >= 0; i-- {
		if l.events[i].start == start {
			l.events[i].end = l.now
			return
		}
	}
}

// tick gives a time of its own.
func (l *log) tick() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.now++
	return l.now
}

// complain notes what must not happen.
func (l *log) complain(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lenient {
		return
	}
	l.complaints = append(l.complaints, fmt.Errorf(format, args...))
}

// during runs apply now, while others run, or at the end.
func (d *device) during(apply func()) {
	when := d.s.IntN(3)
	if when == 0 {
		apply()
	}
	for range 1 + d.s.IntN(3) {
		d.s.pause()
		if when == 1 {
			apply()
			when = 0
		}
	}
	if when == 2 {
		apply()
	}
}

func (d *device) reach(end int64) error {
	if d.limit > 0 && end > d.limit {
		return syscall.ENOSPC
	}
	if more := end - int64(len(d.file)); more > 0 {
		d.file = append(d.file, make([]byte, more)...)
	}
	return nil
}

// Read implements the store.
func (d *device) Read(p []byte, off int64) error {
	start, err := d.begin("read", event{kind: looked, off: off, n: int64(len(p))})
	if err != nil {
		return err
	}
	d.during(func() { copy(p, window(d.file, off, int64(len(p)))) })
	d.done(start)
	return nil
}

// Write implements the store.
func (d *device) Write(p []byte, off int64) error {
	start, err := d.begin("write", event{kind: wrote, off: off, n: int64(len(p)), data: slices.Clone(p)})
	if err != nil {
		return err
	}
	defer d.done(start)
	if err := d.reach(off + int64(len(p))); err != nil {
		return err
	}
	before := maphash.Bytes(hashSeed, p)
	d.during(func() { copy(d.file[off:], p) })
	if maphash.Bytes(hashSeed, p) != before {
		d.s.complain("memory of a write of %d bytes at %#x changed while it was in flight", len(p), off)
	}
	return nil
}

var hashSeed = maphash.MakeSeed()

// Zero implements the store.
func (d *device) Zero(off, n int64) error {
	start, err := d.begin("zero", event{kind: zeroed, off: off, n: n})
	if err != nil {
		return err
	}
	defer d.done(start)
	if err := d.reach(off + n); err != nil {
		return err
	}
	d.during(func() { clear(d.file[off : off+n]) })
	return nil
}

// Discard implements the store.
func (d *device) Discard(off, n int64) error {
	start, err := d.begin("discard", event{kind: discarded, off: off, n: n})
	if err != nil {
		return err
	}
	defer d.done(start)
	d.during(func() { spoil(d.file, off, n) })
	return nil
}

// spoil overwrites what is discarded.
func spoil(file []byte, off, n int64) {
	for end := min(off+n, int64(len(file))); off < end; {
		off += int64(copy(file[off:end], garbage))
	}
}

// Flush implements the store.
func (d *device) Flush() error {
	start, err := d.begin("flush", event{kind: flushed})
	if err != nil {
		return err
	}
	defer d.done(start)
	for range 1 + d.s.IntN(3) {
		d.s.pause()
	}
	return nil
}

// Size implements the store.
func (d *device) Size() (int64, error) { return int64(len(d.file)), nil }

// Truncate implements the store.
func (d *device) Truncate(n int64) error {
	start, err := d.begin("truncate", event{kind: truncated, n: n})
	if err != nil {
		return err
	}
	defer d.done(start)
	if err := d.reach(n); err != nil {
		return err
	}
	d.file = d.file[:n:n]
	d.s.pause()
	return nil
}
