// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"errors"
	"runtime"
	"syscall"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/node/qcow2"
)

// Compression is how a target is compressed.
type Compression struct {
	Type    uint8 // as the header of the image has it
	Cluster int64 // bytes
	Writer  *qcow2.CompressedWriter
	Loop    *aio.Loop // of the writer

	packers chan *qcow2.Packer // those that are not at work
}

// openCompression makes a disk, which is a qcow2 image, ready to be written in compressed clusters.
func openCompression(ctx context.Context, d *Disk) (*Compression, error) {
	n, ok := d.Node().(*qcow2.Node)
	if !ok {
		return nil, Wordedf("Compression not supported for this file format")
	}
	if n.Header().HasDataFile() {
		return nil, Wordedf(convertWriteText, 0, syscall.ENOTSUP)
	}
	c := &Compression{Type: n.Header().CompressionType, Cluster: 1 << n.Header().ClusterBits, Loop: d.face.Loop()}
	if err := c.preparePackers(); err != nil {
		return nil, err
	}
	return c, c.Loop.Call(ctx, func() (err error) {
		c.Writer, err = n.CompressedWriter(c.Loop)
		return err
	})
}

func (c *Compression) close() error {
	var err error
	for range cap(c.packers) {
		err = errors.Join(err, (<-c.packers).Close())
	}
	if c.Writer == nil {
		return err
	}
	return c.Loop.Call(context.Background(), c.Writer.Close)
}

// packed is one cluster, or one run of zeros, that is ready to be written.
type packed struct {
	off        int64
	n          int64 // bytes of the disk
	data       []byte
	compressed bool
	zero       bool
}

// packer compresses the clusters of batches. It belongs to one goroutine.
type packer struct {
	o      *Compression
	sparse bool   // zeros are not stored
	room   []byte // what the clusters of one batch become
	padded []byte // the last cluster of a disk, made whole
}

// preparePackers makes as many packers as can be at work at a time. Each has tables that fill the caches of a processor, so
// that one for each worker would be slower.
func (c *Compression) preparePackers() error {
	n := runtime.NumCPU()
	c.packers = make(chan *qcow2.Packer, n)
	for range n {
		p, err := qcow2.NewPacker(c.Type)
		if err != nil {
			return err
		}
		c.packers <- p
	}
	return nil
}

// pack compresses what a batch holds, whose data stand in buf one behind the other.
func (p *packer) pack(list []packed, b *batch, buf []byte) []packed {
	p.room = p.room[:0]
	engine := <-p.o.packers
	defer func() { p.o.packers <- engine }()
	for _, s := range b.spans {
		if s.kind == spanZero && p.sparse {
			list = append(list, packed{off: s.off, n: s.n, zero: true})
			continue
		}
		for done := int64(0); done < s.n; done += p.o.Cluster {
			n := min(p.o.Cluster, s.n-done)
			data := zeroPage[:n]
			if s.kind == spanData {
				data, buf = buf[:n], buf[n:]
			}
			one := p.cluster(engine, data)
			one.off, one.n = s.off+done, n
			list = append(list, one)
		}
	}
	return list
}

// cluster compresses one cluster. One that does not become smaller stays as it is.
func (p *packer) cluster(engine *qcow2.Packer, data []byte) packed {
	if p.sparse && allZero(data) {
		return packed{zero: true}
	}
	whole := data
	if int64(len(data)) < p.o.Cluster {
		p.padded = append(append(p.padded[:0], data...), make([]byte, p.o.Cluster-int64(len(data)))...)
		whole = p.padded
	}
	start := len(p.room)
	room, smaller := engine.Pack(p.room, whole)
	if !smaller {
		return packed{data: data}
	}
	p.room = room // which may be another one: what was packed before stays where it is
	return packed{data: room[start:], compressed: true}
}

// writePacked stores what the packer made of a batch.
func (w *convertWorker) writePacked(b *batch) error {
	small := w.packs.fill(w.packing)
	for _, one := range w.packing {
		var err error
		switch {
		case one.compressed:
		case !one.zero:
			err = w.room(func() { w.writes.write(one.data, one.off) })
		case !w.c.TargetZero:
			err = w.room(func() { w.writes.zero(one.off, one.n, true) })
		}
		if err != nil {
			return failedAt(convertWriteText, one.off, err)
		}
	}
	if small {
		w.packs.start(w.c.Compress)
	}
	w.writes.start(w.c.Target)
	b.pass()
	err := w.writes.wait()
	if small {
		if perr := w.packs.wait(); err == nil {
			err = perr
		}
	}
	if err != nil {
		return failedAt(convertWriteText, b.start, err)
	}
	return nil
}

// packTransfer is for compressed clusters what transfer is for requests.
type packTransfer struct {
	to     *Compression
	writes []qcow2.CompressedWrite
	left   int
	at     int64
	err    error
	post   func()
	done   chan struct{}
}

func newPackTransfer() *packTransfer {
	t := &packTransfer{done: make(chan struct{}, 1)}
	t.post = t.submit
	return t
}

// fill takes the compressed ones of a list, and tells whether there are any.
func (t *packTransfer) fill(list []packed) bool {
	t.writes, t.err = t.writes[:0], nil
	for _, one := range list {
		if !one.compressed {
			continue
		}
		off := one.off
		t.writes = append(t.writes, qcow2.CompressedWrite{Offset: off, Data: one.data, Done: func(err error) { t.complete(off, err) }})
	}
	t.left = len(t.writes)
	return t.left > 0
}

func (t *packTransfer) start(to *Compression) {
	t.to = to
	to.Loop.Post(t.post)
}

// submit and complete run on the loop.
func (t *packTransfer) submit() {
	for i := range t.writes {
		t.to.Writer.Submit(&t.writes[i])
	}
}

func (t *packTransfer) complete(off int64, err error) {
	if err != nil && (t.err == nil || off < t.at) {
		t.at, t.err = off, err
	}
	if t.left--; t.left == 0 {
		t.done <- struct{}{}
	}
}

func (t *packTransfer) wait() error {
	<-t.done
	if t.err != nil {
		return &transferError{off: t.at, err: t.err}
	}
	return nil
}
