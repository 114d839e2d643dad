// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhostuser"
	"github.com/sluice-blk/sluice/internal/virtqtest"
)

// patience is how long a test waits for what must come; it is long because the machines are slow and shared.
const patience = 60 * time.Second

// rig is a device on one loop, one guest memory, and the driver of each of its queues, without a vhost-user socket
// between them.
type rig struct {
	t      *testing.T
	loop   *aio.Loop
	handle *block.Handle
	dev    *Device
	mem    *virtqtest.Memory
	table  *guestmem.Map
	queues []*rigQueue
	broken chan error
}

type rigQueue struct {
	rig   *rig
	index int
	d     *virtqtest.Driver
	kick  int
	call  int
	calls int
}

type rigOptions struct {
	loop         aio.LoopOptions
	handle       block.HandleOptions
	noEventIdx   bool
	blockingCall bool
	queues       int
	size         uint16
	features     uint64 // of the device, acknowledged; 0: all that it offers
	serial       string
	noMerge      bool
	coalesce     time.Duration
}

func newRig(t *testing.T, node block.Node, o rigOptions) *rig {
	t.Helper()
	r := &rig{t: t, broken: make(chan error, 8)}
	r.loop = startLoop(t, &o.loop)
	r.handle = block.NewHandle(node, &o.handle)
	t.Cleanup(func() { must(t, r.handle.Close()) })
	if o.queues == 0 {
		o.queues = 1
	}
	if o.size == 0 {
		o.size = 256
	}
	var err error
	r.dev, err = New(r.handle, &Options{Queues: o.queues, Loops: []*aio.Loop{r.loop}, Serial: o.serial, NoMerge: o.noMerge, Coalesce: o.coalesce,
		OnBroken: func(_ int, err error) { r.broken <- err }})
	must(t, err)
	t.Cleanup(func() { must(t, r.dev.Close()) })
	if o.features == 0 {
		o.features = r.dev.Features()
	}
	must(t, r.dev.SetFeatures(o.features))

	r.mem, err = virtqtest.NewMemory(1<<30, 32<<20)
	must(t, err)
	t.Cleanup(func() { must(t, r.mem.Close()) })
	r.table, err = guestmem.NewMap([]guestmem.Region{r.mem.Region()})
	must(t, err)
	t.Cleanup(r.table.Release)
	for i := range o.queues {
		r.queues = append(r.queues, r.addQueue(i, o))
	}
	return r
}

func startLoop(t *testing.T, o *aio.LoopOptions) *aio.Loop {
	t.Helper()
	l, err := aio.NewLoop(o)
	if errors.Is(err, aio.ErrNotSupported) {
		t.Skipf("no such loop on this kernel: %v", err)
	}
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		must(t, <-ended)
	})
	return l
}

func (r *rig) addQueue(index int, o rigOptions) *rigQueue {
	r.t.Helper()
	d, err := virtqtest.NewDriver(r.mem, virtqtest.DriverConfig{Size: o.size, EventIdx: !o.noEventIdx, Indirect: true, TableSize: 140})
	must(r.t, err)
	q := &rigQueue{rig: r, index: index, d: d}
	q.kick, err = sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
	must(r.t, err)
	flags := sys.EFD_CLOEXEC | sys.EFD_NONBLOCK
	if o.blockingCall {
		flags = sys.EFD_CLOEXEC
	}
	q.call, err = sys.Eventfd(0, flags)
	must(r.t, err)
	must(r.t, r.dev.StartQueue(q.vring(0, !o.noEventIdx)))
	r.t.Cleanup(func() {
		if r.dev.queues[index] != nil {
			_, err := r.dev.StopQueue(index)
			must(r.t, err)
		}
		must(r.t, errors.Join(sys.Close(q.kick), sys.Close(q.call)))
	})
	return q
}

func (q *rigQueue) vring(base uint16, eventIdx bool) vhostuser.Vring {
	desc, avail, used := q.d.Addrs()
	return vhostuser.Vring{Index: q.index, Size: q.d.Size(), Desc: desc, Avail: avail, Used: used, Base: base,
		Mem: q.rig.table, Kick: q.kick, Call: q.call, Err: -1, EventIdx: eventIdx, Indirect: true}
}

// request is one chain in guest memory.
type request struct {
	readable, writable []virtqtest.Segment
	data, status       virtqtest.Buffer
	head               uint16
}

const poison = 0xee

// standard makes the usual three parts: header, data of length bytes, status.
func (r *rig) standard(kind virtioblk.RequestType, sector uint64, length int) *request {
	r.t.Helper()
	q := &request{}
	header := r.alloc(virtioblk.HeaderSize)
	virtioblk.Header{Type: kind, Sector: sector}.Encode(header.Bytes)
	q.readable = append(q.readable, segment(header))
	if length > 0 {
		q.data = r.alloc(length)
		if kind == virtioblk.TypeIn || kind == virtioblk.TypeGetID {
			q.writable = append(q.writable, segment(q.data))
		} else {
			q.readable = append(q.readable, segment(q.data))
		}
	}
	q.status = r.alloc(1)
	q.status.Bytes[0] = poison
	q.writable = append(q.writable, segment(q.status))
	return q
}

func (r *rig) alloc(n int) virtqtest.Buffer {
	r.t.Helper()
	b, err := r.mem.Alloc(n, 16)
	must(r.t, err)
	return b
}

func segment(b virtqtest.Buffer) virtqtest.Segment {
	return virtqtest.Segment{Addr: b.Addr, Len: uint32(len(b.Bytes))}
}

func (q *rigQueue) add(req *request) {
	q.rig.t.Helper()
	head, ok := q.d.Add(req.readable, req.writable)
	if !ok {
		q.rig.t.Fatalf("no room in the queue: %v", q.d.Err())
	}
	req.head = head
}

func (q *rigQueue) ring() {
	q.rig.t.Helper()
	if q.d.Publish() {
		must(q.rig.t, sys.EventfdWrite(q.kick, 1))
	}
}

// next waits for the next used element.
func (q *rigQueue) next() (head uint16, written uint32) {
	q.rig.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		if head, written, ok := q.d.Used(); ok {
			return head, written
		}
		must(q.rig.t, q.d.Err())
		if q.d.ArmCalls(1) {
			continue
		}
		if time.Now().After(deadline) {
			q.rig.t.Fatalf("no completion with %d requests out", q.d.Out())
		}
		ready, err := sys.PpollIn(q.call, int64(time.Second))
		if err != nil && !errors.Is(err, syscall.EINTR) {
			q.rig.t.Fatal(err)
		}
		if ready {
			must(q.rig.t, sys.EventfdTake(q.call))
			q.calls++
		}
	}
}

// do runs one request and answers its status and used length.
func (q *rigQueue) do(req *request) (virtioblk.Status, uint32) {
	q.rig.t.Helper()
	q.add(req)
	q.ring()
	head, written := q.next()
	if head != req.head {
		q.rig.t.Fatalf("head %d came back, %d was sent", head, req.head)
	}
	return virtioblk.Status(req.status.Bytes[0]), written
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
