// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"errors"
	"fmt"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
)

// Disk is an image that is open on a loop, for goroutines that move data. Offsets and lengths are bytes. Safe for
// concurrent use, but for Close.
type Disk struct {
	name   string
	format string
	image  *Info // nil where it was not opened as an image
	handle *block.Handle
	face   *block.HandleQueue
	info   block.Info
}

// NewDisk puts a node on a loop and takes it over: closing the disk closes it, and so does a failure.
func NewDisk(ctx context.Context, l *aio.Loop, name string, n block.Node, o *block.HandleOptions) (*Disk, error) {
	d := &Disk{name: name, handle: block.NewHandle(n, o)}
	err := l.Call(ctx, func() (err error) {
		d.face, err = d.handle.Queue(l)
		return err
	})
	if err != nil {
		return nil, errors.Join(err, d.handle.Close())
	}
	d.info = d.handle.Info()
	return d, nil
}

// Name is what messages call the disk.
func (d *Disk) Name() string { return d.name }

// Format is the format of the image, "" where it was not opened as one.
func (d *Disk) Format() string { return d.format }

// Size is the length of the disk.
func (d *Disk) Size() int64 { return d.info.Size }

// Node is the node behind the disk, for what goes past requests.
func (d *Disk) Node() block.Node { return d.handle.Node() }

// Close closes the disk and gives up its locks. Nothing is in flight then. A second Close does no harm.
func (d *Disk) Close() error {
	if d.face == nil {
		return nil
	}
	face := d.face
	d.face = nil
	err := face.Loop().Call(context.Background(), face.Close)
	return errors.Join(err, d.handle.Close())
}

// Read fills p from off on.
func (d *Disk) Read(p []byte, off int64) error {
	t := newTransfer(1)
	t.read(p, off)
	return t.run(d)
}

// Write stores p at off.
func (d *Disk) Write(p []byte, off int64) error {
	t := newTransfer(1)
	t.write(p, off)
	return t.run(d)
}

// Flush makes durable what was written, as far as the cache mode of the disk says so.
func (d *Disk) Flush() error {
	t := newTransfer(1)
	t.add(block.OpFlush, 0, 0, 0)
	return t.run(d)
}

// Zero makes [off, off+n) read as zeros; unmap lets it give the space back.
func (d *Disk) Zero(off, n int64, unmap bool) error {
	t := newTransfer(1)
	t.zero(off, n, unmap)
	return t.run(d)
}

// Map gives the extents of [off, off+n), as [block.Map] does. each may take its time.
func (d *Disk) Map(ctx context.Context, off, n int64, each func(block.Extent) error) error {
	h := newHoles()
	err := block.Map(ctx, d.handle.Node(), off, n, func(e block.Extent) error { return h.refine(e, each) })
	return errors.Join(err, h.Close())
}

// transferError tells which request of a transfer failed.
type transferError struct {
	off int64
	err error
}

func (e *transferError) Error() string { return fmt.Sprintf("at byte %d: %v", e.off, e.err) }

func (e *transferError) Unwrap() error { return e.err }

// transfer is a number of requests that reach a disk in one turn of its loop. It is filled, run, and used again. It belongs
// to one goroutine.
type transfer struct {
	disk *Disk
	reqs []block.Request
	mem  []aio.IOVec
	offs []int64 // as asked: a request may come back with another offset
	left int
	at   int64
	err  error // of the request with the lowest offset that failed
	post func()
	done chan struct{}
}

// newTransfer has room for n requests.
func newTransfer(n int) *transfer {
	t := &transfer{
		reqs: make([]block.Request, 0, n), mem: make([]aio.IOVec, n), offs: make([]int64, n),
		done: make(chan struct{}, 1), // holds one, so that the loop never waits for the goroutine
	}
	t.post = t.submit
	return t
}

// full tells that nothing more goes in.
func (t *transfer) full() bool { return len(t.reqs) == cap(t.reqs) }

func (t *transfer) read(p []byte, off int64)  { t.data(block.OpRead, p, off) }
func (t *transfer) write(p []byte, off int64) { t.data(block.OpWrite, p, off) }

func (t *transfer) zero(off, n int64, unmap bool) {
	flags := block.Flags(0)
	if unmap {
		flags = block.FlagUnmap
	}
	t.add(block.OpWriteZeroes, flags, off, n)
}

func (t *transfer) data(op block.Op, p []byte, off int64) {
	i := len(t.reqs)
	t.mem[i] = aio.IOVecOf(p)
	t.add(op, 0, off, int64(len(p)))
	t.reqs[i].Mem = t.mem[i : i+1]
}

func (t *transfer) add(op block.Op, flags block.Flags, off, n int64) {
	i := len(t.reqs)
	t.reqs = t.reqs[:i+1]
	t.offs[i] = off
	r := &t.reqs[i]
	r.Op, r.Flags, r.Offset, r.Length, r.Mem, r.Done = op, flags, off, n, nil, t
}

// start hands the requests to the loop of d. Transfers that one goroutine starts reach the disk in that order.
func (t *transfer) start(d *Disk) {
	t.disk, t.left, t.err = d, len(t.reqs), nil
	if t.left == 0 {
		t.done <- struct{}{}
		return
	}
	d.face.Loop().Post(t.post)
}

// wait waits for the end of what was started, and empties the transfer.
func (t *transfer) wait() error {
	<-t.done
	t.reqs = t.reqs[:0]
	if t.err != nil {
		return &transferError{off: t.at, err: t.err}
	}
	return nil
}

func (t *transfer) run(d *Disk) error {
	t.start(d)
	return t.wait()
}

// submit runs on the loop. Completions come later, never inside Submit.
func (t *transfer) submit() {
	for i := range t.reqs {
		t.disk.face.Submit(&t.reqs[i])
	}
}

// Complete runs on the loop.
func (t *transfer) Complete(r *block.Request, err error) {
	if err != nil {
		at := t.offs[t.index(r)]
		if t.err == nil || at < t.at {
			t.at, t.err = at, err
		}
	}
	t.left--
	if t.left == 0 {
		t.done <- struct{}{}
	}
}

// index finds a request of the transfer: it happens for those that failed only.
func (t *transfer) index(r *block.Request) int {
	for i := range t.reqs {
		if &t.reqs[i] == r {
			return i
		}
	}
	return 0
}
