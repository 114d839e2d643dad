// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/invariant"
)

// FileOptions say how a file is opened on a loop. The zero value asks the file.
type FileOptions struct {
	// Engine is the engine to use; EngineAuto lets the loop choose, see OpenFile.
	Engine EngineKind
	// ReadOnly refuses writes, discards and writes of zeroes with EROFS, whatever the descriptor allows.
	ReadOnly bool
	// Direct says that the descriptor bypasses the page cache. It is taken from the descriptor's flags where it is false.
	Direct bool
	// Name stands in error texts; the number of the descriptor when empty.
	Name string
}

// File is an open file on one loop's engine. All its methods must be called on the loop.
type File struct {
	loop   *Loop
	engine engine
	fd     int
	name   string
	reason string

	readOnly bool
	direct   bool // O_DIRECT
	block    bool // a block device
	inMemory bool // reads and writes are done within their submission
	noDSYNC  bool // it answered RWF_DSYNC with EOPNOTSUPP: durable writes are followed by fdatasync
	noFDSYNC bool // it answered IOCB_CMD_FDSYNC with EINVAL: the threads do it

	pending int // submitted and not completed
	closed  bool
}

// OpenFile makes the file behind fd known to the loop and chooses the engine that carries its requests.
//
// The choice of EngineAuto: where the file cannot say that it would block (RWF_NOWAIT answers EOPNOTSUPP) io_uring would
// hand each request to a kernel worker, so files in memory and direct ones go to linux-aio and others to the threads.
// Else io_uring serves what it can, when it is the loop's poller; without it linux-aio serves direct files, and the
// threads buffered ones, because there io_submit would do the I/O itself and hold up the loop. When the best engine
// cannot be set up the next one serves; [File.Reason] tells why. An engine that was asked for by name is used or is an
// error, which names the cause and the remedy.
//
// The descriptor is borrowed until Close, and stays the caller's to close after it. Must be called on the loop.
func (l *Loop) OpenFile(fd int, o *FileOptions) (*File, error) {
	if o == nil {
		o = &FileOptions{}
	}
	f := &File{loop: l, fd: fd, name: o.Name, readOnly: o.ReadOnly, direct: o.Direct}
	if f.name == "" {
		f.name = fmt.Sprintf("descriptor %d", fd)
	}
	traits, err := askFile(fd, o.Direct)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", f.name, err)
	}
	f.direct, f.block, f.inMemory = traits.direct, traits.block, traits.inMemory
	if err := f.chooseEngine(o.Engine, traits); err != nil {
		return nil, fmt.Errorf("open %s: %w", f.name, err)
	}
	return f, nil
}

// Submit takes a request. Its outcome comes through r.Done, later and never inside Submit. Must be called on the loop.
//
// Requests may complete in any order; a flush covers the writes that completed before it was submitted. Reads and
// writes of any length and of any number of segments are carried out whole: short transfers are continued. A request
// of no bytes, other than a flush, completes without asking the kernel.
func (f *File) Submit(r *Request) {
	if invariant.Enabled {
		f.check(r)
	}
	r.file, r.moved, r.res, r.stage, r.tries = f, 0, 0, stageFirst, 0
	r.times = times{queued: f.loop.stamp}
	f.pending++
	switch {
	case f.closed:
		f.loop.conclude(f.engine.counters(), r, syscall.EBADF)
	case r.Op > OpWriteZeroes:
		f.loop.conclude(f.engine.counters(), r, syscall.EOPNOTSUPP)
	case f.readOnly && r.Op != OpRead && r.Op != OpFlush:
		f.loop.conclude(f.engine.counters(), r, syscall.EROFS)
	case r.Length == 0 && r.Op != OpFlush:
		f.loop.conclude(f.engine.counters(), r, nil)
	default:
		f.engine.enqueue(r)
		if !f.loop.plugged() {
			f.engine.flush()
		}
	}
}

func (f *File) check(r *Request) {
	invariant.Assert(r.file == nil, "request submitted while it is in flight")
	invariant.Assert(r.Done != nil, "request without a completer")
	if r.Op == OpRead || r.Op == OpWrite {
		var sum int64
		for _, v := range r.Mem {
			sum += int64(v.Len)
		}
		invariant.Assert(sum == r.Length, "length of a request differs from the sum of its segments")
	}
}

// Close makes the loop forget the file. With requests in flight it does nothing and answers EBUSY: whoever closes
// drains first. A second Close does no harm. Must be called on the loop.
func (f *File) Close() error {
	switch {
	case f.closed:
		return nil
	case f.pending > 0:
		return fmt.Errorf("close %s: %d requests in flight: %w (wait for their completion first)", f.name, f.pending, syscall.EBUSY)
	}
	f.closed = true
	f.engine.detach(f)
	return nil
}

// Engine is the kind of engine that carries the file's requests. Must be called on the loop.
func (f *File) Engine() EngineKind { return f.engine.kind() }

// Reason tells in words why that engine was chosen, and where it applies, why not a better one.
// Must be called on the loop.
func (f *File) Reason() string { return f.reason }

// Fd is the descriptor. Must be called on the loop.
func (f *File) Fd() int { return f.fd }
