// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"bytes"
	"fmt"
	"io"

	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/zstd"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

const (
	// deflateWindow is the only window that the format allows: readers may keep no more of the past.
	deflateWindow = 1 << 12
	// zstdWindow bounds what a frame may ask of our memory. A cluster has 2 MiB at most; frames that were made as a stream
	// of unknown length may name more.
	zstdWindow = 8 << 20
)

// Unpacker takes compressed clusters apart. It is not safe for concurrent use; many may work side by side.
type Unpacker struct {
	src     bytes.Reader
	inflate io.ReadCloser
	zstd    *zstd.Decoder
}

// NewUnpacker makes one for the compression type of an image's header.
func NewUnpacker(kind uint8) (*Unpacker, error) {
	u := &Unpacker{}
	switch kind {
	case qcow2.CompressionZlib:
		u.inflate = flate.NewReader(&u.src)
		return u, nil
	case qcow2.CompressionZstd:
		d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(zstdWindow))
		u.zstd = d
		return u, err
	}
	return nil, fmt.Errorf("unpack clusters of compression type %d: %w", kind, block.ErrNotSupported)
}

// Unpack fills dst, which is one cluster, from src. What stands in src behind the end of the data is not looked at: the
// format rounds their length up to whole sectors.
func (u *Unpacker) Unpack(dst, src []byte) error {
	u.src.Reset(src)
	var from io.Reader
	var err error
	if u.zstd != nil {
		err = u.zstd.Reset(&u.src)
		from = u.zstd
	} else {
		err = u.inflate.(flate.Resetter).Reset(&u.src, nil)
		from = u.inflate
	}
	if err == nil {
		_, err = io.ReadFull(from, dst)
	}
	if err != nil {
		return block.Corruptf("compressed cluster: %v", err)
	}
	return nil
}

// Close gives back what the unpacker holds.
func (u *Unpacker) Close() {
	if u.zstd != nil {
		u.zstd.Close()
	}
}

// Packer compresses clusters. It is not safe for concurrent use; many may work side by side.
type Packer struct {
	out     bytes.Buffer
	deflate *flate.Writer
	zstd    *zstd.Encoder
}

// NewPacker makes one for the compression type of an image's header.
func NewPacker(kind uint8) (*Packer, error) {
	p := &Packer{}
	var err error
	switch kind {
	case qcow2.CompressionZlib:
		p.deflate, err = flate.NewWriterWindow(&p.out, deflateWindow)
	case qcow2.CompressionZstd:
		p.zstd, err = zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderCRC(false), zstd.WithEncoderLevel(zstd.SpeedFastest))
	default:
		err = fmt.Errorf("compress clusters with type %d: %w", kind, block.ErrNotSupported)
	}
	if err != nil {
		return nil, err
	}
	return p, nil
}

// Pack appends the compressed bytes of src, one cluster, to dst. It is false where that is not shorter than src: the cluster
// is then written as it is.
func (p *Packer) Pack(dst, src []byte) ([]byte, bool) {
	if p.zstd != nil {
		out := p.zstd.EncodeAll(src, dst)
		return out, len(out)-len(dst) < len(src)
	}
	p.out.Reset()
	p.deflate.Reset(&p.out)
	if _, err := p.deflate.Write(src); err != nil {
		return dst, false
	}
	if err := p.deflate.Close(); err != nil || p.out.Len() >= len(src) {
		return dst, false
	}
	return append(dst, p.out.Bytes()...), true
}

// Close gives back what the packer holds.
func (p *Packer) Close() error {
	if p.zstd != nil {
		return p.zstd.Close()
	}
	return nil
}
