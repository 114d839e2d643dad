// SPDX-License-Identifier: Apache-2.0

package vhostuser_test

import (
	"errors"
	"os"
	"sync"
	"testing"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhosttest"
	. "github.com/sluice-blk/sluice/internal/vhostuser"
)

func openFile(t *testing.T, path string) int {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return int(f.Fd())
}

// busyDevice is a device whose queues touch their memory all the time, in a goroutine of their own, as a loop would.
// A table that is unmapped too early is a fault, which ends the test's process.
type busyDevice struct {
	*fakeDevice
	use  sync.Mutex // held by the loop while it uses the table
	mem  *guestmem.Map
	at   uint64
	stop chan struct{}
	done chan struct{}
}

func (d *busyDevice) StartQueue(v Vring) error {
	if err := d.fakeDevice.StartQueue(v); err != nil {
		return err
	}
	d.mem, d.at, d.stop, d.done = v.Mem, v.Desc, make(chan struct{}), make(chan struct{})
	go d.loop(d.stop, d.done)
	return nil
}

func (d *busyDevice) loop(stop, done chan struct{}) {
	defer close(done)
	for {
		select {
		case <-stop:
			return
		default:
		}
		d.use.Lock()
		b, err := d.mem.UserSlice(d.at, 4096)
		for i := range b {
			b[i]++
		}
		d.use.Unlock()
		if err != nil {
			panic(err) // the session keeps running rings inside the table
		}
	}
}

func (d *busyDevice) SetMem(m *guestmem.Map) error {
	d.use.Lock()
	d.mem = m
	d.use.Unlock()
	return d.fakeDevice.SetMem(m)
}

func (d *busyDevice) StopQueue(index int) (uint16, error) {
	close(d.stop)
	<-d.done
	return d.fakeDevice.StopQueue(index)
}

func TestMemoryTableReplacedUnderARunningQueue(t *testing.T) {
	fake := newFake()
	fake.queues = 1
	b := openDevice(t, fake, &busyDevice{fakeDevice: fake})
	b.start(1)
	more, err := vhosttest.NewMemory(1<<33, 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	defer more.Close()
	for range 1000 {
		b.must(b.SetMemTable(b.mem.Region(), more.Region()))
		b.must(b.SetMemTable(b.mem.Region()))
		b.must(b.AddMemReg(more.Region()))
		b.must(b.RemMemReg(more.Region()))
	}
	b.runs(0, true)
	if got := b.dev.since(b.dev.lines() - 2); got[0] != "mem 2" || got[1] != "mem 1" {
		t.Errorf("journal ends with %q", got)
	}
}

func TestRingWhoseMemoryIsGoneStopsAndComesBackWithIt(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(2)
	b.dev.take(0, 4)
	from := b.dev.lines()
	b.must(b.SetMemTable())
	b.journal(from, "stop 0 at 4", "stop 1 at 0")
	from = b.dev.lines()
	b.must(b.SetMemTable(b.mem.Region()))
	b.journal(from, "start 0 size 128 base 4", "start 1 size 128 base 0")
	from = b.dev.lines()
	b.must(b.RemMemReg(b.mem.Region()))
	b.must(b.AddMemReg(b.mem.Region()))
	b.journal(from, "stop 0 at 4", "stop 1 at 0", "start 0 size 128 base 4", "start 1 size 128 base 0")
}

func TestRingThatTheNewTableLacksStopsBeforeTheDeviceHearsOfIt(t *testing.T) {
	b := open(t, newFake(), nil)
	b.negotiate()
	other, err := vhosttest.NewMemory(0, 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	b.must(b.SetMemTable(b.mem.Region(), other.Region()))
	b.must(b.SetVring(b.ring(0)))
	elsewhere := b.ring(1)
	elsewhere.Desc, elsewhere.Avail, elsewhere.Used = other.UserAddr(0), other.UserAddr(4096), other.UserAddr(8192)
	b.must(b.SetVring(elsewhere))
	from := b.dev.lines()
	b.must(b.SetMemTable(b.mem.Region()))
	b.journal(from, "stop 1 at 0", "mem 1")
	b.runs(0, true)
}

func TestRingInOneOfSeveralRegionsWaitsForIt(t *testing.T) {
	b := open(t, newFake(), nil)
	b.must(b.Negotiate(allFeatures, ProtocolOffered))
	if n, err := b.AskU64(GetMaxMemSlots); err != nil || n < 32 {
		t.Fatalf("%d slots, %v", n, err)
	}
	b.must(b.SetVring(b.ring(0)))
	other, err := vhosttest.NewMemory(0, 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	b.must(b.AddMemReg(other.Region()))
	b.runs(0, false)
	b.must(b.AddMemReg(b.mem.Region()))
	b.runs(0, true)
}

func TestDeviceThatCannotSwapTheTableHasItsQueuesRestarted(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(2)
	b.dev.failing("mem", errors.New("no"))
	from := b.dev.lines()
	b.must(b.SetMemTable(b.mem.Region()))
	b.journal(from, "mem 1", "stop 0 at 0", "stop 1 at 0", "start 0 size 128 base 0", "start 1 size 128 base 0")
}

func TestBadMemoryTablesAreRefusedAndChangeNothing(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(1)
	good := b.mem.Region()
	with := func(change func(r *guestmem.Region)) guestmem.Region {
		r := good
		change(&r)
		return r
	}
	null, pipeEnd := openFile(t, "/dev/null"), eventfd(t)
	for name, table := range map[string][]guestmem.Region{
		"longer than the file":  {with(func(r *guestmem.Region) { r.Size += 1 << 24 })},
		"offset past the file":  {with(func(r *guestmem.Region) { r.Offset = 1 << 20 })},
		"offset and size wrap":  {with(func(r *guestmem.Region) { r.Offset = ^uint64(0) - 4095 })},
		"guest address wraps":   {with(func(r *guestmem.Region) { r.GuestAddr = ^uint64(0) - 4095 })},
		"user address wraps":    {with(func(r *guestmem.Region) { r.UserAddr = ^uint64(0) - 4095 })},
		"2^62 bytes":            {with(func(r *guestmem.Region) { r.Size = 1 << 62 })},
		"no bytes":              {with(func(r *guestmem.Region) { r.Size = 0 })},
		"guest ranges overlap":  {good, with(func(r *guestmem.Region) { r.GuestAddr += 4096; r.UserAddr += 1 << 30 })},
		"user ranges overlap":   {good, with(func(r *guestmem.Region) { r.GuestAddr += 1 << 30; r.UserAddr += 4096 })},
		"twice the same":        {good, good},
		"second one is bad":     {good, with(func(r *guestmem.Region) { r.GuestAddr, r.UserAddr, r.Size = 0, 0, 1<<20+1 })},
		"/dev/null":             {with(func(r *guestmem.Region) { r.FD = null })},
		"an eventfd for memory": {with(func(r *guestmem.Region) { r.FD = pipeEnd })},
	} {
		from := b.dev.lines()
		if err := b.SetMemTable(table...); !errors.Is(err, vhosttest.ErrRefused) {
			t.Errorf("%s: %v", name, err)
		}
		if err := b.AddMemReg(table[len(table)-1]); !errors.Is(err, vhosttest.ErrRefused) {
			t.Errorf("%s, added: %v", name, err)
		}
		b.journal(from)
		b.runs(0, true)
	}
	for name, bad := range map[string]struct {
		payload []byte
		fds     []int
	}{
		"no descriptor":    {AppendMemTable(nil, []guestmem.Region{good}), nil},
		"two descriptors":  {AppendMemTable(nil, []guestmem.Region{good}), []int{good.FD, good.FD}},
		"9 regions":        {AppendMemTable(nil, make([]guestmem.Region, 9)), []int{good.FD}},
		"says 4000":        {append(AppendU64(nil, 4000), make([]byte, 256)...), []int{good.FD}},
		"one, not carried": {AppendU64(nil, 1), []int{good.FD}},
	} {
		if err := b.Tell(SetMemTable, bad.payload, bad.fds...); !errors.Is(err, vhosttest.ErrRefused) {
			t.Errorf("%s: %v", name, err)
		}
	}
	b.refused(b.Tell(AddMemReg, AppendMemReg(nil, with(func(r *guestmem.Region) { r.GuestAddr, r.UserAddr = 0, 0 }))))
	b.refused(b.RemMemReg(with(func(r *guestmem.Region) { r.GuestAddr++ })))
	b.runs(0, true)
	b.must(b.SetMemTable(good))
}

func TestMemoryTruncatedUnderTheSessionIsNoConcernOfTheConversation(t *testing.T) {
	b := open(t, newFake(), nil)
	b.start(1)
	b.must(sys.Ftruncate(b.mem.FD, 0))
	base, err := b.GetVringBase(0)
	if err != nil || base != 0 {
		t.Fatalf("base %d, %v", base, err)
	}
	b.refused(b.SetMemTable(b.mem.Region()))
}
