// SPDX-License-Identifier: Apache-2.0

package aio

// slotKind says what a completion that names a slot is about.
type slotKind uint8

const (
	slotFree slotKind = iota
	slotWatch
	slotRequest
	slotUser
)

// slot is what one entry in flight stands for.
type slot struct {
	gen  uint32
	next uint32 // of the free list
	kind slotKind

	watch   *Watch
	request *Request
	user    CQEHandler
}

// nobody is the user data of entries whose completion nobody waits for: the first slot is never given out.
const nobody = uint64(0)

// slotBlock is how many slots the table grows by. Blocks stay where they are when it grows.
const slotBlock = 256

// slotTable numbers what is in flight. User data is the number in the lower and its generation in the upper half: a
// stale completion is told from one of the number's next user, and no pointer leaves Go's sight. A generation comes again
// after 2^32 uses of one number, while the completion of its first use would have to be under way still.
type slotTable struct {
	blocks []*[slotBlock]slot
	free   uint32 // first of the free list; 0 is none
}

func (t *slotTable) slot(i uint32) *slot { return &t.blocks[i/slotBlock][i%slotBlock] }

// take gives a slot and the user data that names it.
func (t *slotTable) take(kind slotKind) (*slot, uint64) {
	if t.free == 0 {
		t.grow()
	}
	i := t.free
	s := t.slot(i)
	t.free = s.next
	s.kind = kind
	return s, uint64(s.gen)<<32 | uint64(i)
}

// give takes back the slot that data names; its completions are stale from here on.
func (t *slotTable) give(data uint64) {
	i := uint32(data)
	s := t.slot(i)
	*s = slot{gen: s.gen + 1, next: t.free}
	t.free = i
}

// at is the slot that data names, or nil when nobody waits for it any more.
func (t *slotTable) at(data uint64) *slot {
	i := uint32(data)
	if i/slotBlock >= uint32(len(t.blocks)) {
		return nil
	}
	if s := t.slot(i); s.kind != slotFree && s.gen == uint32(data>>32) {
		return s
	}
	return nil
}

func (t *slotTable) grow() {
	first := uint32(len(t.blocks)) * slotBlock
	t.blocks = append(t.blocks, new([slotBlock]slot))
	for i := first + slotBlock - 1; i >= max(first, 1); i-- {
		t.slot(i).next = t.free
		t.free = i
	}
}
