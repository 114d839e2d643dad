// SPDX-License-Identifier: Apache-2.0

package vhostuser_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhosttest"
	. "github.com/sluice-blk/sluice/internal/vhostuser"
)

// patience is how long a test waits for something that must happen.
const patience = 60 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeDevice is a device that does nothing with its queues but keep a journal, and tells every call that breaks the
// contract of Device.
type fakeDevice struct {
	mu       sync.Mutex
	features uint64
	queues   int
	config   []byte
	gone     bool             // the config space has no device behind it any more
	fail     map[string]error // by the first word of the journal's line
	journal  []string
	running  map[int]Vring
	next     map[int]uint16 // what StopQueue will say
	mem      *guestmem.Map  // of the queues that run
	broken   []string
	touch    func(v Vring) // looks at a queue's memory, when it starts and before it stops
}

func newFake() *fakeDevice {
	return &fakeDevice{
		features: 1<<9 | 1<<12, queues: 4, config: []byte("0123456789"), fail: map[string]error{},
		running: map[int]Vring{}, next: map[int]uint16{},
	}
}

// note writes a line into the journal and gives the error that is planned for it.
func (d *fakeDevice) note(format string, args ...any) error {
	line := fmt.Sprintf(format, args...)
	d.journal = append(d.journal, line)
	word, _, _ := strings.Cut(line, " ")
	return d.fail[word]
}

func (d *fakeDevice) breach(format string, args ...any) {
	d.broken = append(d.broken, fmt.Sprintf(format, args...))
}

func (d *fakeDevice) Features() uint64 { return d.features }
func (d *fakeDevice) NumQueues() int   { return d.queues }

func (d *fakeDevice) SetFeatures(negotiated uint64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.running) > 0 {
		d.breach("SetFeatures while %d queues run", len(d.running))
	}
	return d.note("features %#x", negotiated)
}

func (d *fakeDevice) ReadConfig(offset uint32, p []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.gone || uint64(offset)+uint64(len(p)) > uint64(len(d.config)) {
		return errors.New("no such config space")
	}
	copy(p, d.config[offset:])
	return nil
}

func (d *fakeDevice) WriteConfig(offset uint32, p []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if uint64(offset)+uint64(len(p)) > uint64(len(d.config)) {
		return errors.New("no such config space")
	}
	copy(d.config[offset:], p)
	return d.note("config %d %q", offset, p)
}

func (d *fakeDevice) StartQueue(v Vring) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, is := d.running[v.Index]; is {
		d.breach("queue %d started twice", v.Index)
	}
	d.checkVring(v)
	if err := d.note("start %d size %d base %d", v.Index, v.Size, v.Base); err != nil {
		return err
	}
	d.running[v.Index], d.next[v.Index], d.mem = v, v.Base, v.Mem
	return nil
}

func (d *fakeDevice) checkVring(v Vring) {
	if v.Index < 0 || v.Index >= d.queues || v.Size == 0 || v.Size&(v.Size-1) != 0 || v.Desc%16 != 0 {
		d.breach("queue %+v is not whole", v)
	}
	for _, part := range [][2]uint64{{v.Desc, 16 * uint64(v.Size)}, {v.Avail, 4 + 2*uint64(v.Size)}, {v.Used, 4 + 8*uint64(v.Size)}} {
		if _, err := v.Mem.UserSlice(part[0], part[1]); err != nil {
			d.breach("queue %d: part at %#x: %v", v.Index, part[0], err)
		}
	}
	for _, fd := range []int{v.Kick, v.Call, v.Err} {
		if flags, err := sys.FcntlGetfd(fd); fd != -1 && (err != nil || flags&1 == 0) {
			d.breach("queue %d: descriptor %d has flags %#x, %v: want close-on-exec", v.Index, fd, flags, err)
		}
	}
	if d.touch != nil {
		d.touch(v)
	}
}

func (d *fakeDevice) StopQueue(index int) (uint16, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	v, is := d.running[index]
	if !is {
		d.breach("queue %d stopped though it does not run", index)
	}
	v.Mem = d.mem
	d.checkVring(v) // everything is still there
	delete(d.running, index)
	return d.next[index], d.note("stop %d at %d", index, d.next[index])
}

func (d *fakeDevice) SetMem(m *guestmem.Map) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.note("mem %d", len(m.Regions())); err != nil {
		return err
	}
	d.mem = m
	for _, v := range d.running {
		v.Mem = m
		d.checkVring(v)
	}
	return nil
}

func (d *fakeDevice) SetCall(index int, fd int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, is := d.running[index]; !is {
		d.breach("call of queue %d set though it does not run", index)
	}
	if err := d.note("call %d %v", index, fd >= 0); err != nil {
		return err
	}
	v := d.running[index]
	v.Call = fd
	d.running[index] = v
	return nil
}

func (d *fakeDevice) Reset() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.running) > 0 {
		d.breach("Reset while %d queues run", len(d.running))
	}
	d.note("reset")
}

// take pretends that the device took n more entries of a queue.
func (d *fakeDevice) take(index int, n uint16) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.next[index] += n
}

func (d *fakeDevice) failing(word string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail[word] = err
}

// since is the journal from a line on, with the lines that begin with one of the words left out.
func (d *fakeDevice) since(from int, without ...string) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(d.journal[from:]), func(line string) bool {
		return slices.ContainsFunc(without, func(w string) bool { return strings.HasPrefix(line, w) })
	})
}

// lines is how long the journal is.
func (d *fakeDevice) lines() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.journal)
}

func (d *fakeDevice) vring(index int) (Vring, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	v, is := d.running[index]
	return v, is
}

// verify fails the test when the contract was broken or the device is not at rest.
func (d *fakeDevice) verify(t *testing.T) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, b := range d.broken {
		t.Errorf("device contract broken: %s", b)
	}
	if len(d.running) > 0 {
		t.Errorf("%d queues run after the session", len(d.running))
	}
	if n := len(d.journal); n == 0 || d.journal[n-1] != "reset" {
		t.Errorf("the session did not end with a reset: %q", d.journal)
	}
}

// bench is a session under test: a front-end, a device, and what the front-end hands over.
type bench struct {
	*vhosttest.Frontend
	t     *testing.T
	dev   *fakeDevice
	mem   *vhosttest.Memory
	kicks []int
	calls []int
	done  chan error
	stop  context.CancelFunc
}

// open starts a session. When the test ends it is closed, and the device's contract and the descriptors are looked at.
func open(t *testing.T, dev *fakeDevice, o *ServerOptions) *bench {
	t.Helper()
	return openWith(t, dev, dev, o)
}

// openDevice is open for a device that wraps a fake one.
func openDevice(t *testing.T, dev *fakeDevice, outer Device) *bench {
	t.Helper()
	return openWith(t, dev, outer, nil)
}

func openWith(t *testing.T, dev *fakeDevice, outer Device, o *ServerOptions) *bench {
	t.Helper()
	checkDescriptors(t)
	f, back, err := vhosttest.Pair()
	if err != nil {
		t.Fatal(err)
	}
	mem, err := vhosttest.NewMemory(1<<32, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	b := &bench{Frontend: f, t: t, dev: dev, mem: mem, done: make(chan error, 1), stop: stop}
	for range dev.queues {
		b.kicks, b.calls = append(b.kicks, eventfd(t)), append(b.calls, eventfd(t))
	}
	go func() { b.done <- ServeConn(ctx, back, outer, o) }()
	t.Cleanup(func() {
		b.Close()
		b.end()
		stop()
		dev.verify(t)
		if err := mem.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// end waits for the session's end and tells how it was; it may be asked again.
func (b *bench) end() error {
	b.t.Helper()
	select {
	case err := <-b.done:
		b.done <- err
		return err
	case <-time.After(patience):
		b.t.Fatal("the session does not end")
		return nil
	}
}

func eventfd(t *testing.T) int {
	t.Helper()
	fd, err := sys.Eventfd(0, sys.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sys.Close(fd) })
	return fd
}

// ringSize is the size of the rings of ring.
const ringSize = 128

// ring is a ring of ringSize entries in the bench's memory.
func (b *bench) ring(index int) vhosttest.Vring {
	at := index * 0x4000
	return vhosttest.Vring{
		Index: index, Size: ringSize, Desc: b.mem.UserAddr(at), Avail: b.mem.UserAddr(at + 0x1000),
		Used: b.mem.UserAddr(at + 0x2000), Kick: b.kicks[index], Call: b.calls[index], Err: -1,
	}
}

// allFeatures is what a front-end of today negotiates.
const allFeatures = ^uint64(0)

// negotiate does it all but rings.
func (b *bench) negotiate() {
	b.t.Helper()
	b.must(b.Negotiate(allFeatures, ProtocolOffered))
	b.must(b.SetMemTable(b.mem.Region()))
}

// start negotiates and starts rings 0 to n-1.
func (b *bench) start(n int) {
	b.t.Helper()
	b.negotiate()
	for i := range n {
		b.must(b.SetVring(b.ring(i)))
	}
}

func (b *bench) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// sync returns when the back-end has obeyed all that was sent.
func (b *bench) sync() {
	b.t.Helper()
	_, err := b.AskU64(GetFeatures)
	b.must(err)
}

func (b *bench) refused(err error) {
	b.t.Helper()
	if !errors.Is(err, vhosttest.ErrRefused) {
		b.t.Fatalf("got %v, want %v", err, vhosttest.ErrRefused)
	}
}

func (b *bench) runs(index int, want bool) {
	b.t.Helper()
	if _, is := b.dev.vring(index); is != want {
		b.t.Fatalf("queue %d runs: %v, want %v; journal %q", index, is, want, b.dev.since(0))
	}
}

// journal compares what the device was told since a line.
func (b *bench) journal(from int, want ...string) {
	b.t.Helper()
	if got := b.dev.since(from); !slices.Equal(got, want) {
		b.t.Fatalf("the device was told %q, want %q", got, want)
	}
}

// descriptors are the open descriptors of this process and what is behind them, and its mappings of guest memory. Those of the runtime's poller and of
// the directory itself come and go.
func descriptors(t testing.TB) map[string]int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]int{}
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name()))
		if err != nil || strings.Contains(target, "eventpoll") || strings.HasPrefix(target, "/proc/") {
			continue
		}
		kind, _, _ := strings.Cut(target, ":[") // socket:[123] and pipe:[123] are counted by kind
		kinds[kind]++
	}
	kinds["mapping of guest memory"] = mappings(t)
	return kinds
}

// mappings is how many mappings of a front-end's memory this process has, its own and the back-end's.
func mappings(t testing.TB) int {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(maps), "/memfd:guest")
}

// checkDescriptors fails the test when more descriptors are open at its end than now. The runtime's poller has an
// eventfd of its own, made at its first use, so that is made first.
func checkDescriptors(t *testing.T) {
	t.Helper()
	warm, back, err := vhosttest.Pair()
	if err != nil {
		t.Fatal(err)
	}
	_ = warm.Close()
	_ = back.Close()
	before := descriptors(t)
	t.Cleanup(func() {
		for kind, n := range descriptors(t) {
			if n > before[kind] {
				t.Errorf("%d descriptors of %s are open, %d were", n, kind, before[kind])
			}
		}
	})
}
