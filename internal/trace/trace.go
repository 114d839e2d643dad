// SPDX-License-Identifier: Apache-2.0

// Package trace keeps the last requests of a loop and writes them in the trace-event format that Chrome and Perfetto read
// (https://ui.perfetto.dev).
//
// A [Buffer] belongs to one loop, is of one size for good, and forgets the oldest request for each new one. Adding copies
// some words. [Write] works on buffers that no loop touches any more. Moments are nanoseconds of the loops' common clock.
package trace

// Window is how many requests a loop's buffer keeps: half a second at a rate that few disks reach, and two megabytes.
const Window = 1 << 14

// Kind is what a request asked for.
type Kind uint8

// The kinds of requests.
const (
	KindRead Kind = iota
	KindWrite
	KindFlush
	KindDiscard
	KindOther
)

var kindNames = [...]string{"read", "write", "flush", "discard", "other"}

// String is the kind's name in the trace.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "other"
}

// Event is one request that was answered. Found, Popped, Completed and Published are always there; Queued and Submitted
// are 0 when no engine carried it, Called when the guest did not ask to be called for its batch.
type Event struct {
	Queue     *Queue
	Found     int64 // the turn began that took it from the ring
	Popped    int64
	Queued    int64
	Submitted int64
	Completed int64
	Published int64
	Called    int64
	Offset    int64 // bytes
	Length    int64 // bytes
	Kind      Kind
	Status    uint8
}

// Queue names where requests came from. Each has a track of its own.
type Queue struct {
	Disk   string
	Export string
	Index  int
	Loop   string
}

// Buffer keeps the last requests. It must be used on one loop at a time.
type Buffer struct {
	events []Event
	n      uint64 // added so far; the next goes to n modulo the length
}

// NewBuffer makes a buffer for the last n requests, at least one.
func NewBuffer(n int) *Buffer { return &Buffer{events: make([]Event, max(n, 1))} }

// Add takes the place of the oldest request, and answers it to be filled in. What stood there is still there.
func (b *Buffer) Add() *Event {
	e := &b.events[b.n%uint64(len(b.events))]
	b.n++
	return e
}

// Called notes, in the last n requests of q that wait for it, that the guest has been called.
func (b *Buffer) Called(q *Queue, n uint64, at int64) {
	for i := b.n; i > 0 && b.n-i < uint64(len(b.events)) && n > 0; i-- {
		e := &b.events[(i-1)%uint64(len(b.events))]
		if e.Queue != q {
			continue
		}
		e.Called = at
		n--
	}
}

// Added is how many requests were added, those that were forgotten included.
func (b *Buffer) Added() uint64 { return b.n }

// Events appends what is kept to into, the oldest first.
func (b *Buffer) Events(into []Event) []Event {
	size := uint64(len(b.events))
	if b.n <= size {
		return append(into, b.events[:b.n]...)
	}
	at := b.n % size
	return append(append(into, b.events[at:]...), b.events[:at]...)
}

// Kept is how many requests Events answers.
func (b *Buffer) Kept() int { return int(min(b.n, uint64(len(b.events)))) }
