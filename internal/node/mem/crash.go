// SPDX-License-Identifier: Apache-2.0

package mem

import (
	"fmt"
	"syscall"
)

// sector is what a disk writes whole or not at all.
const sector = 512

// journal remembers what a crash would find: the durable contents, and all later writes in their order.
type journal struct {
	base  []byte
	notes []note
}

// note is one write. A durable one (FUA) survives for sure, and comes after what was written to its place before.
type note struct {
	offset  int64
	data    []byte
	durable bool
}

func newJournal(size int64) (*journal, error) {
	base, err := mapSparse(size)
	if err != nil {
		return nil, err
	}
	return &journal{base: base}, nil
}

func (j *journal) note(offset int64, data []byte, durable bool) {
	j.notes = append(j.notes, note{offset, append([]byte(nil), data...), durable})
}

// flush makes all that was noted durable. Each write is done when it is submitted, so this covers at least those that
// completed before.
func (j *journal) flush() {
	for _, w := range j.notes {
		copy(j.base[w.offset:], w.data)
	}
	j.notes = j.notes[:0]
}

// CrashClone makes a disk as it would be after the power failed now: everything that was flushed or written with FUA,
// and of the rest those sectors that survive picks. It is asked for each sector of each unflushed write, in the order of
// the writes, so that a write may also be torn. The clone has a journal too. Control plane; safe for concurrent use.
func (n *Node) CrashClone(survives func(offset int64) bool) (*Node, error) {
	if n.journal == nil {
		return nil, fmt.Errorf("clone a disk in memory after a crash: %w (make it with Journal)", syscall.EINVAL)
	}
	c, err := New(n.o)
	if err != nil {
		return nil, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	copyData(c.data, n.journal.base)
	for _, w := range n.journal.notes {
		for at := int64(0); at < int64(len(w.data)); {
			end := min((w.offset+at)/sector*sector+sector-w.offset, int64(len(w.data)))
			if w.durable || survives(w.offset+at) {
				copy(c.data[w.offset+at:], w.data[at:end])
			}
			at = end
		}
	}
	copyData(c.journal.base, c.data)
	c.length.Store(n.length.Load())
	return c, nil
}

// copyData copies what is not zero, so that the copy stays sparse.
func copyData(dst, src []byte) {
	const piece = 64 << 10
	for at := 0; at < len(src); at += piece {
		end := min(at+piece, len(src))
		if !allZero(src[at:end]) {
			copy(dst[at:end], src[at:end])
		}
	}
}

func allZero(b []byte) bool {
	for _, v := range b {
		if v != 0 {
			return false
		}
	}
	return true
}
