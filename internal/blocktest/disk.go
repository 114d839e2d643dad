// SPDX-License-Identifier: Apache-2.0

package blocktest

import (
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/sys"
)

// Submitter is what a node's queue and a handle's queue have in common.
type Submitter interface {
	Submit(r *block.Request)
	Close() error
}

// Disk is one loop's face of a node or a handle, for code that waits.
type Disk struct {
	T    testing.TB
	Loop *aio.Loop
	Q    Submitter

	inSubmit bool // on the loop
}

// Bare opens a queue of the node itself; the test must keep to the node's alignment.
func Bare(t testing.TB, l *aio.Loop, n block.Node) *Disk {
	t.Helper()
	return open(t, l, func() (Submitter, error) { return n.Queue(l) })
}

// Guarded opens a queue of the handle.
func Guarded(t testing.TB, l *aio.Loop, h *block.Handle) *Disk {
	t.Helper()
	return open(t, l, func() (Submitter, error) { return h.Queue(l) })
}

func open(t testing.TB, l *aio.Loop, fn func() (Submitter, error)) *Disk {
	t.Helper()
	d := &Disk{T: t, Loop: l}
	err := On(t, l, func() (err error) {
		d.Q, err = fn()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d
}

// Close closes the queue. A second one does no harm.
func (d *Disk) Close() {
	d.T.Helper()
	if d.Q == nil {
		return
	}
	if err := On(d.T, d.Loop, d.Q.Close); err != nil {
		d.T.Errorf("close queue: %v", err)
	}
	d.Q = nil
}

// Call is one request and its outcome.
type Call struct {
	Op     block.Op
	Flags  block.Flags
	Offset int64
	Length int64 // of requests without memory, and of those whose memory is meant not to fit
	Bufs   [][]byte
	Err    error // once done

	d     *Disk
	req   block.Request
	times atomic.Int32
	batch *Batch
}

// Batch is calls that were submitted together.
type Batch struct {
	Calls []*Call
	left  atomic.Int32
	done  chan struct{}
}

// Complete implements block.Completer.
func (c *Call) Complete(r *block.Request, err error) {
	if c.d.inSubmit {
		c.d.T.Errorf("%s completed inside Submit", c)
	}
	if r != &c.req {
		c.d.T.Errorf("%s completed with another request", c)
	}
	if c.times.Add(1) != 1 {
		c.d.T.Errorf("%s completed more than once", c)
		return
	}
	c.Err = err
	if c.batch.left.Add(-1) == 0 {
		close(c.batch.done)
	}
}

// String describes the call.
func (c *Call) String() string {
	return fmt.Sprintf("%s %d+%d flags=%d segments=%d", c.Op, c.Offset, c.size(), c.Flags, len(c.Bufs))
}

func (c *Call) size() int64 {
	if c.Length != 0 {
		return c.Length
	}
	var n int64
	for _, b := range c.Bufs {
		n += int64(len(b))
	}
	return n
}

// Start submits the calls in one turn.
func (d *Disk) Start(calls ...*Call) *Batch {
	d.T.Helper()
	b := &Batch{Calls: calls, done: make(chan struct{})}
	b.left.Store(int32(len(calls)))
	for _, c := range calls {
		c.d, c.batch = d, b
		c.times.Store(0)
		c.req = block.Request{Op: c.Op, Flags: c.Flags, Offset: c.Offset, Length: c.size(), Done: c}
		for _, buf := range c.Bufs {
			c.req.Mem = append(c.req.Mem, aio.IOVecOf(buf))
		}
	}
	if len(calls) == 0 {
		close(b.done)
		return b
	}
	err := On(d.T, d.Loop, func() error {
		d.inSubmit = true
		for _, c := range calls {
			d.Q.Submit(&c.req)
		}
		d.inSubmit = false
		return nil
	})
	if err != nil {
		d.T.Fatal(err)
	}
	return b
}

// Wait waits until all calls are done, and gives the first error.
func (b *Batch) Wait(t testing.TB) error {
	t.Helper()
	select {
	case <-b.done:
	case <-time.After(Patience):
		for _, c := range b.Calls {
			if c.times.Load() == 0 {
				t.Errorf("still not complete: %s", c)
			}
		}
		t.Fatal("requests do not complete")
	}
	for _, c := range b.Calls {
		if c.Err != nil {
			return fmt.Errorf("%s: %w", c, c.Err)
		}
	}
	return nil
}

// Done tells whether all calls are done.
func (b *Batch) Done() bool { return b.left.Load() == 0 }

// Run submits the calls in one turn and waits for them. It gives the first error.
func (d *Disk) Run(calls ...*Call) error {
	d.T.Helper()
	return d.Start(calls...).Wait(d.T)
}

// Read reads into bufs.
func (d *Disk) Read(offset int64, bufs ...[]byte) error {
	d.T.Helper()
	return d.Run(&Call{Op: block.OpRead, Offset: offset, Bufs: bufs})
}

// Write writes bufs.
func (d *Disk) Write(offset int64, bufs ...[]byte) error {
	d.T.Helper()
	return d.Run(&Call{Op: block.OpWrite, Offset: offset, Bufs: bufs})
}

// Flush flushes.
func (d *Disk) Flush() error {
	d.T.Helper()
	return d.Run(&Call{Op: block.OpFlush})
}

// SetWriteCache switches the write cache of a queue of a handle, and answers how it is then.
func (d *Disk) SetWriteCache(on bool) (is bool) {
	d.T.Helper()
	q, ok := d.Q.(*block.HandleQueue)
	if !ok {
		d.T.Fatal("the write cache of a bare node cannot be switched")
	}
	err := On(d.T, d.Loop, func() error {
		q.SetWriteCache(on)
		is = q.WriteCache()
		return nil
	})
	if err != nil {
		d.T.Fatal(err)
	}
	return is
}

// Zero writes zeroes.
func (d *Disk) Zero(offset, length int64, flags block.Flags) error {
	d.T.Helper()
	return d.Run(&Call{Op: block.OpWriteZeroes, Flags: flags, Offset: offset, Length: length})
}

// Discard discards.
func (d *Disk) Discard(offset, length int64) error {
	d.T.Helper()
	return d.Run(&Call{Op: block.OpDiscard, Offset: offset, Length: length})
}

// Memory gives n bytes at an address that is a multiple of align, plus skew.
func Memory(n, align, skew int) []byte {
	align = max(align, sys.PageSize())
	b := make([]byte, n+2*align+skew)
	// SAFETY: the address is looked at as a number; the garbage collector does not move heap objects.
	at := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b)))&uintptr(align-1)) + skew
	return b[at : at+n : at+n]
}

// Pattern fills b with bytes that are not zero and differ with place, offset and round.
func Pattern(b []byte, offset int64, round byte) {
	x := uint64(offset)*0x9e3779b97f4a7c15 + uint64(round)*0xc2b2ae3d27d4eb4f
	for len(b) > 0 {
		x += 0x9e3779b97f4a7c15
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], (x^x>>29)|0x0101010101010101)
		b = b[copy(b, word[:]):]
	}
}

// Segments cuts b into pieces of n bytes.
func Segments(b []byte, n int) [][]byte {
	var list [][]byte
	for len(b) > 0 {
		k := min(n, len(b))
		list = append(list, b[:k:k])
		b = b[k:]
	}
	return list
}
