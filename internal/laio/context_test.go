// SPDX-License-Identifier: Apache-2.0

package laio

import (
	"bytes"
	"errors"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

// These tests drive real contexts on files in memory or on disk, once with completions taken from the mapped ring and
// once with io_getevents, and made-up ones through the seam.

// patience is far beyond what any of this takes on a machine that is busy with something else.
const patience = 60 * time.Second

func newContext(t *testing.T, events int) *Context {
	t.Helper()
	c, err := New(events, nil)
	if errors.Is(err, syscall.ENOSYS) || errors.Is(err, syscall.EPERM) {
		t.Skipf("needs Linux AIO: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// bothWays runs a test with the mapped ring and without it.
func bothWays(t *testing.T, events int, test func(t *testing.T, c *Context)) {
	t.Run("ring", func(t *testing.T) {
		c := newContext(t, events)
		if !c.UserRing() {
			t.Skip("needs a kernel whose completion ring this package knows")
		}
		test(t, c)
	})
	t.Run("getevents", func(t *testing.T) {
		c := newContext(t, events)
		c.ring = nil
		test(t, c)
	})
}

func tempFile(t *testing.T, size int64) int {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return int(f.Fd())
}

// run submits one prepared request and waits for its result.
func run(t *testing.T, c *Context, cb *IOCB) int64 {
	t.Helper()
	if n, err := c.Submit([]*IOCB{cb}); n != 1 || err != nil {
		t.Fatalf("submit: %d, %v", n, err)
	}
	return collect(t, c, 1)[0].Res
}

// collect takes n completions.
func collect(t *testing.T, c *Context, n int) []Event {
	t.Helper()
	var got []Event
	var events [3]Event // fewer than there are, so that reaping goes on where it ended
	for deadline := time.Now().Add(patience); len(got) < n; {
		k := c.Reap(events[:])
		got = append(got, events[:k]...)
		if k == 0 {
			if time.Now().After(deadline) {
				t.Fatalf("%d of %d completions", len(got), n)
			}
			runtime.Gosched()
		}
	}
	return got
}

func TestEachOpcode(t *testing.T) {
	bothWays(t, 8, func(t *testing.T, c *Context) {
		fd := tempFile(t, 1<<20)
		var cb IOCB
		one, two := bytes.Repeat([]byte{1}, 512), bytes.Repeat([]byte{2}, 1024)
		PrepWrite(&cb, fd, sys.IOVecOf(one), 4096)
		if res := run(t, c, &cb); res != 512 {
			t.Fatalf("write: %d", res)
		}
		vs := []sys.IOVec{sys.IOVecOf(two), sys.IOVecOf(one)}
		PrepWritev(&cb, fd, vs, 4096+512)
		Durable(&cb)
		if res := run(t, c, &cb); res != 1536 {
			t.Fatalf("durable vectored write: %d", res)
		}
		got := make([]byte, 2048)
		PrepRead(&cb, fd, sys.IOVecOf(got), 4096)
		if res := run(t, c, &cb); res != 2048 || !bytes.Equal(got, bytes.Join([][]byte{one, two, one}, nil)) {
			t.Fatalf("read: %d, or not what was written", res)
		}
		a, b := make([]byte, 512), make([]byte, 1024)
		vs = []sys.IOVec{sys.IOVecOf(a), sys.IOVecOf(b)}
		PrepReadv(&cb, fd, vs, 4096)
		if res := run(t, c, &cb); res != 1536 || !bytes.Equal(a, one) || !bytes.Equal(b, two) {
			t.Fatalf("vectored read: %d, or not what was written", res)
		}
		PrepFdsync(&cb, fd)
		if res := run(t, c, &cb); res != 0 {
			t.Fatalf("fdsync: %d", res)
		}
		efd, err := sys.Eventfd(1, sys.EFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		defer syscall.Close(efd)
		PrepPoll(&cb, efd, sys.POLLIN)
		if res := run(t, c, &cb); res != sys.POLLIN {
			t.Fatalf("poll: %d", res)
		}
		runtime.KeepAlive(vs)
	})
}

// TestRingGoesRound completes many times as many requests as the ring has places.
func TestRingGoesRound(t *testing.T) {
	bothWays(t, 4, func(t *testing.T, c *Context) {
		fd := tempFile(t, 4096)
		buf := make([]byte, 512)
		cbs := make([]IOCB, 4)
		ptrs := make([]*IOCB, 4)
		for round := range uint64(200) {
			for i := range cbs {
				PrepRead(&cbs[i], fd, sys.IOVecOf(buf), 0)
				Tag(&cbs[i], round*4+uint64(i))
				ptrs[i] = &cbs[i]
			}
			if n, err := c.Submit(ptrs); n != 4 || err != nil {
				t.Fatalf("round %d: %d, %v", round, n, err)
			}
			seen := uint64(0)
			for _, ev := range collect(t, c, 4) {
				if ev.Res != 512 || ev.Data/4 != round {
					t.Fatalf("round %d: event %+v", round, ev)
				}
				seen |= 1 << (ev.Data % 4)
			}
			if seen != 0xf {
				t.Fatalf("round %d: tags %b", round, seen)
			}
		}
		if c.ring != nil && c.Ready() {
			t.Error("ready, with nothing in flight")
		}
	})
}

// TestBadRequestInTheMiddle shows what the kernel does with a batch that has one: it takes what stands before, and says
// what is wrong when the bad one is first.
func TestBadRequestInTheMiddle(t *testing.T) {
	c := newContext(t, 8)
	fd := tempFile(t, 4096)
	buf := make([]byte, 512)
	var good, bad, last IOCB
	PrepRead(&good, fd, sys.IOVecOf(buf), 0)
	PrepRead(&bad, math.MaxInt32, sys.IOVecOf(buf), 0)
	PrepRead(&last, fd, sys.IOVecOf(buf), 0)
	if n, err := c.Submit([]*IOCB{&good, &bad, &last}); n != 1 || err != nil {
		t.Fatalf("three: %d, %v", n, err)
	}
	if n, err := c.Submit([]*IOCB{&bad, &last}); n != 0 || err != syscall.EBADF {
		t.Fatalf("two: %d, %v", n, err)
	}
	if n, err := c.Submit([]*IOCB{&last}); n != 1 || err != nil {
		t.Fatalf("one: %d, %v", n, err)
	}
	collect(t, c, 2)
}

// TestSignalNeverWaits fills a blocking eventfd to its limit, so that a write to it would wait, and has a completion
// signal it all the same.
func TestSignalNeverWaits(t *testing.T) {
	c := newContext(t, 8)
	efd, err := sys.Eventfd(0, sys.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(efd)
	if err := sys.EventfdWrite(efd, math.MaxUint64-1); err != nil {
		t.Fatal(err)
	}
	if sys.EventfdHasRoom(efd) {
		t.Fatal("the eventfd still has room")
	}
	zero, err := os.Open("/dev/zero")
	if err != nil {
		t.Fatal(err)
	}
	defer zero.Close()
	done := make(chan error, 1)
	go func() {
		var cb IOCB
		for range 3 {
			PrepRead(&cb, int(zero.Fd()), sys.IOVec{}, 0)
			Signal(&cb, efd)
			if _, err := c.Submit([]*IOCB{&cb}); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(patience):
		t.Fatal("a submission that signals a full eventfd waits")
	}
	collect(t, c, 3)
}

func TestSignalCounts(t *testing.T) {
	c := newContext(t, 8)
	efd, err := sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(efd)
	fd := tempFile(t, 4096)
	buf := make([]byte, 512)
	cbs := make([]IOCB, 3)
	var ptrs []*IOCB
	for i := range cbs {
		PrepRead(&cbs[i], fd, sys.IOVecOf(buf), 0)
		Signal(&cbs[i], efd)
		ptrs = append(ptrs, &cbs[i])
	}
	if n, err := c.Submit(ptrs); n != 3 || err != nil {
		t.Fatalf("submit: %d, %v", n, err)
	}
	collect(t, c, 3)
	// The signal follows the event, so the last one may still be under way.
	sum := uint64(0)
	for deadline := time.Now().Add(patience); sum < 3 && time.Now().Before(deadline); runtime.Gosched() {
		v, _ := sys.EventfdRead(efd)
		sum += v
	}
	if sum != 3 {
		t.Fatalf("signalled %d times", sum)
	}
}

func TestCloseGivesTheContextBack(t *testing.T) {
	c := newContext(t, 8)
	id := c.id
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
	if _, err := sys.IoSubmit(id, nil); err != syscall.EINVAL {
		t.Errorf("the kernel still knows the context: %v", err)
	}
	if n, err := c.Submit([]*IOCB{{}}); n != 0 || err != syscall.EBADF {
		t.Errorf("submit after close: %d, %v", n, err)
	}
	if c.Ready() || c.Reap(make([]Event, 1)) != 0 {
		t.Error("completions after close")
	}
}

// TestCloseWaits closes with a poll in flight that nobody will end: the kernel cancels it, and Close returns.
func TestCloseWaits(t *testing.T) {
	c := newContext(t, 8)
	efd, err := sys.Eventfd(0, sys.EFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(efd)
	var cb IOCB
	PrepPoll(&cb, efd, sys.POLLIN)
	if n, err := c.Submit([]*IOCB{&cb}); n != 1 || err != nil {
		t.Fatalf("submit: %d, %v", n, err)
	}
	done := make(chan error, 1)
	go func() { done <- c.Close() }()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(patience):
		t.Fatal("close waits for a poll that never ends")
	}
}

// TestMoreThanTheSystemHas asks for more than fs.aio-max-nr, which the kernel always refuses with EAGAIN.
func TestMoreThanTheSystemHas(t *testing.T) {
	newContext(t, 1) // skips where there is no AIO at all
	limit := procNumber("/proc/sys/fs/aio-max-nr")
	if limit == 0 || limit > 1<<22 {
		t.Skipf("needs an fs.aio-max-nr that one context can exceed, it is %d", limit)
	}
	_, err := New(int(limit)+1, nil)
	if !errors.Is(err, syscall.EAGAIN) {
		t.Fatalf("error %v", err)
	}
	for _, want := range []string{"fs.aio-max-nr is " + strconv.FormatInt(limit, 10), "sysctl -w fs.aio-max-nr="} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q lacks %q", err, want)
		}
	}
}

func TestSetupErrors(t *testing.T) {
	for _, c := range []struct {
		err  error
		want string
	}{
		{syscall.EAGAIN, "fs.aio-max-nr"},
		{syscall.ENOSYS, "CONFIG_AIO"},
		{syscall.EPERM, "forbids"},
		{syscall.ENOMEM, "cannot allocate memory"},
	} {
		k := SystemKernel()
		k.Setup = func(uint32) (unsafe.Pointer, error) { return nil, c.err }
		_, err := New(8, k)
		if !errors.Is(err, c.err) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v", c.err, err)
		}
	}
	if _, err := New(0, nil); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("no events: %v", err)
	}
}

// fakeRing is a completion ring as a kernel would map it.
type fakeRing struct {
	sys.AIORing
	events [4]Event
}

func sound() *fakeRing {
	return &fakeRing{AIORing: sys.AIORing{NR: 4, Magic: ringMagic, CompatFeatures: 1, HeaderLengthOfRing: 32}}
}

// fakeContext lives on r; io_getevents answers with one event of data 99.
func fakeContext(t *testing.T, r *fakeRing, getevents error) *Context {
	k := &Kernel{
		Setup:   func(uint32) (unsafe.Pointer, error) { return unsafe.Pointer(r), nil },
		Destroy: func(unsafe.Pointer) error { return nil },
		Getevents: func(_ unsafe.Pointer, _ int, events []Event) (int, error) {
			if getevents != nil {
				return 0, getevents
			}
			events[0] = Event{Data: 99}
			return 1, nil
		},
	}
	c, err := New(4, k)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestUnknownRing gives rings that are not as this package knows them: completions come from the kernel's own call.
func TestUnknownRing(t *testing.T) {
	for name, spoil := range map[string]func(r *fakeRing){
		"magic":    func(r *fakeRing) { r.Magic++ },
		"compat":   func(r *fakeRing) { r.CompatFeatures = 2 },
		"incompat": func(r *fakeRing) { r.IncompatFeatures = 1 },
		"header":   func(r *fakeRing) { r.HeaderLengthOfRing = 64 },
		"empty":    func(r *fakeRing) { r.NR = 0 },
		"huge":     func(r *fakeRing) { r.NR = ringMax + 1 },
	} {
		r := sound()
		spoil(r)
		c := fakeContext(t, r, nil)
		events := make([]Event, 2)
		if c.UserRing() || !c.Ready() || c.Reap(events) != 1 || events[0].Data != 99 {
			t.Errorf("%s: the ring was believed", name)
		}
	}
}

func TestRingOutOfBounds(t *testing.T) {
	for _, at := range [][2]uint32{{4, 0}, {0, 4}, {math.MaxUint32, 1}} {
		r := sound()
		c := fakeContext(t, r, syscall.EINTR)
		r.Head, r.Tail = at[0], at[1]
		if n := c.Reap(make([]Event, 8)); n != 0 {
			t.Errorf("head %d, tail %d: %d events", at[0], at[1], n)
		}
	}
}

// TestRingOrder takes events across the ring's end, two at a time.
func TestRingOrder(t *testing.T) {
	r := sound()
	c := fakeContext(t, r, nil)
	for i := range r.events {
		r.events[i].Data = uint64(i)
	}
	r.Head, r.Tail = 2, 1
	events := make([]Event, 2)
	var got []uint64
	for n := c.Reap(events); n > 0; n = c.Reap(events) {
		for _, ev := range events[:n] {
			got = append(got, ev.Data)
		}
	}
	if len(got) != 3 || got[0] != 2 || got[1] != 3 || got[2] != 0 || r.Head != 1 || c.Ready() {
		t.Fatalf("events %v, head %d", got, r.Head)
	}
}

func TestLayout(t *testing.T) {
	if unsafe.Sizeof(IOCB{}) != 64 || unsafe.Sizeof(Event{}) != 32 || unsafe.Sizeof(sys.AIORing{}) != 32 {
		t.Fatal("structures differ in size from the kernel's")
	}
	var cb IOCB
	PrepPoll(&cb, 3, 5)
	Signal(&cb, 4)
	PrepFdsync(&cb, 6)
	if cb != (IOCB{LioOpcode: sys.IOCB_CMD_FDSYNC, Fildes: 6}) {
		t.Fatalf("left over from the last use: %+v", cb)
	}
}

func TestNoAllocations(t *testing.T) {
	bothWays(t, 8, func(t *testing.T, c *Context) {
		fd := tempFile(t, 4096)
		buf := make([]byte, 512)
		var cb IOCB
		ptrs := []*IOCB{&cb}
		events := make([]Event, 4)
		if n := testing.AllocsPerRun(100, func() {
			PrepRead(&cb, fd, sys.IOVecOf(buf), 0)
			if _, err := c.Submit(ptrs); err != nil {
				t.Error(err)
			}
			for c.Reap(events) == 0 {
				runtime.Gosched()
			}
		}); n != 0 {
			t.Errorf("%v allocations a request", n)
		}
	})
}
