// SPDX-License-Identifier: Apache-2.0

package aio

import "github.com/sluice-blk/sluice/internal/sys"

// IOVec is one memory segment of a request: Len bytes at Base, laid out as the kernel's struct iovec.
type IOVec = sys.IOVec

// IOVecOf describes the bytes of b.
func IOVecOf(b []byte) IOVec { return sys.IOVecOf(b) }

// Op is what a request asks for.
type Op uint8

// The operations. Offsets and lengths are bytes.
const (
	// OpRead fills Mem from [Offset, Offset+Length).
	OpRead Op = iota
	// OpWrite stores Mem to [Offset, Offset+Length).
	OpWrite
	// OpFlush makes every write durable that completed before the flush was submitted. Offset, Length and Mem are unused.
	OpFlush
	// OpDiscard tells that the contents of [Offset, Offset+Length) are of no more use. What is read there later is
	// unspecified unless the node says otherwise.
	OpDiscard
	// OpWriteZeroes makes [Offset, Offset+Length) read as zeros. With FlagUnmap the space may be given back.
	OpWriteZeroes
)

// String is the operation's name as it stands in messages and in fault texts.
func (o Op) String() string {
	names := [...]string{"read", "write", "flush", "discard", "write-zeroes"}
	if int(o) < len(names) {
		return names[o]
	}
	return "unknown"
}

// Flags modify an operation.
type Flags uint8

const (
	// FlagFUA makes this one write, or write of zeroes, durable before it completes.
	FlagFUA Flags = 1 << iota
	// FlagUnmap lets a write of zeroes give the space back.
	FlagUnmap
	// FlagZeroEOF gives zeros for what a read asks beyond the end of the file, instead of an error.
	FlagZeroEOF
)

// MaxIntercepts bounds how many layers may stand between a request's owner and the engine and want to see it come back.
// Filters are few and made by configuration, so eight is ample; the graph refuses a deeper stack when it is built.
const MaxIntercepts = 8

// Completer hears the outcome of a request.
type Completer interface {
	// Complete is called exactly once for each submission, on the loop that the request was submitted on and never
	// inside Submit. err is nil or carries a syscall.Errno (errors.As finds it). The request belongs to the callee again.
	Complete(r *Request, err error)
}

// Request is one I/O. It is meant to be embedded in, or allocated with, its owner and used again and again: nothing on
// its way allocates.
//
// From Submit to Complete the request belongs to whoever holds it: the owner must not touch it, and a layer on the way
// may change Offset, Length and Flags for the next one, so the owner must not rely on them afterwards. Mem and what it
// points to must stay as they are until Complete; nobody on the way changes the segments.
//
// A Request is not safe for concurrent use.
type Request struct {
	Op     Op
	Flags  Flags
	Offset int64   // bytes from the start of the node or file
	Length int64   // bytes; for reads and writes the sum of Mem
	Mem    []IOVec // reads and writes only
	Done   Completer

	stack [MaxIntercepts]Completer
	depth int8

	// The rest belongs to the loop and the engine that hold the request.
	times times
	next  *Request
	err   error
	file  *File
	moved int64 // bytes done so far, when the kernel did only a part
	res   int64 // what the last transfer answered, where an engine has to carry it from another thread
	stage stage
	step  step
	tries uint8 // answers of EINTR and EAGAIN in a row
}

// Intercept lets a layer see the request on its way back, before everybody above it: c.Complete is called in place of the
// caller's Completer, and passes the outcome on with Finish. It answers false when the stack is full.
func (r *Request) Intercept(c Completer) bool {
	if int(r.depth) == MaxIntercepts {
		return false
	}
	r.stack[r.depth] = c
	r.depth++
	return true
}

// Finish hands the outcome to the next one above: the layer that intercepted last, in the end the owner.
// It must be called on the loop and never inside Submit; a node that knows the outcome at once uses Loop.CompleteLater.
func (r *Request) Finish(err error) {
	if r.depth > 0 {
		r.depth--
		c := r.stack[r.depth]
		r.stack[r.depth] = nil
		c.Complete(r, err)
		return
	}
	r.Done.Complete(r, err)
}

// requestList is a first-in, first-out list of requests, linked through the requests themselves.
type requestList struct {
	head, tail *Request
	n          int
}

func (q *requestList) push(r *Request) {
	r.next = nil
	if q.tail == nil {
		q.head = r
	} else {
		q.tail.next = r
	}
	q.tail = r
	q.n++
}

func (q *requestList) pop() *Request {
	r := q.head
	if r == nil {
		return nil
	}
	q.head = r.next
	if q.head == nil {
		q.tail = nil
	}
	r.next = nil
	q.n--
	return r
}

// pushFront puts back what was popped last, so that the order stays.
func (q *requestList) pushFront(r *Request) {
	r.next = q.head
	q.head = r
	if q.tail == nil {
		q.tail = r
	}
	q.n++
}

// append moves all of other behind what is here.
func (q *requestList) append(other *requestList) {
	if other.head == nil {
		return
	}
	if q.tail == nil {
		q.head = other.head
	} else {
		q.tail.next = other.head
	}
	q.tail = other.tail
	q.n += other.n
	*other = requestList{}
}
