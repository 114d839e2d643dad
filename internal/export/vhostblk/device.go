// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/trace"
	"github.com/sluice-blk/sluice/internal/vhostuser"
)

// MaxQueues bounds the virtqueues of one disk: a vhost-user message names a queue in eight bits.
const MaxQueues = 256

// Options say how a disk looks to the guest. The zero value gives one queue a loop and 512-byte logical blocks.
type Options struct {
	Serial       string      // what GET_ID answers, at most virtioblk.IDBytes bytes
	Queues       int         // virtqueues offered; 0: one a loop
	Loops        []*aio.Loop // they must be running
	LoopOf       []int       // queue i runs on Loops[LoopOf[i]]; nil: on Loops[i % len(Loops)]
	LogicalBlock int         // bytes, a power of two from 512; 0: what the handle prefers
	NoMerge      bool        // send requests that lie side by side one by one
	// Coalesce is for how long at most a notification waits for more completions to share it; 0: not at all.
	Coalesce time.Duration
	// OnBroken hears of a queue that was stopped because it can no longer be trusted. It is called on a goroutine of
	// its own. Nil: nobody hears of it.
	OnBroken func(queue int, err error)
}

// Device is one virtio-blk device. Its methods are called by one control goroutine at a time (the vhost-user session);
// Stats may be called from any goroutine.
type Device struct {
	handle   *block.Handle
	opts     Options
	info     block.Info
	capacity uint64 // sectors; bytes behind the last whole one cannot be told to a guest
	offered  uint64 // feature bits

	faces  []*block.HandleQueue // the handle's face on each of opts.Loops
	bells  []*ringer            // one a loop
	queues []*queue             // by virtqueue index; nil: not started

	mu                     sync.Mutex      // guards what Stats reads: which queues and records there are
	records                []*record       // by virtqueue index; nil: never started
	traces                 []*trace.Buffer // one a loop; nil: no trace is kept
	traceName, traceExport string
	features               uint64
	wce                    bool // the guest's choice, or what the node does
}

var _ vhostuser.Device = (*Device)(nil)

// New makes the device and its face of the handle on every loop. It borrows the handle and the loops until Close.
func New(h *block.Handle, o *Options) (*Device, error) {
	d := &Device{handle: h, opts: *o, info: h.Info()}
	d.capacity = uint64(d.info.Size) / virtioblk.SectorSize
	if len(d.opts.Loops) == 0 {
		return nil, errors.New("make virtio-blk device: no loop to run on")
	}
	if d.opts.Queues == 0 {
		d.opts.Queues = len(d.opts.Loops)
	}
	if d.opts.Queues < 1 || d.opts.Queues > MaxQueues {
		return nil, fmt.Errorf("make virtio-blk device: %d queues (want 1 to %d)", d.opts.Queues, MaxQueues)
	}
	if err := d.checkLoops(); err != nil {
		return nil, err
	}
	if len(d.opts.Serial) > virtioblk.IDBytes {
		return nil, fmt.Errorf("make virtio-blk device: serial %q is longer than %d bytes", d.opts.Serial, virtioblk.IDBytes)
	}
	if d.opts.LogicalBlock == 0 {
		d.opts.LogicalBlock = max(d.info.LogicalBlock, virtioblk.SectorSize)
	}
	if b := d.opts.LogicalBlock; b < virtioblk.SectorSize || b&(b-1) != 0 || b > 1<<20 {
		return nil, fmt.Errorf("make virtio-blk device: logical block of %d bytes (want a power of two from 512 to 1M)", b)
	}
	d.wce = d.info.WriteCache
	d.offered = d.offer()
	d.queues, d.records = make([]*queue, d.opts.Queues), make([]*record, d.opts.Queues)
	for _, l := range d.opts.Loops {
		face, err := d.faceOn(l)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("make virtio-blk device: %w", err), d.Close())
		}
		d.faces = append(d.faces, face)
		d.bells = append(d.bells, new(ringer))
	}
	return d, nil
}

// checkLoops checks where the queues are to run.
func (d *Device) checkLoops() error {
	if d.opts.LoopOf == nil {
		return nil
	}
	if n := len(d.opts.LoopOf); n != d.opts.Queues {
		return fmt.Errorf("make virtio-blk device: %d queues are given a loop, there are %d", n, d.opts.Queues)
	}
	for i, at := range d.opts.LoopOf {
		if at < 0 || at >= len(d.opts.Loops) {
			return fmt.Errorf("make virtio-blk device: queue %d is given loop %d of %d", i, at, len(d.opts.Loops))
		}
	}
	return nil
}

// loopOf tells on which of the device's loops a queue runs.
func (d *Device) loopOf(index int) int {
	if d.opts.LoopOf == nil {
		return index % len(d.opts.Loops)
	}
	return d.opts.LoopOf[index]
}

func (d *Device) faceOn(l *aio.Loop) (face *block.HandleQueue, err error) {
	err = l.Call(context.Background(), func() error {
		face, err = d.handle.Queue(l)
		return err
	})
	return face, err
}

// Close gives back the faces. Every queue must have been stopped.
func (d *Device) Close() error {
	var errs []error
	for i, face := range d.faces {
		errs = append(errs, d.opts.Loops[i].Call(context.Background(), face.Close), d.bells[i].close())
	}
	d.faces, d.bells = nil, nil
	return errors.Join(errs...)
}

// Features tells what the device offers (virtio 1.3, 5.2.3).
func (d *Device) Features() uint64 { return d.offered }

// offer decides what is offered: nothing that the node cannot do.
func (d *Device) offer() uint64 {
	f := uint64(virtioblk.FeatureSegMax | virtioblk.FeatureBlkSize | virtioblk.FeatureTopology)
	if d.opts.Queues > 1 {
		f |= virtioblk.FeatureMQ
	}
	if d.info.Flush != block.None {
		f |= virtioblk.FeatureFlush | virtioblk.FeatureConfigWCE
	}
	if d.info.ReadOnly {
		return f | virtioblk.FeatureRO
	}
	if d.info.Discard != block.None {
		f |= virtioblk.FeatureDiscard
	}
	if d.info.WriteZeroes != block.None {
		f |= virtioblk.FeatureWriteZeroes
	}
	return f
}

// NumQueues is the number of virtqueues offered.
func (d *Device) NumQueues() int { return d.opts.Queues }

// SetFeatures settles the write cache: who cannot flush gets a write-through disk (virtio 1.3, 5.2.6.2).
func (d *Device) SetFeatures(negotiated uint64) error {
	d.features = negotiated
	d.applyWriteCache()
	return nil
}

// applyWriteCache makes the handle do what the guest believes. With CONFIG_WCE the configuration byte says it; without,
// a driver that negotiated FLUSH must expect a volatile cache, and one that did not will never flush.
func (d *Device) applyWriteCache() {
	on := d.wce
	if d.features&virtioblk.FeatureFlush == 0 {
		on = false
	} else if d.features&virtioblk.FeatureConfigWCE == 0 {
		on = d.info.WriteCache
	}
	d.setWriteCache(on)
}

// setWriteCache switches this device's own faces, on each loop: other users of the disk have theirs. What the guest sends
// after the answer to its message finds the switch made.
func (d *Device) setWriteCache(on bool) {
	for i, face := range d.faces {
		_ = d.opts.Loops[i].Call(context.Background(), func() error { // fails on a loop that has ended, with its queues
			face.SetWriteCache(on)
			return nil
		})
	}
}

// flush makes durable what has completed on any loop, and waits for it.
func (d *Device) flush() error {
	done := make(flushed, 1)
	r := &block.Request{Op: block.OpFlush, Done: done}
	err := d.opts.Loops[0].Call(context.Background(), func() error {
		d.faces[0].Submit(r)
		return nil
	})
	if err != nil {
		return fmt.Errorf("flush the disk: %w", err)
	}
	if err := <-done; err != nil {
		return fmt.Errorf("flush the disk: %w", err)
	}
	return nil
}

// flushed takes the outcome of one flush to the goroutine that waits.
type flushed chan error

func (c flushed) Complete(_ *block.Request, err error) { c <- err }

// ReadConfig fills p from the configuration space at offset (virtio 1.3, 5.2.4).
func (d *Device) ReadConfig(offset uint32, p []byte) error {
	c := d.config()
	return c.ReadAt(p, offset)
}

// WriteConfig takes the one byte that a driver may write: writeback, where CONFIG_WCE was negotiated.
func (d *Device) WriteConfig(offset uint32, p []byte) error {
	if offset != virtioblk.OffsetWriteback || len(p) != 1 {
		return fmt.Errorf("write %d bytes at %d of the configuration space: only writeback can be written", len(p), offset)
	}
	if d.features&virtioblk.FeatureConfigWCE == 0 {
		return errors.New("write the writeback byte: CONFIG_WCE was not negotiated")
	}
	if p[0] > 1 {
		return fmt.Errorf("write the writeback byte: value %d (want 0 or 1)", p[0])
	}
	off := d.wce && p[0] == 0
	d.wce = p[0] == 1
	d.applyWriteCache()
	if off {
		// The driver sends no flushes from now on, and what it wrote before must not stay volatile for that.
		return d.flush()
	}
	return nil
}

// Limits of one discard or write of zeroes. Two gibibytes keep a single request from holding a worker for long; sixteen
// segments are what Linux merges into one request at most without asking for more.
const (
	maxRangeSectors  = 2 << 30 / virtioblk.SectorSize
	maxRangeSegments = 16
)

func (d *Device) config() virtioblk.Config {
	c := virtioblk.Config{
		Capacity:  d.capacity,
		SegMax:    segMax,
		BlkSize:   uint32(d.opts.LogicalBlock),
		NumQueues: uint16(d.opts.Queues),
	}
	if p := d.info.PhysicalBlock; p > d.opts.LogicalBlock {
		for 1<<c.PhysicalBlockExp*d.opts.LogicalBlock < p {
			c.PhysicalBlockExp++
		}
	}
	if d.info.OptimalIO > 0 {
		c.OptIOSize = uint32(d.info.OptimalIO / d.opts.LogicalBlock)
	}
	if d.wce {
		c.Writeback = 1
	}
	align := max(d.info.DiscardAlign, int64(d.opts.LogicalBlock)) / virtioblk.SectorSize
	if d.offered&virtioblk.FeatureDiscard != 0 {
		c.MaxDiscardSectors, c.MaxDiscardSeg = maxRangeSectors, maxRangeSegments
		c.DiscardSectorAlignment = uint32(align)
	}
	if d.offered&virtioblk.FeatureWriteZeroes != 0 {
		c.MaxWriteZeroesSectors, c.MaxWriteZeroesSeg = maxRangeSectors, maxRangeSegments
		if d.info.Discard != block.None {
			c.WriteZeroesMayUnmap = 1
		}
	}
	return c
}

// StartQueue makes the queue on its loop and looks at the ring at once, since kicks may have come before.
func (d *Device) StartQueue(v vhostuser.Vring) error {
	if v.Index < 0 || v.Index >= len(d.queues) {
		return fmt.Errorf("start queue %d: the disk has %d", v.Index, len(d.queues))
	}
	if d.queues[v.Index] != nil {
		return fmt.Errorf("start queue %d: it runs already", v.Index)
	}
	at := d.loopOf(v.Index)
	d.makeRecord(v.Index)
	q, err := newQueue(d, v, at)
	if err != nil {
		return fmt.Errorf("start queue %d: %w", v.Index, err)
	}
	if err := q.loop.Call(context.Background(), q.start); err != nil {
		q.release()
		return fmt.Errorf("start queue %d: %w", v.Index, err)
	}
	d.mu.Lock()
	d.queues[v.Index] = q
	if d.traces != nil {
		d.postTrace(q)
	}
	d.mu.Unlock()
	return nil
}

func (d *Device) makeRecord(index int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.records[index] == nil {
		d.records[index] = &record{index: index}
	}
}

// StopQueue returns when nothing of the queue is in flight; what was completed stands in the used ring by then.
func (d *Device) StopQueue(index int) (lastAvail uint16, err error) {
	if index < 0 || index >= len(d.queues) || d.queues[index] == nil {
		return 0, fmt.Errorf("stop queue %d: it does not run", index)
	}
	q := d.queues[index]
	q.loop.Post(q.stop)
	<-q.stopped
	d.mu.Lock()
	d.queues[index] = nil
	d.mu.Unlock()
	lastAvail = q.vq.LastAvail()
	q.release()
	return lastAvail, nil
}

// SetMem moves every running queue to a new memory table. A queue whose rings are not in it is stopped as broken. Each
// loop is asked once, since a guest may have many queues.
func (d *Device) SetMem(m *guestmem.Map) error {
	var errs []error
	running := d.running()
	for _, l := range d.opts.Loops {
		var mine []*queue
		for _, q := range running {
			if q.loop == l {
				mine = append(mine, q)
			}
		}
		if len(mine) == 0 {
			continue
		}
		errs = append(errs, l.Call(context.Background(), func() error {
			var errs []error
			for _, q := range mine {
				errs = append(errs, q.setMem(m))
			}
			return errors.Join(errs...)
		}))
	}
	return errors.Join(errs...)
}

// SetCall replaces the notification descriptor of a running queue; fd -1 takes it away.
func (d *Device) SetCall(index int, fd int) error {
	if index < 0 || index >= len(d.queues) || d.queues[index] == nil {
		return fmt.Errorf("set call descriptor of queue %d: it does not run", index)
	}
	q := d.queues[index]
	n, err := newNotifier(fd, q.bell)
	if err != nil {
		return fmt.Errorf("set call descriptor of queue %d: %w", index, err)
	}
	return q.loop.Call(context.Background(), func() error {
		q.call = n
		// A completion may have been published while the old descriptor was already deaf.
		return q.call.signal()
	})
}

// Reset forgets what the last driver chose.
func (d *Device) Reset() {
	d.features = 0
	d.wce = d.info.WriteCache
	d.setWriteCache(d.info.WriteCache)
}
