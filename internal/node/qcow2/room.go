// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"fmt"

	"github.com/sluice-blk/sluice/internal/sys"
)

const (
	roomBytes = 32 << 20 // of all rooms together, about
	roomsMin  = 4
)

// room is memory for what stands around a write in its clusters: a cluster's worth before it and one behind.
type room struct {
	memory []byte // mapped, and so on a page
	next   *room
}

// first and second are its halves; nil has none.
func (r *room) first() []byte {
	if r == nil {
		return nil
	}
	return r.memory[: len(r.memory)/2 : len(r.memory)/2]
}

func (r *room) second() []byte {
	if r == nil {
		return nil
	}
	return r.memory[len(r.memory)/2:]
}

// roomPool is made with its home. Memory that nobody touches costs nothing.
type roomPool struct {
	h      *home
	memory []byte
	size   int // of one
	made   int
	most   int
	free   *room
	some   func() bool // there is one to be had; bound once
}

func (p *roomPool) init(h *home) error {
	p.h = h
	p.some = func() bool { return p.free != nil || p.made < p.most }
	if h.n.header == nil || h.n.info.ReadOnly {
		return nil // nobody is going to write
	}
	p.size = 2 * int(h.n.cluster())
	p.most = min(max(roomBytes/p.size, roomsMin), maxRoutines)
	memory, err := sys.MmapAnon(p.size * p.most)
	if err != nil {
		return fmt.Errorf("map %d bytes for copies of clusters: %w", p.size*p.most, err)
	}
	p.memory = memory
	return nil
}

// take waits for a room. Must be called in a routine.
func (p *roomPool) take() *room {
	p.h.wait(p.some)
	if r := p.free; r != nil {
		p.free, r.next = r.next, nil
		return r
	}
	at := p.made * p.size
	p.made++
	return &room{memory: p.memory[at : at+p.size : at+p.size]}
}

// give takes a room back. Must be called in a routine, after which those who wait are looked at.
func (p *roomPool) give(r *room) { r.next, p.free = p.free, r }

func (p *roomPool) release() {
	if p.memory != nil {
		_ = sys.Munmap(p.memory) // ours, and of no more use
		p.memory, p.free = nil, nil
	}
}
