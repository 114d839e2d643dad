// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sluice-blk/sluice/internal/hist"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/virtqtest"
)

// job drives one virtqueue from one thread. Nothing in its loop allocates.
type job struct {
	w         *Workload
	queue     int
	driver    *virtqtest.Driver
	kick      int
	call      int
	slots     []ioSlot
	free      []*ioSlot
	byHead    []*ioSlot
	first     int64 // the job's part of the disk, bytes
	size      int64
	next      int64 // of a sequential job
	random    uint64
	pattern   *pattern
	sinceSync int
	flushDue  bool
	started   time.Time
	now       int64 // nanoseconds since started, as of the last look at the clock

	out counts
}

// counts is what a job measured.
type counts struct {
	read, write, trim hist.Hist
	flushes           uint64
	kicks, calls      uint64
	verified          uint64
	cpu               time.Duration
	elapsed           time.Duration
}

// ioSlot is one outstanding request: header, data and status in guest memory.
type ioSlot struct {
	header, data, status virtqtest.Buffer
	readable, writable   [2]virtqtest.Segment
	kind                 virtioblk.RequestType
	offset               int64
	at                   int64 // when it was placed
}

const statusPoison = 0xee

func newJob(w *Workload, queue int, m *virtqtest.Memory, driver *virtqtest.Driver) (*job, error) {
	j := &job{w: w, queue: queue, driver: driver, random: mix(w.Seed + uint64(queue)*0x9e3779b97f4a7c15), kick: -1, call: -1}
	j.slots = make([]ioSlot, w.IODepth)
	j.byHead = make([]*ioSlot, driver.Size())
	for i := range j.slots {
		s := &j.slots[i]
		var err error
		if s.header, err = m.Alloc(max(virtioblk.HeaderSize, virtioblk.DiscardRangeSize)*2, 16); err != nil {
			return nil, err
		}
		if s.data, err = m.Alloc(w.BS, 4096); err != nil {
			return nil, err
		}
		if s.status, err = m.Alloc(1, 1); err != nil {
			return nil, err
		}
		j.free = append(j.free, s)
	}
	var err error
	if j.kick, err = sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("make kick descriptor: %w", err)
	}
	if j.call, err = sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK); err != nil {
		return nil, errors.Join(fmt.Errorf("make call descriptor: %w", err), j.close())
	}
	return j, nil
}

func (j *job) close() error {
	var errs []error
	for _, fd := range []int{j.kick, j.call} {
		if fd >= 0 {
			errs = append(errs, sys.Close(fd))
		}
	}
	return errors.Join(errs...)
}

// run drives the queue until the time is over, then waits for what is outstanding and verifies. stop ends it early: it is
// set when another job has failed.
func (j *job) run(ctx context.Context, stop *atomic.Bool) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	j.started = time.Now()
	end := j.w.RampTime + j.w.Runtime
	cpu := sys.ThreadCPU()
	measured := j.w.RampTime == 0
	for {
		j.now = int64(time.Since(j.started))
		if !measured && j.now >= int64(j.w.RampTime) {
			measured = true
			j.out = counts{verified: j.out.verified}
			cpu = sys.ThreadCPU()
		}
		if j.now >= int64(end) || stop.Load() || ctx.Err() != nil {
			break
		}
		if err := j.fill(); err != nil {
			return err
		}
		if err := j.reap(); err != nil {
			return err
		}
	}
	j.out.elapsed = time.Duration(j.now) - j.w.RampTime
	j.out.cpu = sys.ThreadCPU() - cpu
	kept := j.out
	if err := j.finish(); err != nil {
		return err
	}
	kept.verified = j.out.verified
	j.out = kept
	return ctx.Err()
}

// finish waits for what is outstanding and, to verify, reads everything back that was written.
func (j *job) finish() error {
	for j.driver.Out() > 0 {
		if err := j.reap(); err != nil {
			return err
		}
	}
	if j.pattern == nil {
		return nil
	}
	for block := range j.pattern.generation {
		if j.pattern.generation[block] == 0 {
			continue
		}
		for len(j.free) == 0 {
			if err := j.reap(); err != nil {
				return err
			}
		}
		if err := j.place(virtioblk.TypeIn, j.first+int64(block)*int64(j.w.BS)); err != nil {
			return err
		}
		if len(j.free) == 0 {
			if err := j.ring(); err != nil {
				return err
			}
		}
	}
	if err := j.ring(); err != nil {
		return err
	}
	for j.driver.Out() > 0 {
		if err := j.reap(); err != nil {
			return err
		}
	}
	return nil
}

// fill places requests until the depth is reached, a batch at a time, and kicks.
func (j *job) fill() error {
	placed := 0
	for len(j.free) > 0 && (j.w.Batch == 0 || placed < j.w.Batch) {
		kind, offset, ok := j.choose()
		if !ok {
			break
		}
		if err := j.place(kind, offset); err != nil {
			return err
		}
		placed++
	}
	return j.ring()
}

func (j *job) ring() error {
	if !j.driver.Publish() {
		return j.driver.Err()
	}
	j.out.kicks++
	if err := sys.EventfdWrite(j.kick, 1); err != nil && !errors.Is(err, syscall.EAGAIN) {
		return fmt.Errorf("kick queue %d: %w", j.queue, err)
	}
	return nil
}

// choose picks the next request. It is false when the block that it fell on is busy, or a flush waits for its turn.
func (j *job) choose() (kind virtioblk.RequestType, offset int64, ok bool) {
	k := kinds[j.w.RW]
	if j.flushDue {
		j.flushDue = false
		return virtioblk.TypeFlush, 0, true
	}
	switch {
	case k.trims:
		kind = virtioblk.TypeDiscard
	case k.reads && (!k.writes || int(j.draw()%100) < j.w.RWMixRead):
		kind = virtioblk.TypeIn
	default:
		kind = virtioblk.TypeOut
	}
	blocks := j.size / int64(j.w.BS)
	block := j.next
	if k.random {
		block = int64(j.draw() % uint64(blocks))
	}
	if j.pattern != nil && j.pattern.busy[block] {
		return 0, 0, false
	}
	if !k.random {
		j.next = (j.next + 1) % blocks
	}
	if kind == virtioblk.TypeOut && j.w.Fsync > 0 {
		if j.sinceSync++; j.sinceSync >= j.w.Fsync {
			j.sinceSync, j.flushDue = 0, true
		}
	}
	return kind, j.first + block*int64(j.w.BS), true
}

func (j *job) draw() uint64 {
	j.random += 0x9e3779b97f4a7c15
	return mix(j.random)
}

// place builds the request's chain and adds it to the ring: header and what is written, then what is read and the status.
func (j *job) place(kind virtioblk.RequestType, offset int64) error {
	s := j.free[len(j.free)-1]
	s.kind, s.offset, s.at = kind, offset, j.now
	h := virtioblk.Header{Type: kind}
	s.readable[0] = virtqtest.Segment{Addr: s.header.Addr, Len: virtioblk.HeaderSize}
	data := virtqtest.Segment{Addr: s.data.Addr, Len: uint32(j.w.BS)}
	s.status.Bytes[0] = statusPoison
	s.writable[0] = virtqtest.Segment{Addr: s.status.Addr, Len: 1}
	nr, nw := 1, 1
	switch kind {
	case virtioblk.TypeIn:
		h.Sector = uint64(offset) / virtioblk.SectorSize
		s.writable[0], s.writable[1], nw = data, s.writable[0], 2
	case virtioblk.TypeOut:
		h.Sector = uint64(offset) / virtioblk.SectorSize
		s.readable[1], nr = data, 2
		j.fillBlock(s)
	case virtioblk.TypeDiscard:
		r := virtioblk.DiscardRange{Sector: uint64(offset) / virtioblk.SectorSize, Sectors: uint32(j.w.BS / virtioblk.SectorSize)}
		r.Encode(s.header.Bytes[virtioblk.HeaderSize:])
		s.readable[0].Len += virtioblk.DiscardRangeSize
	}
	h.Encode(s.header.Bytes)
	head, ok := j.driver.Add(s.readable[:nr], s.writable[:nw])
	if !ok {
		return fmt.Errorf("queue %d has no room for a request: %w", j.queue, j.driver.Err())
	}
	j.byHead[head] = s
	j.free = j.free[:len(j.free)-1]
	if j.pattern != nil && kind != virtioblk.TypeFlush {
		j.pattern.busy[(offset-j.first)/int64(j.w.BS)] = true
	}
	return nil
}

func (j *job) fillBlock(s *ioSlot) {
	if j.pattern == nil {
		return
	}
	block := (s.offset - j.first) / int64(j.w.BS)
	j.pattern.generation[block]++
	j.pattern.fill(s.data.Bytes, s.offset-j.first, j.pattern.generation[block])
}

// reap takes what is done; it waits for the first when nothing is.
func (j *job) reap() error {
	var waiting time.Time
	for n, spins := 0, 0; ; {
		head, written, ok := j.driver.Used()
		if ok {
			if n == 0 {
				j.now = int64(time.Since(j.started))
			}
			n++
			s := j.byHead[head]
			j.byHead[head] = nil
			if err := j.done(s, written); err != nil {
				return err
			}
			j.free = append(j.free, s)
			continue
		}
		if err := j.driver.Err(); err != nil {
			return err
		}
		if n > 0 || j.driver.Out() == 0 {
			return nil
		}
		if spins == 0 {
			waiting = time.Now()
		}
		if err := j.await(waiting, spins); err != nil {
			return err
		}
		spins++
	}
}

// spinsPerLook is how often a polling job looks at the ring for each look at the clock.
const spinsPerLook = 1 << 16

// await sleeps until the device calls, or returns at once when it is not to call. It fails when the device has been
// waited for too long.
func (j *job) await(since time.Time, spins int) error {
	if j.w.Poll {
		if spins%spinsPerLook == spinsPerLook-1 {
			return j.patience(since)
		}
		return nil
	}
	if j.driver.ArmCalls(1) {
		return nil
	}
	for {
		_, err := sys.EventfdRead(j.call)
		if err == nil {
			j.out.calls++
			return nil
		}
		if !errors.Is(err, syscall.EAGAIN) {
			return fmt.Errorf("read call descriptor of queue %d: %w", j.queue, err)
		}
		if err := j.patience(since); err != nil {
			return err
		}
		if _, err := sys.PpollIn(j.call, int64(j.w.Hang)); err != nil && !errors.Is(err, syscall.EINTR) {
			return fmt.Errorf("wait for queue %d: %w", j.queue, err)
		}
	}
}

func (j *job) patience(since time.Time) error {
	if time.Since(since) < j.w.Hang {
		return nil
	}
	return fmt.Errorf("queue %d: nothing completed for %v with %d requests out", j.queue, j.w.Hang, j.driver.Out())
}

// done judges one answer and books it.
func (j *job) done(s *ioSlot, written uint32) error {
	if status := virtioblk.Status(s.status.Bytes[0]); status != virtioblk.StatusOK {
		return fmt.Errorf("request type %d at byte %d: status %d", s.kind, s.offset, status)
	}
	want := uint32(1)
	if s.kind == virtioblk.TypeIn {
		want += uint32(j.w.BS)
	}
	if written != want {
		return fmt.Errorf("request type %d at byte %d: used length %d, want %d", s.kind, s.offset, written, want)
	}
	took := uint64(max(0, j.now-s.at))
	switch s.kind {
	case virtioblk.TypeIn:
		j.out.read.Add(took)
	case virtioblk.TypeOut:
		j.out.write.Add(took)
	case virtioblk.TypeDiscard:
		j.out.trim.Add(took)
	default:
		j.out.flushes++
		return nil
	}
	if j.pattern == nil {
		return nil
	}
	j.pattern.busy[(s.offset-j.first)/int64(j.w.BS)] = false
	if s.kind == virtioblk.TypeIn {
		j.out.verified++
		return j.pattern.check(s.data.Bytes, s.offset-j.first)
	}
	return nil
}
