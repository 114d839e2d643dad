// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"errors"
	"fmt"

	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/zstd"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// ClusterWriter takes clusters that have been compressed. Safe for concurrent use.
type ClusterWriter interface {
	// WriteCompressed stores p, which is shorter than a cluster, as what the cluster at off holds.
	WriteCompressed(ctx context.Context, off int64, p []byte) error
}

// Compression is how a target is compressed.
type Compression struct {
	Type    uint8 // qcow2.CompressionZlib or CompressionZstd
	Cluster int64 // bytes
	Writer  ClusterWriter
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
	o       *Compression
	room    []byte // what the clusters of one batch become
	padded  []byte // the last cluster of a disk, made whole
	deflate *flate.Writer
	zstd    *zstd.Encoder
}

// deflateWindow is what readers of the format expect at most.
const deflateWindow = 4096

func (o *Compression) newPacker() (*packer, error) {
	p := &packer{o: o}
	var err error
	switch o.Type {
	case qcow2.CompressionZlib:
		p.deflate, err = flate.NewWriterWindow(nil, deflateWindow)
	case qcow2.CompressionZstd:
		p.zstd, err = zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false), zstd.WithSingleSegment(true))
	default:
		err = fmt.Errorf("compression type %d is not known", o.Type)
	}
	return p, err
}

// pack compresses what a batch holds, whose data stand in buf one behind the other.
func (p *packer) pack(list []packed, b *batch, buf []byte) ([]packed, error) {
	if need := int(b.bytes + p.o.Cluster); len(p.room) < need {
		p.room = make([]byte, need)
	}
	room := p.room
	for _, s := range b.spans {
		if s.kind == spanZero {
			list = append(list, packed{off: s.off, n: s.n, zero: true})
			continue
		}
		for done := int64(0); done < s.n; done += p.o.Cluster {
			n := min(p.o.Cluster, s.n-done)
			one, err := p.cluster(buf[done:done+n], room)
			if err != nil {
				return nil, err
			}
			one.off, one.n = s.off+done, n
			if one.compressed {
				room = room[len(one.data):]
			}
			list = append(list, one)
		}
		buf = buf[s.n:]
	}
	return list, nil
}

// cluster compresses one cluster into room. One that does not become smaller stays as it is.
func (p *packer) cluster(data, room []byte) (packed, error) {
	if allZero(data) {
		return packed{zero: true}, nil
	}
	whole := data
	if int64(len(data)) < p.o.Cluster {
		p.padded = append(p.padded[:0], data...)
		p.padded = append(p.padded, make([]byte, p.o.Cluster-int64(len(data)))...)
		whole = p.padded
	}
	small, err := p.compress(whole, room[:p.o.Cluster-1])
	switch {
	case err != nil:
		return packed{}, err
	case small == nil:
		return packed{data: data}, nil
	}
	return packed{data: small, compressed: true}, nil
}

// compress answers nil when room is too small.
func (p *packer) compress(data, room []byte) ([]byte, error) {
	if p.zstd != nil {
		if out := p.zstd.EncodeAll(data, room[:0]); len(out) <= len(room) {
			return out, nil
		}
		return nil, nil
	}
	w := &boundedWriter{room: room}
	p.deflate.Reset(w)
	_, err := p.deflate.Write(data)
	if err == nil {
		err = p.deflate.Close()
	}
	if errors.Is(err, errNoRoom) {
		return nil, nil
	}
	return room[:w.n], err
}

var errNoRoom = errors.New("no room")

// boundedWriter writes to room until that is full.
type boundedWriter struct {
	room []byte
	n    int
}

func (w *boundedWriter) Write(p []byte) (int, error) {
	n := copy(w.room[w.n:], p)
	w.n += n
	if n < len(p) {
		return n, errNoRoom
	}
	return n, nil
}

// writePacked stores what the packer made of a batch.
func (w *convertWorker) writePacked(ctx context.Context, b *batch) error {
	for _, one := range w.packing {
		var err error
		switch {
		case one.compressed:
			err = w.c.Compress.Writer.WriteCompressed(ctx, one.off, one.data)
		case !one.zero:
			err = w.room(func() { w.writes.write(one.data, one.off) })
		case !w.c.TargetZero:
			err = w.room(func() { w.writes.zero(one.off, one.n, true) })
		}
		if err != nil {
			return failedAt(convertWriteText, one.off, err)
		}
	}
	w.writes.start(w.c.Target)
	b.pass()
	if err := w.writes.wait(); err != nil {
		return failedAt(convertWriteText, b.start, err)
	}
	return nil
}
