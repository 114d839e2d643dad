// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"syscall"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
	"github.com/sluice-blk/sluice/internal/sys"
)

// serve carries out one request in the routine and answers it.
func (c *routine) serve(r *block.Request) {
	img := c.h.n.img
	r.ForgetTimes()
	var err error
	switch r.Op {
	case block.OpRead:
		t := img.Enter()
		c.mem = cursor{mem: r.Mem}
		err = c.joined(c.read(r.Offset, r.Length))
		img.Exit(t)
	case block.OpWrite:
		t := img.Enter()
		c.mem = cursor{mem: r.Mem}
		err = c.joined(c.write(r.Offset, r.Length))
		img.Exit(t)
	case block.OpWriteZeroes:
		err = c.zeroes(r.Offset, r.Length, r.Flags&block.FlagUnmap != 0)
	case block.OpDiscard:
		err = img.Discard(r.Offset, r.Length)
	case block.OpFlush:
		if !c.h.n.info.ReadOnly {
			err = img.Commit()
		}
	default:
		err = block.ErrNotSupported
	}
	c.mem = cursor{}
	c.h.loop.CompleteLater(r, err)
}

// joined waits for what was sent, whatever became of the rest, and gives the first failure.
func (c *routine) joined(err error) error {
	if sent := c.join(); err == nil {
		return sent
	}
	return err
}

// read fills the next n bytes of the job's memory with what the guest has at off. Transfers may still be under way when it
// returns: see join.
func (c *routine) read(off, n int64) error {
	for n > 0 && c.failed == nil {
		e, err := c.h.n.view.Map(off, n)
		if err != nil {
			return err
		}
		switch e.Kind {
		case metadata.Data:
			c.send(c.h.host, block.OpRead, 0, e.Host, e.Length)
		case metadata.Unallocated:
			err = c.readBehind(off, e.Length)
		case metadata.Compressed:
			err = c.readCompressed(e, off)
		default:
			err = c.mem.zero(e.Length)
		}
		if err != nil {
			return err
		}
		off, n = off+e.Length, n-e.Length
	}
	return nil
}

// readBehind reads what the image does not have: from the backing node as far as it goes, and zeros.
func (c *routine) readBehind(off, n int64) error {
	have := min(max(c.h.n.backingSize-off, 0), n)
	if have > 0 {
		c.send(c.h.backing, block.OpRead, 0, off, have)
	}
	if have == n {
		return nil
	}
	return c.mem.zero(n - have)
}

// write takes the next n bytes of the job's memory to where the guest has off. As with read, see join.
func (c *routine) write(off, n int64) error {
	for n > 0 && c.failed == nil {
		e, err := c.h.n.img.Map(off, n)
		if err != nil {
			return err
		}
		done := e.Length
		if e.Kind == metadata.Data && e.InPlace {
			c.send(c.h.host, block.OpWrite, 0, e.Host, e.Length)
		} else if done, err = c.writeNew(off, n); err != nil {
			return err
		}
		off, n = off+done, n-done
	}
	return nil
}

// writeNew writes a prefix of n bytes to clusters that have to be found first, and tells how many bytes that was.
func (c *routine) writeNew(off, n int64) (int64, error) {
	img, a := c.h.n.img, &c.alloc
	if err := img.BeginWrite(a, off, n); err != nil {
		return 0, err
	}
	if a.InPlace {
		// Somebody else made the cluster meanwhile.
		done := a.Length
		c.send(c.h.host, block.OpWrite, 0, a.Host, done)
		img.Link(a)
		return done, nil
	}
	if err := c.fillCluster(a); err != nil {
		img.Abort(a)
		return 0, err
	}
	done := a.Length
	img.Link(a)
	return done, nil
}

// fillCluster writes the job's bytes to new clusters, and around them what the guest had there before, as one request.
func (c *routine) fillCluster(a *metadata.Allocation) error {
	// What was sent before belongs to other clusters, and its failure must not be taken for one of this allocation.
	if err := c.join(); err != nil {
		return err
	}
	from, to := a.Host, a.Host+a.Length
	c.head, c.tail = c.head[:0], c.tail[:0]
	if a.Head+a.Tail > 0 {
		room, plain, err := c.around(a)
		if room != nil {
			defer c.h.rooms.give(room)
		}
		if err != nil {
			return err
		}
		if plain && a.Fresh {
			c.head, c.tail = c.head[:0], c.tail[:0]
		} else {
			from, to = from-a.Head, to+a.Tail
		}
	}
	if c.h.host == c.h.meta && to > c.h.n.limit {
		return syscall.ENOSPC // a device, which ends
	}
	p := c.freePart()
	p.iov = append(p.iov[:0], c.head...)
	p.iov = c.mem.take(p.iov, a.Length)
	p.iov = append(p.iov, c.tail...)
	c.submit(p, c.h.host, block.OpWrite, 0, from, to-from)
	return c.join()
}

// around makes head and tail what stands before and behind a write in its clusters. plain tells that it is all zeros; else
// the room that it stands in is the caller's to give back.
func (c *routine) around(a *metadata.Allocation) (r *room, plain bool, err error) {
	before, after := a.Offset-a.Head, a.Offset+a.Length
	headPlain, err := c.isZero(before, a.Head)
	if err != nil {
		return nil, false, err
	}
	tailPlain, err := c.isZero(after, a.Tail)
	if err != nil {
		return nil, false, err
	}
	if !headPlain || !tailPlain {
		r = c.h.rooms.take()
	}
	guest := c.mem
	if c.head = c.fill(c.head, a.Head, headPlain, r.first()); !headPlain {
		err = c.fetch(c.head, before, a.Head)
	}
	if c.tail = c.fill(c.tail, a.Tail, tailPlain, r.second()); !tailPlain && err == nil {
		err = c.fetch(c.tail, after, a.Tail)
	}
	err = c.joined(err)
	c.mem = guest
	return r, r == nil, err
}

// fill appends n bytes of memory to dst: the image's zeros, or room.
func (c *routine) fill(dst []block.IOVec, n int64, plain bool, room []byte) []block.IOVec {
	if !plain {
		return append(dst, sys.IOVecOf(room[:n]))
	}
	for zeros := c.h.n.zeros; n > 0; n -= int64(len(zeros)) {
		dst = append(dst, sys.IOVecOf(zeros[:min(n, int64(len(zeros)))]))
	}
	return dst
}

// fetch begins to read n bytes of what the guest has at off. Behind the end of the disk there are zeros.
func (c *routine) fetch(to []block.IOVec, off, n int64) error {
	have := min(max(c.h.n.info.Size-off, 0), n)
	c.mem = cursor{mem: to}
	if err := c.read(off, have); err != nil {
		return err
	}
	return c.mem.zero(n - have)
}

// isZero tells whether the tables say that n bytes at off are zeros.
func (c *routine) isZero(off, n int64) (bool, error) {
	n = min(n, max(c.h.n.info.Size-off, 0))
	for n > 0 {
		e, err := c.h.n.img.Map(off, n)
		if err != nil {
			return false, err
		}
		switch {
		case e.Kind == metadata.Zero || e.Kind == metadata.ZeroAllocated:
		case e.Kind == metadata.Unallocated && off >= c.h.n.backingSize:
		default:
			return false, nil
		}
		off, n = off+e.Length, n-e.Length
	}
	return true, nil
}

// zeroes makes n bytes at off read as zeros: by the tables where these can say so, else by writing zeros.
func (c *routine) zeroes(off, n int64, unmap bool) error {
	img := c.h.n.img
	unit := img.ZeroUnit()
	for n > 0 {
		done, err := img.Zero(off, n, unmap)
		if err != nil {
			return err
		}
		if done == 0 {
			done = min(n, unit-off&(unit-1))
			zero, err := c.isZero(off, done)
			if err == nil && !zero {
				err = c.writeZeros(off, done)
			}
			if err != nil {
				return err
			}
		}
		off, n = off+done, n-done
	}
	return nil
}

// writeZeros writes at most a cluster of zeros.
func (c *routine) writeZeros(off, n int64) error {
	img := c.h.n.img
	t := img.Enter()
	defer img.Exit(t)
	for n > 0 {
		k := min(n, int64(len(c.h.n.zeros)))
		c.zero[0] = sys.IOVecOf(c.h.n.zeros[:k])
		c.mem = cursor{mem: c.zero[:]}
		if err := c.joined(c.write(off, k)); err != nil {
			return err
		}
		off, n = off+k, n-k
	}
	return nil
}
