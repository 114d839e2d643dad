// SPDX-License-Identifier: Apache-2.0

// Package file is the node at the bottom of most graphs: a regular file or a block device of the host.
//
// It finds out what the file can do (direct I/O and its alignment, holes, discard, zeroes), locks the image as QEMU
// does, so that neither two of us nor QEMU and we write to one image, and hands requests to the engine that the loop
// chooses. Open, Close and Extents are control plane, and safe for concurrent use. A queue belongs to its loop.
//
// # Size
//
// A disk is made of sectors of 512 bytes. A regular file whose length is no multiple of that is shown with its last
// sector whole: what lies beyond the end of the file reads as zeros, and a write to it makes the file longer, to the
// end of that sector at most. FileSize tells the exact length. Nothing else changes the length of the file, unless it was opened as one
// that grows, for an image format to stand on.
//
// # What it does not do
//
// It checks no bounds, does not notice that somebody else changes the size, and opens no path but the one given.
package file

import (
	"errors"
	"fmt"
	"sync"
	"syscall"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/sys"
)

// sector is the unit that a disk's size is told in.
const sector = 512

// Options say which file is opened and how. All but Path may be left out.
type Options struct {
	Path     string
	ReadOnly bool
	// Cache is what stands between a write and the medium. CacheDefault takes O_DIRECT where the file allows it, else
	// the page cache, and Info says why. CacheNone fails where the file refuses O_DIRECT.
	Cache block.CacheMode
	// Engine is asked of each loop; EngineAuto lets the loop choose.
	Engine aio.EngineKind
	// IgnoreDiscard does not offer discard, and keeps the space when zeroes are written.
	IgnoreDiscard bool
	// Lock takes QEMU's image locks: as the only writer, or as a reader that keeps writers away.
	Lock bool
	// LockShared looks on without any lock, also while somebody writes. It needs ReadOnly.
	LockShared bool
	// Growable opens a file for an image format to stand on: it has no size, reads as zeros beyond its end, and grows as it is
	// written. Info.Size is block.Unbounded, and Length tells the length. It is for regular files; a block device ends where
	// it ends.
	Growable bool
}

// Node is an open file. It implements block.Node.
type Node struct {
	fd       int
	o        Options
	info     block.Info
	fileSize int64
	isBlock  bool
	direct   bool

	mu     sync.Mutex
	engine string // what the first loop chose, and why
	closed bool
}

// Open opens a file. The caller has decided that the path may be opened at all.
func Open(o Options) (*Node, error) {
	if o.LockShared && !o.ReadOnly {
		return nil, fmt.Errorf("open %q: looking on without a lock is for read-only use (set readonly)", o.Path)
	}
	n := &Node{o: o, fd: -1}
	if err := n.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("open %q: %w", o.Path, err), n.Close())
	}
	return n, nil
}

func (n *Node) open() error {
	f, err := openFile(n.o)
	if err != nil {
		return err
	}
	n.fd, n.isBlock, n.direct, n.fileSize = f.fd, f.isBlock, f.direct, f.size
	if n.o.Lock && !n.o.LockShared {
		if err := LockImage(n.fd, n.o.ReadOnly); err != nil {
			return err
		}
	}
	n.info = n.describe(f)
	n.engine = "not chosen yet: the first loop that opens it does (" + n.o.Engine.String() + ")"
	return nil
}

// Info implements block.Node. Engine tells the loop's choice once a queue has been opened.
func (n *Node) Info() block.Info {
	n.mu.Lock()
	defer n.mu.Unlock()
	i := n.info
	i.Engine = n.engine + "; " + n.info.Engine
	return i
}

// FileSize is the exact length of the file, or the size of the device, as it was when the node was opened.
func (n *Node) FileSize() int64 { return n.fileSize }

// Length implements block.Growable: what the file system says now. A block device does not change.
func (n *Node) Length() (int64, error) {
	if n.isBlock {
		return n.fileSize, nil
	}
	var st sys.Stat_t
	if err := sys.Fstat(n.fd, &st); err != nil {
		return 0, fmt.Errorf("ask for the length of %q: %w", n.o.Path, err)
	}
	return st.Size, nil
}

// Truncate implements block.Growable.
func (n *Node) Truncate(length int64) error {
	err := error(syscall.EINVAL)
	if n.o.Growable && !n.o.ReadOnly && !n.isBlock {
		err = sys.Ftruncate(n.fd, length)
	}
	if err != nil {
		return fmt.Errorf("set the length of %q to %d: %w", n.o.Path, length, err)
	}
	return nil
}

// Direct tells whether the page cache is passed by.
func (n *Node) Direct() bool { return n.direct }

// Close closes the file and so gives up its locks. A second Close does no harm.
func (n *Node) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed || n.fd < 0 {
		return nil
	}
	n.closed = true
	if err := sys.Close(n.fd); err != nil {
		return fmt.Errorf("close %q: %w", n.o.Path, err)
	}
	return nil
}

// describe says in block's words what was found.
func (n *Node) describe(f *opened) block.Info {
	i := block.Info{
		Name:          n.o.Path,
		Size:          (f.size + sector - 1) / sector * sector,
		ReadOnly:      n.o.ReadOnly,
		Align:         f.align,
		MemAlign:      f.memAlign,
		OptimalIO:     f.optimal,
		LogicalBlock:  f.logical,
		PhysicalBlock: max(f.physical, f.logical),
		Flush:         block.Native,
		FUA:           block.Native,
		WriteZeroes:   block.Native,
		WriteCache:    true,
		Engine:        f.reason,
	}
	if !n.o.ReadOnly && !n.o.IgnoreDiscard && f.discard {
		i.Discard = block.Native
		i.DiscardAlign, i.MaxDiscard = f.discardAlign, f.discardMax
	}
	if n.o.ReadOnly {
		i.WriteZeroes = block.None
	}
	if f.isBlock {
		i.SpaceAlign = int64(f.logical) // also where the page cache takes data of any alignment
	}
	if n.o.Growable && !f.isBlock {
		i.Size = block.Unbounded
	}
	switch n.o.Cache {
	case block.CacheUnsafe:
		i.WriteCache = true
		i.Durability = "unsafe: flush and FUA do nothing, a crash of the host may lose any write"
	case block.CacheWritethrough:
		i.WriteCache = false
		i.Durability = "write-through: each write is durable when it completes (RWF_DSYNC), flush is fdatasync"
	default:
		i.Durability = "flush is fdatasync and covers every write completed before it, FUA is RWF_DSYNC on the one write"
	}
	return i
}

// Queue implements block.Node. Must be called on the loop.
func (n *Node) Queue(l *aio.Loop) (block.Queue, error) {
	f, err := l.OpenFile(n.fd, &aio.FileOptions{Engine: n.o.Engine, ReadOnly: n.o.ReadOnly, Direct: n.direct, Name: n.o.Path})
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	n.engine = f.Reason()
	n.mu.Unlock()
	q := &queue{n: n, loop: l, file: f}
	q.through = n.o.Cache == block.CacheWritethrough
	q.unsafe = n.o.Cache == block.CacheUnsafe
	q.keepSpace = n.o.IgnoreDiscard
	return q, nil
}

// queue is the file on one loop's engine. It changes flags on the way down and nothing on the way up.
type queue struct {
	n         *Node
	loop      *aio.Loop
	file      *aio.File
	through   bool
	unsafe    bool
	keepSpace bool
}

// Submit implements block.Queue.
func (q *queue) Submit(r *block.Request) {
	switch r.Op {
	case block.OpRead:
		// The last sector may reach beyond the end of the file.
		r.Flags |= block.FlagZeroEOF
	case block.OpFlush:
		if q.unsafe {
			q.loop.CompleteLater(r, nil)
			return
		}
	case block.OpWrite, block.OpWriteZeroes:
		q.adapt(r)
	}
	q.file.Submit(r)
}

// adapt sets what the cache mode asks of a write.
func (q *queue) adapt(r *block.Request) {
	switch {
	case q.unsafe:
		r.Flags &^= block.FlagFUA
	case q.through:
		r.Flags |= block.FlagFUA
	}
	if q.keepSpace {
		r.Flags &^= block.FlagUnmap
	}
}

// Close implements block.Queue.
func (q *queue) Close() error { return q.file.Close() }

// errnoIs tells whether err carries one of the errnos.
func errnoIs(err error, errnos ...syscall.Errno) bool {
	for _, e := range errnos {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
