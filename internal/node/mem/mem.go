// SPDX-License-Identifier: Apache-2.0

// Package mem is a disk in memory: sparse, given back by discard, gone with the process.
//
// With a journal it also remembers what was not flushed, and can make a clone of itself as the disk would be after a
// crash; tests use that to prove that what was acknowledged before a flush is there afterwards.
//
// The memory is one mapping that all loops share. Two requests that touch the same bytes at the same time get what two
// such requests get on a disk: some order of single bytes. New, Info, Close and CrashClone are control plane and safe
// for concurrent use; a queue belongs to its loop. With a journal each write takes a mutex: it is no node to measure.
package mem

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/sys"
)

// Options describe the disk.
type Options struct {
	Size     int64 // bytes; memory is taken only for what is written
	ReadOnly bool
	// Journal remembers unflushed writes for CrashClone, and so makes the disk one with a volatile write cache.
	Journal bool
	// Growable makes a disk for an image format to stand on: one without a size, whose length is up to the last byte that was
	// written. Size is then how much it can hold at most: a write beyond is ENOSPC.
	Growable bool
}

// Node implements block.Node.
type Node struct {
	o    Options
	data []byte // len is o.Size; nil for a size of 0

	length atomic.Int64 // of a growable disk

	mu      sync.Mutex
	journal *journal // nil without one
	closed  bool
}

// New makes a disk that reads as zeros.
func New(o Options) (*Node, error) {
	if o.Size < 0 {
		return nil, fmt.Errorf("make a disk in memory: size %d is negative: %w", o.Size, syscall.EINVAL)
	}
	n := &Node{o: o}
	var err error
	if n.data, err = mapSparse(o.Size); err != nil {
		return nil, err
	}
	if o.Journal {
		if n.journal, err = newJournal(o.Size); err != nil {
			return nil, fmt.Errorf("%w, and unmap: %v", err, unmap(n.data))
		}
	}
	return n, nil
}

func mapSparse(size int64) ([]byte, error) {
	if size == 0 {
		return nil, nil
	}
	if int64(int(size)) != size {
		return nil, fmt.Errorf("make a disk in memory: %d bytes: %w", size, syscall.EFBIG)
	}
	b, err := sys.Mmap(-1, 0, int(size), sys.PROT_READ|sys.PROT_WRITE, sys.MAP_PRIVATE|sys.MAP_ANONYMOUS|sys.MAP_NORESERVE)
	if err != nil {
		return nil, fmt.Errorf("make a disk in memory: map %d bytes: %w", size, err)
	}
	return b, nil
}

func unmap(b []byte) error {
	if b == nil {
		return nil
	}
	return sys.Munmap(b)
}

// spanMax is how much is discarded or zeroed at a time: the loop does it itself, and others wait meanwhile.
const spanMax = 1 << 20

// Info implements block.Node.
func (n *Node) Info() block.Info {
	i := block.Info{
		Name:           "mem",
		Size:           n.o.Size,
		ReadOnly:       n.o.ReadOnly,
		Align:          1,
		MemAlign:       1,
		OptimalIO:      sys.PageSize(),
		LogicalBlock:   512,
		PhysicalBlock:  sys.PageSize(),
		DiscardAlign:   int64(sys.PageSize()),
		Flush:          block.Native,
		FUA:            block.Native,
		Discard:        block.Native,
		WriteZeroes:    block.Native,
		MaxDiscard:     spanMax,
		MaxWriteZeroes: spanMax,
		WriteCache:     n.o.Journal,
		Durability:     "contents are lost with the process; flush and FUA do nothing",
		Engine:         "none: requests are copied on the loop",
	}
	if n.o.Journal {
		i.Durability = "contents are lost with the process; a crash clone has what was flushed or written with FUA"
	}
	if n.o.ReadOnly {
		i.Discard, i.WriteZeroes = block.None, block.None
	}
	if n.o.Growable {
		i.Size = block.Unbounded
	}
	return i
}

// Queue implements block.Node. Must be called on the loop.
func (n *Node) Queue(l *aio.Loop) (block.Queue, error) { return &queue{n: n, loop: l}, nil }

// Close gives the memory back. A second Close does no harm.
func (n *Node) Close() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return nil
	}
	n.closed = true
	if n.journal != nil {
		if err := unmap(n.journal.base); err != nil {
			return fmt.Errorf("close disk in memory: %w", err)
		}
	}
	if err := unmap(n.data); err != nil {
		return fmt.Errorf("close disk in memory: %w", err)
	}
	n.data = nil
	return nil
}

type queue struct {
	n    *Node
	loop *aio.Loop
}

// Submit implements block.Queue. The work is done here, and told in the turn's dispatch.
func (q *queue) Submit(r *block.Request) {
	q.loop.CompleteLater(r, q.n.do(r))
}

// Close implements block.Queue.
func (q *queue) Close() error { return nil }

func (n *Node) do(r *block.Request) error {
	if n.journal != nil && r.Op != block.OpRead {
		n.mu.Lock()
		defer n.mu.Unlock()
	}
	var err error
	if n.o.Growable && r.Op != block.OpFlush && r.Length > 0 && (r.Offset > n.o.Size || r.Length > n.o.Size-r.Offset) {
		return n.beyond(r)
	}
	switch r.Op {
	case block.OpRead:
		return n.read(r)
	case block.OpWrite:
		err = n.write(r)
		if n.o.Growable && err == nil {
			n.grow(r.Offset + r.Length)
		}
	case block.OpDiscard, block.OpWriteZeroes:
		err = n.zero(n.data[r.Offset:r.Offset+r.Length], r.Op == block.OpDiscard || r.Flags&block.FlagUnmap != 0)
	case block.OpFlush:
		if n.journal != nil {
			n.journal.flush()
		}
		return nil
	default:
		return block.ErrNotSupported
	}
	if n.journal != nil && err == nil {
		n.journal.note(r.Offset, n.data[r.Offset:r.Offset+r.Length], r.Flags&block.FlagFUA != 0)
	}
	return err
}

func (n *Node) read(r *block.Request) error {
	at := r.Offset
	for _, v := range r.Mem {
		if err := sys.CopyGuarded(v.Bytes(), n.data[at:at+int64(v.Len)]); err != nil {
			return err
		}
		at += int64(v.Len)
	}
	return nil
}

func (n *Node) write(r *block.Request) error {
	at := r.Offset
	for _, v := range r.Mem {
		if err := sys.CopyGuarded(n.data[at:at+int64(v.Len)], v.Bytes()); err != nil {
			return err
		}
		at += int64(v.Len)
	}
	return nil
}

// zero makes b read as zeros, and gives whole pages back when it may. b is a part of the node's mapping.
func (n *Node) zero(b []byte, giveBack bool) error {
	if !giveBack {
		clear(b)
		return nil
	}
	page := int64(sys.PageSize())
	start := int64(cap(n.data)) - int64(cap(b)) // where b stands in the mapping, which begins on a page
	head := min(-start&(page-1), int64(len(b)))
	whole := (int64(len(b)) - head) &^ (page - 1)
	clear(b[:head])
	clear(b[head+whole:])
	if whole == 0 {
		return nil
	}
	return sys.Madvise(b[head:head+whole], sys.MADV_DONTNEED)
}
