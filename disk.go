// SPDX-License-Identifier: Apache-2.0

package sluice

import (
	"context"
	"fmt"
	"io"
	"math"
	"sync"
	"sync/atomic"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/daemon"
)

// Disk is an open disk. Its methods are safe for concurrent use. It implements [io.ReaderAt], [io.WriterAt] and
// [io.Closer].
type Disk struct {
	disk  *daemon.Disk
	own   *daemon.Loops // nil when the loops are the caller's
	info  Info
	turn  atomic.Uint32 // spreads requests over the loops
	calls sync.RWMutex  // held for reading by calls in progress, for writing by Close
	open  bool
}

// Info is what a disk says about itself. Sizes are bytes.
type Info struct {
	Path          string // empty for a disk in memory
	Size          int64
	ReadOnly      bool
	LogicalBlock  int    // smallest unit that a guest is told of; requests to a Disk need not keep to it
	PhysicalBlock int    // unit that the medium writes without reading
	OptimalIO     int    // preferred size and alignment of requests; 0: unknown
	WriteCache    bool   // a completed write may be lost when power fails, until Flush has returned
	CanDiscard    bool   // Discard gives space back; without it Discard answers ErrNotSupported
	Durability    string // one sentence: what Flush means here
	Engine        string // which engine serves the disk, and why
}

// Open opens the image or block device at path: raw, unless the options name another format. ctx bounds the opening, not the life of the disk.
func Open(ctx context.Context, path string, o *Options) (*Disk, error) {
	if o == nil {
		o = &Options{}
	}
	c, err := o.config()
	if err != nil {
		return nil, fmt.Errorf("open disk %s: %w", path, err)
	}
	c.Path = path
	return open(ctx, c, o.Loops)
}

// OpenMemory makes a disk of size bytes in memory. It reads as zeros at first, and is gone when it is closed. Of the
// options ReadOnly and Loops apply.
func OpenMemory(ctx context.Context, size int64, o *Options) (*Disk, error) {
	if o == nil {
		o = &Options{}
	}
	return open(ctx, daemon.DiskConfig{Driver: "mem", Size: size, ReadOnly: o.ReadOnly}, o.Loops)
}

func open(ctx context.Context, c daemon.DiskConfig, loops []*aio.Loop) (*Disk, error) {
	if err := validate(c); err != nil {
		return nil, err
	}
	d := &Disk{open: true}
	if len(loops) == 0 {
		own, err := daemon.StartLoops(ctx, nil)
		if err != nil {
			return nil, fmt.Errorf("open disk %s: %w", c.Name(), err)
		}
		d.own, loops = own, own.All()
	}
	disk, err := daemon.OpenDisk(ctx, &c, loops)
	if err != nil {
		d.stopLoops()
		return nil, openError(err)
	}
	d.disk = disk
	d.info = describe(&c, disk.Handle().Info())
	return d, nil
}

func describe(c *daemon.DiskConfig, i block.Info) Info {
	return Info{
		Path: c.Path, Size: i.Size, ReadOnly: i.ReadOnly, LogicalBlock: i.LogicalBlock, PhysicalBlock: i.PhysicalBlock, OptimalIO: i.OptimalIO,
		WriteCache: i.WriteCache, CanDiscard: i.Discard != block.None, Durability: i.Durability, Engine: i.Engine,
	}
}

// Info tells about the disk, as it was when it was opened.
func (d *Disk) Info() Info { return d.info }

// Size is the size of the disk in bytes.
func (d *Disk) Size() int64 { return d.info.Size }

// ReadAt fills p from offset off. Where p reaches beyond the end of the disk, it reads what there is and answers io.EOF.
func (d *Disk) ReadAt(p []byte, off int64) (int, error) {
	if off < 0 {
		return 0, fmt.Errorf("read %d bytes at %d: %w", len(p), off, ErrRange)
	}
	var eof error
	if left := max(0, d.info.Size-off); int64(len(p)) > left {
		p, eof = p[:left], io.EOF
	}
	if len(p) == 0 {
		return 0, d.closedOr(eof)
	}
	if err := d.do(aio.OpRead, off, int64(len(p)), p, 0); err != nil {
		return 0, err
	}
	return len(p), eof
}

// WriteAt writes p at offset off. A write that reaches beyond the end of the disk is refused whole: a disk does not grow.
func (d *Disk) WriteAt(p []byte, off int64) (int, error) {
	if err := d.do(aio.OpWrite, off, int64(len(p)), p, 0); err != nil {
		return 0, err
	}
	return len(p), nil
}

// Flush makes durable every write that returned before Flush was called.
func (d *Disk) Flush() error { return d.do(aio.OpFlush, 0, 0, nil, 0) }

// Discard tells that length bytes at offset off are of no more use, and gives their space back. What is read there
// afterwards is unspecified.
func (d *Disk) Discard(off, length int64) error {
	if !d.info.CanDiscard && !d.info.ReadOnly {
		return d.closedOr(fmt.Errorf("discard %d bytes at %d: %w", length, off, ErrNotSupported))
	}
	return d.do(aio.OpDiscard, off, length, nil, 0)
}

// WriteZeroes makes length bytes at offset off read as zeros. It gives their space back, where the disk can and
// [Options].KeepSpace does not forbid it.
func (d *Disk) WriteZeroes(off, length int64) error {
	return d.do(aio.OpWriteZeroes, off, length, nil, aio.FlagUnmap)
}

// do carries out one request and waits for it.
func (d *Disk) do(what aio.Op, off, length int64, p []byte, flags aio.Flags) error {
	d.calls.RLock()
	defer d.calls.RUnlock()
	switch {
	case !d.open:
		return ErrClosed
	case off < 0 || length < 0 || length > math.MaxInt64-off || off+length > d.info.Size:
		return fmt.Errorf("%s %d bytes at %d of a disk of %d: %w", what, length, off, d.info.Size, ErrRange)
	case d.info.ReadOnly && what != aio.OpRead && what != aio.OpFlush:
		return fmt.Errorf("%s %d bytes at %d: %w", what, length, off, ErrReadOnly)
	case length == 0 && what != aio.OpFlush:
		return nil
	}
	faces := d.disk.Faces()
	if err := run(faces[int(d.turn.Add(1))%len(faces)], what, off, length, p, flags); err != nil {
		return fmt.Errorf("%s %d bytes at %d: %w", what, length, off, err)
	}
	return nil
}

func (d *Disk) closedOr(err error) error {
	d.calls.RLock()
	defer d.calls.RUnlock()
	if !d.open {
		return ErrClosed
	}
	return err
}

// Close waits for the calls in progress, servers included, and closes the disk. It does not flush. Calls after it answer
// ErrClosed; a second Close does no harm.
func (d *Disk) Close() error {
	d.calls.Lock()
	defer d.calls.Unlock()
	if !d.open {
		return nil
	}
	d.open = false
	err := d.disk.Close(context.Background())
	d.stopLoops()
	return err
}

func (d *Disk) stopLoops() {
	if d.own != nil {
		d.own.Stop()
	}
}
