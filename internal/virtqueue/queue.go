// SPDX-License-Identifier: Apache-2.0

package virtqueue

import (
	"fmt"
	"math/bits"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/invariant"
	"github.com/sluice-blk/sluice/internal/sys"
)

// Config is all that a queue needs to run, as the front-end negotiated it.
type Config struct {
	Index int    // of the queue in its device, for messages
	Size  uint16 // descriptors: a power of two, at most MaxSize

	Desc, Avail, Used uint64 // user addresses of the three parts, resolved in Mem

	Mem  *guestmem.Map // the queue takes a reference of its own
	Base uint16        // index of the next available entry to take

	EventIdx bool // VIRTIO_F_EVENT_IDX was negotiated
	Indirect bool // VIRTIO_F_INDIRECT_DESC was negotiated

	MaxSegments int // of one chain, both directions together; 0 means MaxSize
}

// Queue is the device side of one split virtqueue. One thread owns it; nothing in it is locked.
type Queue struct {
	ring        ring
	mem         *guestmem.Map
	window      guestmem.Window // of mem: where the last buffer was found
	eventIdx    bool
	indirect    bool
	maxSegments int

	nextAvail  uint16 // of the entry that Pop takes next
	knownAvail uint16 // avail.idx as it was last read, at most size ahead of nextAvail
	nextUsed   uint16 // of the element that Push fills next
	published  uint16 // used.idx as the driver sees it
	inFlight   int    // popped and not pushed
	firstCall  bool   // nothing was published since New: the driver may be waiting for what a predecessor did

	busy   [MaxSize / 64]uint64 // a bit for each head in flight
	broken error                // a *BrokenError, or nil
	conf   Config
}

// New makes a queue over rings in memory. It reads the used index that the ring has, so that a queue can go on where
// an earlier one stopped, and takes a reference to c.Mem, which [Queue.Close] gives back.
//
// Errors say which part is malformed, misaligned or outside of memory ([guestmem.ErrRange]).
// May be called from any goroutine; the queue then belongs to one.
func New(c Config) (*Queue, error) {
	if c.Size == 0 || c.Size > MaxSize || bits.OnesCount16(c.Size) != 1 {
		return nil, fmt.Errorf("set up queue %d: size %d is no power of two up to %d", c.Index, c.Size, MaxSize)
	}
	if c.Mem == nil {
		return nil, fmt.Errorf("set up queue %d: no guest memory", c.Index)
	}
	if c.MaxSegments <= 0 {
		c.MaxSegments = MaxSize
	}
	r, err := resolve(c.Mem, &c)
	if err != nil {
		return nil, fmt.Errorf("set up queue %d: %w", c.Index, err)
	}
	var used uint16
	if err := sys.Guarded(func() { used = LoadAcquire16(r.usedIdx()) }); err != nil {
		return nil, fmt.Errorf("set up queue %d: read the used ring's index: %w (the file behind the memory was truncated)", c.Index, err)
	}
	c.Mem.Retain()
	return &Queue{
		ring: r, mem: c.Mem, eventIdx: c.EventIdx, indirect: c.Indirect, maxSegments: c.MaxSegments,
		nextAvail: c.Base, knownAvail: c.Base, nextUsed: used, published: used, firstCall: true, conf: c,
	}, nil
}

// Close gives the memory back. Chains that are in flight point into it, so whoever has some holds a reference of his
// own. A second Close does no harm; no other method may be called after the first. Must be called on the loop.
func (q *Queue) Close() {
	if q.mem == nil {
		return
	}
	q.mem.Release()
	q.mem, q.window = nil, guestmem.Window{}
	q.ring = ring{}
	q.broken = &BrokenError{Queue: q.conf.Index, Reason: "closed"}
}

// SetMem moves the queue to a new table of memory, in which its rings are looked up again by the addresses of Config.
// What was pushed is to be published first. The queue takes a reference to m and gives the old one's back. On an error
// the queue is as it was, still in the old memory, and is to be stopped. Must be called on the loop.
func (q *Queue) SetMem(m *guestmem.Map) error {
	invariant.Assert(q.nextUsed == q.published, "virtqueue: memory changed with elements not published")
	r, err := resolve(m, &q.conf)
	if err != nil {
		return fmt.Errorf("move queue %d to new memory: %w", q.conf.Index, err)
	}
	m.Retain()
	q.mem.Release()
	q.ring, q.mem, q.window = r, m, guestmem.Window{}
	return nil
}

// Pop takes the next chain off the available ring into c, without allocating. It returns false when the ring is empty.
// A chain with c.Err set is to be completed like any other. An error is a [*BrokenError]: the queue gives nothing any
// more, and c is void. Must be called on the loop.
func (q *Queue) Pop(c *Chain) (ok bool, err error) {
	if q.nextAvail == q.knownAvail && !q.look() {
		return false, q.broken
	}
	if q.broken != nil {
		return false, q.broken
	}
	head := q.ring.head(q.nextAvail)
	if head >= q.ring.size {
		return false, q.fail("a head behind the end of the descriptor table")
	}
	slot, bit := &q.busy[head/64], uint64(1)<<(head%64)
	if *slot&bit != 0 {
		return false, q.fail("a head that is in flight already")
	}
	if reason := q.walk(c, head); reason != "" {
		return false, q.fail(reason)
	}
	c.Head = head
	*slot |= bit
	q.inFlight++
	q.nextAvail++
	return true, nil
}

// look reads avail.idx and tells whether it has moved.
func (q *Queue) look() bool {
	if q.broken != nil {
		return false
	}
	// Pairs with the driver's release (or barrier) between its writes of descriptors and ring and that of idx.
	idx := LoadAcquire16(q.ring.availIdx())
	if idx-q.nextAvail > q.ring.size {
		q.fail("the available index jumped")
		return false
	}
	q.knownAvail = idx
	return idx != q.nextAvail
}

// fail stops the queue for good.
func (q *Queue) fail(reason string) error {
	q.broken = &BrokenError{Queue: q.conf.Index, Reason: reason}
	return q.broken
}

// Push puts a chain that Pop returned into the used ring: head, and how many bytes were written into its writable
// buffers, counted from their beginning. The driver does not see it before [Queue.Publish].
// Must be called on the loop.
func (q *Queue) Push(head uint16, written uint32) {
	slot, bit := &q.busy[head%MaxSize/64], uint64(1)<<(head%64)
	if *slot&bit == 0 {
		invariant.Assert(false, "virtqueue: push of a head that is not in flight")
		return
	}
	*slot &^= bit
	q.inFlight--
	q.ring.setUsed(q.nextUsed, head, written)
	q.nextUsed++
}

// Publish shows the driver everything that was pushed, by one store of the used index, and tells whether the driver
// asked to be notified of it. With nothing pushed it does nothing. Must be called on the loop, once a batch.
func (q *Queue) Publish() (notify bool) {
	old, now := q.published, q.nextUsed
	if old == now {
		return false
	}
	// Pairs with the driver's acquire of used.idx: elements, and data written into buffers, are seen before it.
	StoreRelease16(q.ring.usedIdx(), now)
	q.published = now
	// The driver stores used_event (or clears NO_INTERRUPT), then looks at used.idx again; we store used.idx, then look
	// at used_event. With a full fence on both sides one of the two sees the other (section 2.7.7.2).
	Fence()
	first := q.firstCall
	q.firstCall = false
	if q.eventIdx {
		return NeedEvent(LoadAcquire16(q.ring.usedEvent()), now, old) || first
	}
	return LoadAcquire16(q.ring.availFlags())&AvailNoInterrupt == 0
}

// DisableKicks asks the driver not to notify us. It is a hint: kicks may still come. With the event index there is
// nothing to store, since the driver passes the event that was asked for once, and then is silent until the next
// [Queue.EnableKicks] (section 2.7.10: flags stay 0). Must be called on the loop.
func (q *Queue) DisableKicks() {
	if !q.eventIdx {
		StoreRelease16(q.ring.usedFlags(), UsedNoNotify)
	}
}

// EnableKicks asks the driver to notify us of the next entry, and looks at the ring once more: true means that entries
// came in before the driver could know, so that the caller must pop again and no kick will come for them. A broken
// queue asks for nothing. Must be called on the loop.
func (q *Queue) EnableKicks() (more bool) {
	if q.broken != nil {
		return false
	}
	if q.eventIdx {
		// Two bytes and no more: what stands behind them is the guest's own.
		StoreRelease16(q.ring.availEvent(), q.nextAvail)
	} else {
		StoreRelease16(q.ring.usedFlags(), 0)
	}
	// Pairs with the driver's fence between its store of avail.idx and its load of avail_event or flags.
	Fence()
	return LoadAcquire16(q.ring.availIdx()) != q.nextAvail
}

// Pending tells whether Pop would find something: a chain, or that the queue is broken and does not say so yet. It is
// one load, for a loop that polls. Must be called on the loop.
func (q *Queue) Pending() bool {
	return q.broken == nil &&
		(q.nextAvail != q.knownAvail || LoadAcquire16(q.ring.availIdx()) != q.nextAvail)
}

// Err is what broke the queue, a [*BrokenError], or nil. Must be called on the loop.
func (q *Queue) Err() error { return q.broken }

// LastAvail is the index of the available entry that Pop takes next: what GET_VRING_BASE answers once all that was
// popped is published. Must be called on the loop.
func (q *Queue) LastAvail() uint16 { return q.nextAvail }

// UsedIdx is the used index that the driver sees. Must be called on the loop.
func (q *Queue) UsedIdx() uint16 { return q.published }

// InFlight is how many chains were popped and not pushed. Must be called on the loop.
func (q *Queue) InFlight() int { return q.inFlight }

// Size is the queue's size in descriptors. Must be called on the loop.
func (q *Queue) Size() uint16 { return q.ring.size }
