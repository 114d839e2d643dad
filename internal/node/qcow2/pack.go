// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
)

// CompressedWriter writes whole clusters that somebody has compressed, for tools that fill an image; compressing takes many
// threads, writing takes the image's loop. A cluster that did not become shorter is written by an ordinary request. All
// methods must be called on the loop.
type CompressedWriter struct{ q *queue }

// CompressedWrite is one cluster. It is the writer's from Submit until Done has been called.
type CompressedWrite struct {
	Offset int64           // of the cluster on the disk
	Data   []byte          // what Packer made of it, with zeros behind the end of the disk
	Done   func(err error) // called on the loop, and never inside Submit
}

// CompressedWriter makes the image's face for compressed clusters on a loop, which must be the image's home if it has one.
// Must be called on the loop.
func (n *Node) CompressedWriter(l *aio.Loop) (*CompressedWriter, error) {
	if n.o.ReadOnly {
		return nil, fmt.Errorf("write compressed clusters to %s: %w", n.info.Name, block.ErrReadOnly)
	}
	q, err := n.Queue(l)
	if err != nil {
		return nil, fmt.Errorf("write compressed clusters to %s: %w", n.info.Name, err)
	}
	return &CompressedWriter{q.(*queue)}, nil
}

// Submit begins to write a cluster. Many may be under way; of two of the same cluster one wins.
func (w *CompressedWriter) Submit(c *CompressedWrite) {
	h := w.q.h
	h.begin(job{fn: func() {
		err := h.running.writeCompressed(c)
		h.loop.Post(func() { c.Done(err) })
	}})
}

// Close gives back what the writer holds. Nothing is under way then.
func (w *CompressedWriter) Close() error { return w.q.Close() }

func (c *routine) writeCompressed(w *CompressedWrite) error {
	h := c.h
	if w.Offset < 0 || w.Offset >= h.n.info.Size || w.Offset&(h.n.cluster()-1) != 0 || len(w.Data) == 0 || int64(len(w.Data)) >= h.n.cluster() {
		return fmt.Errorf("write %d compressed bytes at %d: they are no cluster: %w", len(w.Data), w.Offset, syscall.EINVAL)
	}
	t := h.n.img.Enter()
	defer h.n.img.Exit(t)
	a := &c.alloc
	if err := h.n.img.BeginCompressed(a, w.Offset, len(w.Data)); err != nil {
		return err
	}
	err := store{h.n}.Write(w.Data, a.Host)
	if err != nil {
		h.n.img.Abort(a)
		return err
	}
	h.n.img.Link(a)
	return nil
}
