// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/trace"
	"github.com/sluice-blk/sluice/internal/vhostuser"
	"github.com/sluice-blk/sluice/internal/virtqueue"
)

// errFault says that guest memory is mapped but not there any more: its owner truncated the file behind it.
var errFault = errors.New("guest memory faulted (its file was truncated)")

// How many requests a queue may take in one turn of its loop. What the ring holds beyond is taken in the next turn, which
// comes at once.
//
// A ring that was found full after a pause begins with firstShare. The first requests are then with the disk, or with the
// guest again, while the rest is still taken: where both sides took turns on the whole ring, each would sleep while the
// other works, and every turn cost a wake-up. The share doubles while the ring holds more, so that a deep ring pays for few
// turns, up to turnShare, the size of the usual queue: what else the loop serves waits for that many at most.
const (
	firstShare = 32
	turnShare  = 256
)

// queue is one started virtqueue on its loop. Every method must be called on the loop, except newQueue and release.
//
// A slot is in exactly one place: on the free stack, on the fresh list (popped, not yet submitted), with the handle
// (counted in inflight), or on the done list (completed, not yet published).
type queue struct {
	dev      *Device
	index    int
	loop     *aio.Loop
	face     *block.HandleQueue
	vq       *virtqueue.Queue
	mem      *memory
	vring    vhostuser.Vring
	kick     *aio.Watch
	call     notifier
	complain notifier // by the error descriptor
	bell     *ringer
	calls    coalescer
	end      aio.TurnEnd
	hook     aio.PollHook
	broken   bool // the ring is not touched any more

	chain   virtqueue.Chain // the one that was popped last, read into a slot before the next
	merger  *merger         // nil: requests go out one by one
	scratch *vector         // where its segments lie
	store   *store

	turn    int64         // the loop's clock when something was last taken
	share   int           // how much may be taken in a turn
	budget  int           // how much may still be taken in that turn
	held    bool          // the ring held more than the turn's share
	waiting bool          // for the next turn
	next    block.Request // brings the next turn, when more is to be taken then

	free        []*slot // a stack: the slot used last is the one still in the processor's cache
	fresh, done slotList
	inflight    int
	starved     bool // the ring held more than there were slots

	stopping bool
	stopped  chan struct{} // closed when stopping and nothing is in flight

	record *record       // of this queue's number; outlives the queue
	stats  *QueueStats   // the record's
	trace  *trace.Buffer // nil: no trace is kept
	source *trace.Queue  // what it calls this queue

	// Moments on the loop's clock, and what they are of: see stages.go.
	found, popped int64  // when the turn began that took the last batch, and when that was taken
	completedAt   int64  // of the first request on the done list
	told          uint64 // requests published since the guest was last called
	telling       uint64 // of these, those for which it is to be called
	tellingSince  int64  // when the first of those was published
}

// memory counts who still uses a table that may have been replaced: its last request gives it back.
type memory struct {
	m       *guestmem.Map
	regions []sys.IOVec // the whole of m, for the loop
	users   int         // slots whose segments lie in m
	retired bool
}

func newMemory(m *guestmem.Map) *memory {
	mem := &memory{m: m}
	for _, r := range m.Regions() {
		if b, err := m.Slice(r.GuestAddr, r.Size); err == nil { // it is what the map says it has
			mem.regions = append(mem.regions, sys.IOVecOf(b))
		}
	}
	return mem
}

func (m *memory) drop() {
	m.users--
	if m.retired && m.users == 0 {
		m.m.Release()
	}
}

// newQueue checks the ring and makes everything that the queue will ever need. It borrows the vring's descriptors.
// at tells on which of the device's loops it will run.
func newQueue(d *Device, v vhostuser.Vring, at int) (*queue, error) {
	if !sys.IsEventfd(v.Kick) {
		return nil, errors.New("the kick descriptor is not an eventfd")
	}
	call, err := newNotifier(v.Call, d.bells[at])
	if err != nil {
		return nil, fmt.Errorf("call descriptor: %w", err)
	}
	vq, err := virtqueue.New(virtqueue.Config{
		Index: v.Index, Size: v.Size, Desc: v.Desc, Avail: v.Avail, Used: v.Used,
		Mem: v.Mem, Base: v.Base, EventIdx: v.EventIdx, Indirect: v.Indirect, MaxSegments: maxSegments,
	})
	if err != nil {
		return nil, err
	}
	complain, err := newNotifier(v.Err, d.bells[at])
	if err != nil {
		complain = notifier{fd: -1} // it is a service, and nothing depends on it
	}
	v.Mem.Retain()
	q := &queue{
		record: d.records[v.Index], stats: &d.records[v.Index].QueueStats,
		dev: d, index: v.Index, loop: d.opts.Loops[at], face: d.faces[at], vq: vq, vring: v,
		call: call, complain: complain, bell: d.bells[at], calls: coalescer{bound: d.opts.Coalesce}, mem: newMemory(v.Mem),
		stopped: make(chan struct{}), share: firstShare,
	}
	q.end.H, q.hook.H = q, q
	q.next.Done = (*nextTurn)(q)
	slots := make([]slot, v.Size) // no more chains than descriptors can be in flight
	q.free = make([]*slot, 0, v.Size)
	for i := range slots {
		slots[i].init(q)
		q.free = append(q.free, &slots[i])
	}
	if !d.opts.NoMerge && !q.loop.Unbatched() {
		q.merger = newMerger(d.handle.Node().Info())
	}
	// A chain has a vector at most, and one is popped into; a merged request joins two chains or more.
	if q.store, err = newStore(1 + int(v.Size) + int(v.Size)/2); err != nil {
		q.release()
		return nil, err
	}
	q.scratch = q.store.take()
	q.chain.SetStorage(q.scratch[:])
	return q, nil
}

// swapScratch leaves the segments of the chain that was just popped to whoever asks, and pops into another vector.
func (q *queue) swapScratch() *vector {
	old := q.scratch
	q.scratch = q.store.take()
	q.chain.SetStorage(q.scratch[:])
	return old
}

// release gives back what newQueue took. The queue is not on its loop any more.
func (q *queue) release() {
	q.vq.Close()
	q.mem.m.Release()
	if q.store != nil {
		q.store.close()
	}
}

func (q *queue) start() error {
	w, err := q.loop.Watch(q.vring.Kick, aio.EventRead|aio.EventEdge, q)
	if err != nil {
		return fmt.Errorf("watch the kick descriptor: %w", err)
	}
	q.kick = w
	q.loop.RegisterMemory(q.mem.regions)
	q.run()
	return nil
}

func (q *queue) stop() {
	q.stopping = true
	q.closeKick()
	q.finishStop()
}

func (q *queue) closeKick() {
	if q.kick != nil {
		q.kick.Close()
		q.kick = nil
		q.loop.Neglect(&q.hook)
	}
}

// finishStop tells the waiting control goroutine, once everything that was taken has been answered.
func (q *queue) finishStop() {
	if q.stopping && q.inflight == 0 && q.done.head == nil && !q.held && !q.waiting {
		q.stopping = false
		q.loop.UnregisterMemory(q.mem.regions)
		close(q.stopped)
	}
}

func (q *queue) setMem(m *guestmem.Map) error {
	m.Retain()
	old := q.mem
	q.mem = newMemory(m)
	q.loop.RegisterMemory(q.mem.regions)
	q.loop.UnregisterMemory(old.regions)
	old.retired = true
	if old.users == 0 {
		old.m.Release()
	}
	if q.broken {
		return nil
	}
	if err := q.vq.SetMem(m); err != nil {
		q.fail(err)
		return fmt.Errorf("queue %d in the new memory table: %w", q.index, err)
	}
	return nil
}

// HandleReady is the guest's kick. Where the poller tells of edges the counter is left to grow. Elsewhere it is taken,
// without ever waiting: the descriptor is shared with the front-end, which may have emptied it meanwhile, and must not be
// made non-blocking for the same reason.
func (q *queue) HandleReady(w *aio.Watch, _ aio.Events) {
	if !w.Edge() {
		if err := sys.EventfdTake(q.vring.Kick); err != nil && !errors.Is(err, syscall.EAGAIN) {
			q.fail(fmt.Errorf("read the kick descriptor: %w", err))
			return
		}
	}
	q.stats.Kicks++
	q.run()
}

// Pending looks at the ring for a loop that polls. Where the memory is gone it says yes, and collect meets the fault again.
func (q *queue) Pending() (yes bool) {
	defer func() {
		if sys.Faulted(recover()) {
			yes = true
		}
	}()
	return q.vq.Pending()
}

// HandlePending is what a kick would have been.
func (q *queue) HandlePending() { q.run() }

// Arm has the guest kick from now on. A fault is met again as in Pending.
func (q *queue) Arm() (more bool) {
	defer func() {
		if sys.Faulted(recover()) {
			more = true
		}
	}()
	return q.vq.EnableKicks()
}

// run takes what the ring holds, up to the share of a turn, and submits it. With kicks off while it looks, the guest saves
// its calls.
func (q *queue) run() {
	if q.broken || q.kick == nil || q.waiting {
		return
	}
	n, err := q.collect()
	if n > 0 {
		q.record.taken(n, q.popped-q.found)
		q.loop.Found(int(n))
	}
	q.send()
	if err != nil {
		q.fail(err)
	}
}

// collect pops chains into slots until the ring, the slots or the turn's share are used up, and tells how many. It is one
// of the two places that read or write guest memory, and turns a fault there into errFault.
func (q *queue) collect() (n uint64, err error) {
	defer func() {
		if sys.Faulted(recover()) {
			err = errFault
		}
	}()
	if now := q.loop.Now(); now != q.turn {
		q.turn, q.budget = now, q.share
	}
	for more := true; more; {
		q.vq.DisableKicks()
		for {
			if len(q.free) == 0 {
				q.starved = true // kicks stay off: EndTurn looks again when a slot is free
				return n, nil
			}
			if q.budget <= 0 && q.vq.Pending() {
				q.held = true // kicks stay off here, too
				q.share = min(2*q.share, turnShare)
				q.loop.AtTurnEnd(&q.end)
				return n, nil
			}
			s := q.free[len(q.free)-1]
			ok, err := q.vq.Pop(&q.chain)
			if err != nil {
				return n, err
			}
			if !ok {
				break
			}
			q.free = q.free[:len(q.free)-1]
			if n == 0 {
				q.found, q.popped = q.loop.Now(), q.loop.Tick()
			}
			n++
			q.budget--
			s.found, s.popped = q.found, q.popped
			s.parse(&q.chain)
			q.mem.users++
			s.mem = q.mem
			q.fresh.push(s)
		}
		// A loop that polls looks by itself; the guest then saves its kicks, and the loop arms them before it sleeps.
		more = !q.loop.Attend(&q.hook) && q.vq.EnableKicks()
	}
	q.share = firstShare
	return n, nil
}

// completed takes a slot whose outcome is known, and asks for one publication at the end of the turn.
func (q *queue) completed(s *slot) {
	q.inflight--
	now := q.loop.Stamp()
	if q.done.head == nil {
		q.completedAt = now
	}
	q.record.settled(s, now)
	q.done.push(s)
	if q.loop.Unbatched() {
		q.EndTurn()
		return
	}
	q.loop.AtTurnEnd(&q.end)
}

// EndTurn publishes what completed in this turn and calls the guest at most once.
func (q *queue) EndTurn() {
	if !q.broken && q.done.head != nil {
		n, wanted, err := q.publish()
		if err == nil {
			published := q.loop.Tick()
			q.record.published(q.done.head, q.completedAt, published)
			if q.trace != nil {
				q.note(q.done.head, q.completedAt, published)
			}
			err = q.notify(n, wanted, published)
		}
		if err != nil {
			q.fail(err)
		}
	}
	for s := q.done.pop(); s != nil; s = q.done.pop() {
		s.clean()
		q.free = append(q.free, s)
	}
	if q.starved {
		q.starved = false
		q.run()
	}
	if q.held {
		q.held = false
		q.waiting = true
		q.loop.CompleteLater(&q.next, nil)
	}
	q.finishStop()
}

// nextTurn is the queue as the completer of the request that stands for the rest of its ring.
type nextTurn queue

// Complete goes on where the share of the last turn ended.
func (c *nextTurn) Complete(*block.Request, error) {
	q := (*queue)(c)
	q.waiting = false
	q.run()
	q.finishStop()
}

// publish writes the status bytes and the used ring of the n that completed, and tells whether the guest wants to be
// called for them: the second of the two places that touch guest memory.
func (q *queue) publish() (n int, wanted bool, err error) {
	defer func() {
		if sys.Faulted(recover()) {
			err = errFault
		}
	}()
	for s := q.done.head; s != nil; s = s.next {
		q.vq.Push(s.head, s.answer())
		n++
	}
	return n, q.vq.Publish(), nil
}

// fail stops the queue for good: the ring is not read or written again until the front-end sets it up anew. What is in
// flight still comes back and is dropped; other queues go on.
func (q *queue) fail(err error) {
	if q.broken {
		return
	}
	q.broken = true
	q.closeKick()
	_ = q.settleCalls() // it tells of what was published before; the queue is lost either way
	q.tell(err)
}

// tell reports a broken queue, off the loop: to the front-end by the error descriptor and to whoever keeps the log.
func (q *queue) tell(err error) {
	hear, index := q.dev.opts.OnBroken, q.index
	_ = q.complain.signal() // the queue is lost either way
	if hear != nil {
		go hear(index, err)
	}
}
