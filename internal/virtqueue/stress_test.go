// SPDX-License-Identifier: Apache-2.0

package virtqueue_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/virtqtest"
	"github.com/sluice-blk/sluice/internal/virtqueue"
)

// Goal: a driver and a device that run at the same time lose nothing and never wait for a wake-up that does not come.
// Method: two goroutines on one memory, each sleeping on a channel that stands for an eventfd, with random batches so
// that both fall asleep often; every chain carries a number that the device sends back changed.

const stuck = 2 * time.Minute // far beyond what a loaded machine needs

func TestDriverAndDeviceLoseNoWakeUp(t *testing.T) {
	for _, c := range []struct {
		conf    virtqtest.DriverConfig
		threads bool // each side on a thread of its own, which is slower and runs at the same time more often
		items   uint64
	}{
		{virtqtest.DriverConfig{Size: 64, EventIdx: true}, false, 1_000_000},
		{virtqtest.DriverConfig{Size: 64, EventIdx: true}, true, 200_000},
		{virtqtest.DriverConfig{Size: 64}, true, 200_000},
		{virtqtest.DriverConfig{Size: 64, EventIdx: true, Indirect: true, TableSize: 4}, true, 100_000},
		{virtqtest.DriverConfig{Size: 2, EventIdx: true, Indirect: true, TableSize: 4}, true, 50_000},
	} {
		t.Run(fmt.Sprintf("%+v threads=%v", c.conf, c.threads), func(t *testing.T) {
			stress(t, c.conf, c.threads, c.items)
		})
	}
}

func stress(t *testing.T, c virtqtest.DriverConfig, threads bool, items uint64) {
	r := newRig(t, c)
	kick, call := make(chan struct{}, 1), make(chan struct{}, 1)
	late := time.After(stuck)
	failed := make(chan error, 2)
	stop := make(chan struct{})
	side := func(run func() error) {
		if threads {
			runtime.LockOSThread() // until the goroutine ends, and the thread with it
		}
		failed <- run()
	}
	go side(func() error { return device(r.q, kick, call, stop) })
	go side(func() error { return guest(r, items, kick, call, stop) })
	for n := range 2 {
		select {
		case err := <-failed:
			if err != nil {
				t.Error(err)
			}
			if n == 0 {
				close(stop)
			}
		case <-late:
			close(stop)
			t.Fatalf("a wake-up was lost: next %d, used %d, driver has %d out", r.q.LastAvail(), r.q.UsedIdx(), r.d.Out())
		}
	}
}

// signal is a write to an eventfd.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// device serves the queue until it is told to stop.
func device(q *virtqueue.Queue, kick, call, stop chan struct{}) error {
	c := virtqueue.NewChain(16)
	var heads []uint16
	for {
		q.DisableKicks()
		for more := true; more; {
			for {
				ok, err := q.Pop(c)
				if err != nil {
					return err
				}
				if !ok {
					break
				}
				if c.Err != nil {
					return c.Err
				}
				n := binary.LittleEndian.Uint64(c.Readable[0].Bytes())
				binary.LittleEndian.PutUint64(c.Writable[0].Bytes(), ^n)
				heads = append(heads, c.Head)
			}
			for _, head := range heads {
				q.Push(head, 8)
			}
			heads = heads[:0]
			if q.Publish() {
				signal(call)
			}
			more = q.EnableKicks()
		}
		select {
		case <-kick:
		case <-stop:
			return nil
		}
	}
}

// guest sends so many numbers through the queue and checks what comes back.
func guest(r *rig, items uint64, kick, call, stop chan struct{}) error {
	rnd := rand.New(rand.NewPCG(1, items))
	size := uint64(r.d.Size())
	numbers := make([]uint64, size)
	var sent, back uint64
	readable, writable := make([]virtqtest.Segment, 1), make([]virtqtest.Segment, 2)
	for back < items {
		for range 1 + rnd.Uint64N(size) {
			if sent == items || sent-back == size {
				break
			}
			// Fewer than size chains are out and they come back in order, so the place of this number is free.
			at := r.buf.Addr + sent%size*64
			binary.LittleEndian.PutUint64(r.mem.At(at, 8), sent)
			readable[0] = seg(at, 8)
			writable[0], writable[1] = seg(at+16, 8), seg(at+32, 1)
			head, ok := r.d.Add(readable, writable)
			if !ok {
				break
			}
			numbers[head] = sent
			sent++
		}
		if r.d.Publish() {
			signal(kick)
		}
		for {
			head, n, ok := r.d.Used()
			if !ok {
				break
			}
			want := numbers[head]
			if got := binary.LittleEndian.Uint64(r.mem.At(r.buf.Addr+want%size*64+16, 8)); n != 8 || got != ^want || want != back {
				return fmt.Errorf("item %d: number %d came back as %#x with %d bytes", back, want, got, n)
			}
			back++
		}
		if err := r.d.Err(); err != nil {
			return err
		}
		if sent == back || rnd.IntN(4) == 0 {
			continue // without a sleep, so that chains are added while the device works
		}
		wait := uint16(1 + rnd.Uint64N(sent-back))
		if r.d.ArmCalls(wait) {
			continue
		}
		select {
		case <-call:
		case <-stop:
			return fmt.Errorf("the device stopped with %d of %d items", back, items)
		}
		r.d.DisarmCalls()
	}
	return nil
}

// Each side stores and then looks at what the other stored; if neither sees the other, both sleep for ever. The two run
// into that window together, again and again, on two threads: without the fences they miss each other within seconds.
func TestBothSidesNeverMissEachOther(t *testing.T) {
	if runtime.NumCPU() < 2 {
		t.Skip("needs two CPUs: on one the sides do not run at the same time")
	}
	for _, event := range []bool{true, false} {
		t.Run(fmt.Sprintf("event index %v", event), func(t *testing.T) {
			r := newRig(t, virtqtest.DriverConfig{Size: 16, EventIdx: event})
			one := []virtqtest.Segment{seg(r.buf.Addr, 1)}
			var meet gate
			var kick, done bool // the driver writes them before a meeting, and the device's side reads them after it
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				runtime.LockOSThread()
				for !meet.open.Load() {
					r.d.DisarmCalls()
					r.d.Add(one, nil)
					meet.pass(0)
					kick = r.d.Publish()
					meet.pass(0)
					meet.pass(0) // the device has pushed
					done = r.d.ArmCalls(1)
					meet.pass(0)
					r.d.Used()
				}
			}()
			defer func() {
				meet.open.Store(true)
				<-ended
			}()
			begin := time.Now()
			for round := 0; round < meetings && time.Since(begin) < meetingTime; round++ {
				r.q.DisableKicks()
				meet.pass(1)
				more := r.q.EnableKicks()
				meet.pass(1)
				if !more && !kick {
					t.Fatalf("round %d: the device sees no chain, and the driver does not kick", round)
				}
				r.pop(t)
				r.q.Push(r.c.Head, 0)
				meet.pass(1)
				notify := r.q.Publish()
				meet.pass(1)
				if !notify && !done {
					t.Fatalf("round %d: the driver sees no completion, and the device does not notify", round)
				}
			}
		})
	}
}

// Where other work takes a CPU away, a meeting takes as long as the scheduler likes: the time is a bound, not a demand.
const (
	meetings    = 100_000
	meetingTime = 3 * time.Second
)

// gate lets two threads go on at the same instant: both arrive, then both pass.
type gate struct {
	arrived [2]struct {
		n atomic.Uint32
		_ [60]byte // a cache line each
	}
	open atomic.Bool // nobody waits any more
}

func (g *gate) pass(side int) {
	n := g.arrived[side].n.Add(1)
	for spins := 1; g.arrived[1-side].n.Load() < n && !g.open.Load(); spins++ {
		if spins%10_000 == 0 {
			runtime.Gosched() // the other thread may need this CPU
		}
	}
}

// A driver may change anything at any time: descriptors between their copy and their use, indices, heads.
func TestADriverThatScribblesWhileTheDeviceWorksGainsNothing(t *testing.T) {
	h := newHostile(t)
	var stop atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		rnd := rand.New(rand.NewPCG(2, 3))
		memory := h.mem.At(0, hostileSize)
		for !stop.Load() {
			i := rnd.IntN(16)
			d := virtqueue.Desc{
				Addr: rnd.Uint64N(hostileSize + 64), Len: uint32(rnd.IntN(300)),
				Flags: uint16(rnd.IntN(8)), Next: uint16(rnd.IntN(17)),
			}
			if rnd.IntN(4) == 0 {
				d.Addr, d.Len = rnd.Uint64(), rnd.Uint32()
			}
			if d.Flags&virtqueue.DescIndirect != 0 {
				d.Addr, d.Len = uint64(16*rnd.IntN(16)), uint32(16*(1+rnd.IntN(16))) // the table itself
			}
			virtqtest.PutTable(memory[hostileDesc+16*i:], d)
			binary.LittleEndian.PutUint16(memory[hostileAvail+4+2*i:], uint16(rnd.IntN(16)))
			binary.LittleEndian.PutUint16(memory[hostileAvail+2:], uint16(rnd.IntN(20)))
		}
	}()
	c := virtqueue.NewChain(64)
	for i := range 50_000 {
		q := h.queue(t, 16, 0, i%2 == 0, true)
		h.drain(t, q, c)
		q.Close()
	}
	stop.Store(true)
	<-done
}
