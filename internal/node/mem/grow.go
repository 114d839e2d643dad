// SPDX-License-Identifier: Apache-2.0

package mem

import (
	"context"
	"fmt"
	"io"
	"syscall"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/sys"
)

// Length implements block.Growable. A disk that does not grow is as long as it is large.
func (n *Node) Length() (int64, error) {
	if !n.o.Growable {
		return n.o.Size, nil
	}
	return n.length.Load(), nil
}

// Truncate implements block.Growable.
func (n *Node) Truncate(length int64) error {
	if !n.o.Growable || n.o.ReadOnly || length < 0 {
		return fmt.Errorf("set the length of a disk in memory to %d: %w", length, syscall.EINVAL)
	}
	if length > n.o.Size {
		return fmt.Errorf("set the length of a disk in memory to %d: it holds %d: %w", length, n.o.Size, syscall.ENOSPC)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if old := n.length.Swap(length); old > length {
		if n.journal != nil {
			n.journal.note(length, make([]byte, old-length), false)
		}
		return n.zero(n.data[length:old], true)
	}
	return nil
}

// grow makes the disk long enough to end at end.
func (n *Node) grow(end int64) {
	for {
		old := n.length.Load()
		if end <= old || n.length.CompareAndSwap(old, end) {
			return
		}
	}
}

// beyond is what becomes of a request that reaches further than the disk can grow: reads find zeros, and there is nothing to
// discard.
func (n *Node) beyond(r *block.Request) error {
	switch r.Op {
	case block.OpWrite:
		return syscall.ENOSPC
	case block.OpRead:
		at := r.Offset
		for _, v := range r.Mem {
			part := v.Bytes()
			have := min(max(n.o.Size-at, 0), int64(len(part)))
			err := sys.Guarded(func() {
				if have > 0 {
					copy(part, n.data[at:at+have])
				}
				clear(part[have:])
			})
			if err != nil {
				return err
			}
			at += int64(v.Len)
		}
		return nil
	}
	if r.Offset >= n.o.Size {
		return nil
	}
	return n.zero(n.data[r.Offset:], r.Op == block.OpDiscard || r.Flags&block.FlagUnmap != 0)
}

// mapPiece is the grain in which Map looks for zeros.
const mapPiece = 64 << 10

// Map implements block.Mapper. Memory does not tell what was written to it, so what is zeros counts as not stored.
func (n *Node) Map(ctx context.Context, off, length int64, each func(block.Extent) error) error {
	kind := func(at int64) (zero bool, end int64) {
		end = min(at&^(mapPiece-1)+mapPiece, off+length)
		return at >= n.o.Size || allZero(n.data[at:min(end, n.o.Size)]), end
	}
	for at := off; at < off+length; {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		zero, end := kind(at)
		for end < off+length && end < n.o.Size {
			same, further := kind(end)
			if same != zero {
				break
			}
			end = further
		}
		if zero && end >= n.o.Size {
			end = off + length
		}
		e := block.Extent{Offset: at, Length: end - at, Data: !zero, Zero: zero, Present: true, Host: at, File: "mem"}
		if err := each(e); err != nil {
			return err
		}
		at = end
	}
	return nil
}

// ReadAt implements io.ReaderAt, past whatever loops do at the same time: for whoever wants to keep what is stored. Control
// plane; safe for concurrent use.
func (n *Node) ReadAt(p []byte, off int64) (int, error) {
	length, err := n.Length()
	if err != nil {
		return 0, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed || off < 0 || off >= length {
		return 0, io.EOF
	}
	got := copy(p, n.data[off:length])
	if got < len(p) {
		return got, io.EOF
	}
	return got, nil
}

// WriteAt implements io.WriterAt for a growable disk, past whatever loops do at the same time: for whoever wants to fill it
// first. A journal does not see it, and takes it as flushed. Control plane; safe for concurrent use.
func (n *Node) WriteAt(p []byte, off int64) (int, error) {
	if !n.o.Growable || off < 0 || off > n.o.Size || int64(len(p)) > n.o.Size-off {
		return 0, fmt.Errorf("write %d bytes at %d of a disk in memory: %w", len(p), off, syscall.EINVAL)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	copy(n.data[off:], p)
	if n.journal != nil {
		copy(n.journal.base[off:], p)
	}
	n.grow(off + int64(len(p)))
	return len(p), nil
}
