// SPDX-License-Identifier: Apache-2.0

package blocktest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
)

// Subject is what the suite runs over.
type Subject struct {
	// Open makes a fresh writable node of size bytes that reads as zeros, at least as seen through what it keeps.
	Open func(t *testing.T, size int64) block.Node
	// KeepsNothing is for a node that forgets what is written.
	KeepsNothing bool
	// Loop describes the loops; nil is the default.
	Loop *aio.LoopOptions
}

// DiskSize is the size that the suite opens nodes with: it is a multiple of every alignment in use.
const DiskSize = 2 << 20

// bed is a fresh node behind a handle on a loop.
type bed struct {
	*Disk
	s Subject
	n block.Node
	h *block.Handle
}

func (s Subject) bed(t *testing.T, o *block.HandleOptions) *bed {
	t.Helper()
	return s.bedOn(t, Loop(t, s.Loop), o)
}

func (s Subject) bedOn(t *testing.T, l *aio.Loop, o *block.HandleOptions) *bed {
	t.Helper()
	n := s.Open(t, DiskSize)
	h := block.NewHandle(n, o)
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Errorf("close handle: %v", err)
		}
	})
	return &bed{Disk: Guarded(t, l, h), s: s, n: n, h: h}
}

// expect reads [offset, offset+len(want)) and compares.
func (b *bed) expect(t *testing.T, offset int64, want []byte) {
	t.Helper()
	if b.s.KeepsNothing {
		return
	}
	got := make([]byte, len(want))
	Pattern(got, offset, 200)
	if err := b.Read(offset, got); err != nil {
		t.Fatal(err)
	}
	if at := firstDifference(got, want); at >= 0 {
		t.Fatalf("byte at %d is %#x, want %#x", offset+int64(at), got[at], want[at])
	}
}

func firstDifference(a, b []byte) int {
	if bytes.Equal(a, b) {
		return -1
	}
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

// Conform runs the suite.
func Conform(t *testing.T, s Subject) {
	for _, c := range []struct {
		name string
		run  func(t *testing.T, s Subject)
	}{
		{"InfoIsSound", infoIsSound},
		{"BareNodeTakesWhatInfoAllows", bareNode},
		{"BytesComeBack", bytesComeBack},
		{"AnyOffsetLengthAndAddress", anyShape},
		{"ManySegments", manySegments},
		{"OutOfRangeIsRefused", outOfRange},
		{"MalformedIsRefused", malformed},
		{"NothingIsDoneForNoBytes", noBytes},
		{"FlushAndFUA", flushAndFUA},
		{"WriteCacheOff", writeCacheOff},
		{"ZeroesAreZero", zeroes},
		{"DiscardLeavesTheRest", discard},
		{"ReadOnlyRefusesChanges", readOnly},
		{"ManyAtOnce", manyAtOnce},
		{"DrainWaitsAndHoldsArrivals", drain},
		{"TwoLoops", twoLoops},
		{"RandomAgainstModel", func(t *testing.T, s Subject) { Random(t, s, 12, 24) }},
		{"EachFailureIsTold", NthFailure},
		{"CloseWhileBusyIsRefused", closeBusy},
	} {
		t.Run(c.name, func(t *testing.T) { c.run(t, s) })
	}
}

func infoIsSound(t *testing.T, s Subject) {
	b := s.bed(t, nil)
	i := b.n.Info()
	for name, n := range map[string]int{"Align": i.Align, "MemAlign": i.MemAlign} {
		if n < 1 || n&(n-1) != 0 {
			t.Errorf("%s is %d, want a power of two", name, n)
		}
	}
	if i.Size != DiskSize || i.Size%int64(i.Align) != 0 {
		t.Errorf("Size is %d, want %d, a multiple of Align %d", i.Size, DiskSize, i.Align)
	}
	if i.Name == "" || i.Durability == "" || i.Engine == "" {
		t.Errorf("a text is missing: name %q, durability %q, engine %q", i.Name, i.Durability, i.Engine)
	}
	h := b.h.Info()
	if h.Align != 1 || h.MemAlign != 1 || h.MaxTransfer != 0 || h.Size != i.Size {
		t.Errorf("handle shows alignment %d, %d, limit %d, size %d", h.Align, h.MemAlign, h.MaxTransfer, h.Size)
	}
	if h.LogicalBlock < 512 || h.PhysicalBlock < h.LogicalBlock {
		t.Errorf("blocks are %d and %d", h.LogicalBlock, h.PhysicalBlock)
	}
}

func bareNode(t *testing.T, s Subject) {
	n := s.Open(t, DiskSize)
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Errorf("close node: %v", err)
		}
	})
	d := Bare(t, Loop(t, s.Loop), n)
	i := n.Info()
	unit := max(i.Align, i.MemAlign, 512)
	n4 := 4 * unit
	if i.MaxTransfer > 0 {
		n4 = min(n4, int(i.MaxTransfer)/unit*unit)
	}
	cut := unit
	if i.MaxSegments > 0 {
		cut = max(cut, (n4/unit+i.MaxSegments-1)/i.MaxSegments*unit)
	}
	w, r := Memory(n4, unit, 0), Memory(n4, unit, 0)
	Pattern(w, 0, 1)
	flush := func() error {
		if i.Flush == block.None {
			return nil
		}
		return d.Flush()
	}
	for _, at := range []int64{0, int64(unit), DiskSize - int64(len(w))} {
		if err := errors.Join(d.Write(at, Segments(w, cut)...), flush(), d.Read(at, r)); err != nil {
			t.Fatal(err)
		}
		if !s.KeepsNothing && !bytes.Equal(r, w) {
			t.Fatalf("other bytes at %d", at)
		}
	}
	if i.FUA == block.Native {
		if err := d.Run(&Call{Op: block.OpWrite, Flags: block.FlagFUA, Offset: 0, Bufs: [][]byte{w}}); err != nil {
			t.Fatal(err)
		}
	}
	unit = max(unit, int(i.SpaceAlign))
	if i.WriteZeroes == block.Native {
		for _, f := range []block.Flags{0, block.FlagUnmap, block.FlagFUA} {
			if f == block.FlagFUA && i.FUA != block.Native {
				continue
			}
			if err := d.Zero(0, int64(unit), f); err != nil && block.Errno(err) != syscall.EOPNOTSUPP {
				t.Fatal(err)
			}
		}
	}
	if i.Discard == block.Native {
		if err := d.Discard(0, int64(unit)); err != nil && block.Errno(err) != syscall.EOPNOTSUPP {
			t.Fatal(err)
		}
	}
}

func bytesComeBack(t *testing.T, s Subject) {
	b := s.bed(t, nil)
	b.expect(t, 0, make([]byte, 64<<10))
	whole := make([]byte, DiskSize)
	Pattern(whole, 0, 2)
	if err := b.Write(0, whole); err != nil {
		t.Fatal(err)
	}
	b.expect(t, 0, whole)
	for _, at := range []int64{0, 512, DiskSize - 512} {
		p := whole[at : at+512]
		Pattern(p, at, 3)
		if err := b.Write(at, p); err != nil {
			t.Fatal(err)
		}
	}
	b.expect(t, 0, whole)
}

// anyShape writes at odd places from odd addresses, and looks at the neighbours.
func anyShape(t *testing.T, s Subject) {
	b := s.bed(t, nil)
	model := make([]byte, 256<<10)
	Pattern(model, 0, 4)
	if err := b.Write(0, model); err != nil {
		t.Fatal(err)
	}
	round := byte(5)
	for _, at := range []int64{0, 1, 511, 512, 513, 3584, 4095, 4096, 4097, 65535} {
		for _, n := range []int{1, 2, 511, 512, 513, 4095, 4096, 4097, 9000} {
			for _, skew := range []int{0, 1, 512} {
				w := Memory(n, 4096, skew)
				Pattern(w, at, round)
				round++
				if err := b.Write(at, Segments(w, 700)...); err != nil {
					t.Fatal(err)
				}
				copy(model[at:], w)
				r := Memory(n, 4096, skew)
				if err := b.Read(at, Segments(r, 333)...); err != nil {
					t.Fatal(err)
				}
				if !s.KeepsNothing && !bytes.Equal(r, w) {
					t.Fatalf("other bytes at %d+%d, address %d", at, n, skew)
				}
			}
		}
	}
	b.expect(t, 0, model)
}

// manySegments sends as many segments as a guest may, and more, from a sector that is on no 4 KiB block.
func manySegments(t *testing.T, s Subject) {
	b := s.bed(t, nil)
	model := make([]byte, 1500<<10)
	Pattern(model, 0, 6)
	if err := b.Write(0, model); err != nil {
		t.Fatal(err)
	}
	for _, n := range []int{2, 127, 128, 129, 1023, 1024, 1025, 2500} {
		w := Memory(n*512, 512, 512)
		Pattern(w, 512, byte(n))
		copy(model[512:], w)
		r := Memory(n*512, 512, 512)
		if err := errors.Join(b.Write(512, Segments(w, 512)...), b.Read(512, Segments(r, 512)...)); err != nil {
			t.Fatalf("%d segments: %v", n, err)
		}
		if !s.KeepsNothing && !bytes.Equal(r, w) {
			t.Fatalf("other bytes with %d segments", n)
		}
	}
	b.expect(t, 0, model)
}

func outOfRange(t *testing.T, s Subject) {
	b := s.bed(t, nil)
	buf := make([]byte, 1024)
	for _, at := range []int64{DiskSize, DiskSize - 512, DiskSize + 1, 1 << 55, math.MaxInt64 - 100, -1, -512, math.MinInt64} {
		for _, op := range []block.Op{block.OpRead, block.OpWrite, block.OpDiscard, block.OpWriteZeroes} {
			c := &Call{Op: op, Offset: at, Bufs: [][]byte{buf}, Length: 1024}
			if err := b.Run(c); !errors.Is(err, block.ErrRange) || block.Errno(err) != syscall.EIO {
				t.Errorf("%s: %v, want %v", c, err, block.ErrRange)
			}
		}
	}
	for _, n := range []int64{math.MaxInt64, DiskSize + 1, -1} {
		c := &Call{Op: block.OpWriteZeroes, Offset: 0, Length: n}
		if err := b.Run(c); !errors.Is(err, block.ErrRange) {
			t.Errorf("%s: %v, want %v", c, err, block.ErrRange)
		}
	}
	b.expect(t, DiskSize-512, make([]byte, 512))
}

func malformed(t *testing.T, s Subject) {
	b := s.bed(t, nil)
	huge := []byte{1}
	for _, c := range []*Call{
		{Op: block.OpRead, Length: 512, Bufs: [][]byte{make([]byte, 511)}},
		{Op: block.OpWrite, Length: 512, Bufs: [][]byte{make([]byte, 513)}},
		{Op: block.OpWrite, Length: 512},
		{Op: block.OpRead, Length: 512, Bufs: [][]byte{huge, make([]byte, 512)}},
		{Op: block.OpWriteZeroes + 1, Length: 512},
		{Op: 255, Length: 512},
	} {
		if err := b.Run(c); !errors.Is(err, block.ErrMalformed) {
			t.Errorf("%s: %v, want %v", c, err, block.ErrMalformed)
		}
	}
}

func noBytes(t *testing.T, s Subject) {
	b := s.bed(t, nil)
	for _, op := range []block.Op{block.OpRead, block.OpWrite, block.OpWriteZeroes} {
		for _, at := range []int64{0, 77, DiskSize} {
			if err := b.Run(&Call{Op: op, Offset: at}); err != nil {
				t.Error(err)
			}
		}
	}
}

func flushAndFUA(t *testing.T, s Subject) {
	b := s.bed(t, nil)
	w := make([]byte, 5000)
	Pattern(w, 300, 7)
	err := b.Run(&Call{Op: block.OpWrite, Flags: block.FlagFUA, Offset: 300, Bufs: [][]byte{w}})
	if b.h.Info().FUA == block.None {
		if !errors.Is(err, block.ErrNotSupported) {
			t.Errorf("FUA gives %v, and is not offered", err)
		}
		return
	}
	if err := errors.Join(err, b.Flush()); err != nil {
		t.Fatal(err)
	}
	b.expect(t, 300, w)
}

func writeCacheOff(t *testing.T, s Subject) {
	b := s.bed(t, &block.HandleOptions{Cache: block.CacheWritethrough})
	if b.h.Info().WriteCache {
		t.Error("write cache is on")
	}
	w := make([]byte, 8192)
	Pattern(w, 512, 8)
	if err := errors.Join(b.Write(512, w), b.Zero(20000, 5000, 0)); err != nil {
		t.Fatal(err)
	}
	if got, want := b.SetWriteCache(true), b.n.Info().WriteCache; got != want {
		t.Errorf("write cache is %v after it was switched on, want %v as the node has it", got, want)
	}
	b.expect(t, 512, w)
}

func zeroes(t *testing.T, s Subject) {
	b := s.bed(t, nil)
	model := make([]byte, 512<<10)
	for _, flags := range []block.Flags{0, block.FlagUnmap, block.FlagFUA, block.FlagUnmap | block.FlagFUA} {
		Pattern(model, 0, 9+byte(flags))
		if err := b.Write(0, model); err != nil {
			t.Fatal(err)
		}
		for _, r := range [][2]int64{{0, 512}, {1000, 1}, {4095, 2}, {8192, 4096}, {10000, 100000}, {131072, 65536}, {300001, 200003}} {
			if err := b.Zero(r[0], r[1], flags); err != nil {
				t.Fatal(err)
			}
			clear(model[r[0] : r[0]+r[1]])
		}
		b.expect(t, 0, model)
	}
}

func discard(t *testing.T, s Subject) {
	b := s.bed(t, nil)
	model := make([]byte, 256<<10)
	Pattern(model, 0, 10)
	if err := b.Write(0, model); err != nil {
		t.Fatal(err)
	}
	ranges := [][2]int64{{0, 4096}, {10001, 3}, {20000, 70001}, {131072, 65536}}
	for _, r := range ranges {
		offered := b.h.Info().Discard != block.None
		err := b.Discard(r[0], r[1])
		if !offered && !errors.Is(err, block.ErrNotSupported) || offered && err != nil && block.Errno(err) != syscall.EOPNOTSUPP {
			t.Fatalf("discard, which is offered: %v, gives %v", offered, err)
		}
	}
	last := int64(0)
	for _, r := range append(ranges, [2]int64{int64(len(model)), 0}) {
		b.expect(t, last, model[last:r[0]])
		last = r[0] + r[1]
	}
}

func readOnly(t *testing.T, s Subject) {
	b := s.bed(t, &block.HandleOptions{ReadOnly: true})
	i := b.h.Info()
	if !i.ReadOnly || i.Discard != block.None || i.WriteZeroes != block.None {
		t.Errorf("handle shows read-only %v, discard %s, zeroes %s", i.ReadOnly, i.Discard, i.WriteZeroes)
	}
	for _, op := range []block.Op{block.OpWrite, block.OpDiscard, block.OpWriteZeroes} {
		c := &Call{Op: op, Length: 512, Bufs: [][]byte{make([]byte, 512)}}
		if err := b.Run(c); !errors.Is(err, block.ErrReadOnly) || block.Errno(err) != syscall.EROFS {
			t.Errorf("%s: %v, want %v", c, err, block.ErrReadOnly)
		}
	}
	if err := errors.Join(b.Read(0, make([]byte, 4096)), b.Flush()); err != nil {
		t.Error(err)
	}
}

// manyAtOnce submits more than any queue or pool holds, in one turn.
func manyAtOnce(t *testing.T, s Subject) {
	b := s.bed(t, nil)
	const n = 1200
	model := make([]byte, n*1536)
	Pattern(model, 0, 11)
	var calls []*Call
	for i := range int64(n) {
		calls = append(calls, &Call{Op: block.OpWrite, Offset: i * 1536, Bufs: [][]byte{model[i*1536 : (i+1)*1536]}})
		if i%100 == 0 {
			calls = append(calls, &Call{Op: block.OpFlush})
		}
	}
	if err := b.Run(calls...); err != nil {
		t.Fatal(err)
	}
	b.expect(t, 0, model)
	stats, err := b.h.Stats(context.Background())
	if err != nil || stats.Writes != n || stats.WriteBytes != n*1536 || stats.Flushes != n/100 || stats.Errors != 0 {
		t.Errorf("counted %+v, %v", stats, err)
	}
}

// drain drains under load, with arrivals, and twice.
func drain(t *testing.T, s Subject) {
	b := s.bed(t, nil)
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	load := func(n int) *Batch {
		var calls []*Call
		for i := range n {
			calls = append(calls, &Call{Op: block.OpWrite, Offset: int64(i) * 700, Bufs: [][]byte{make([]byte, 700)}})
		}
		return b.Start(calls...)
	}
	for range 5 {
		before := load(200)
		if err := errors.Join(b.h.Drain(ctx), b.h.Drain(ctx)); err != nil {
			t.Fatal(err)
		}
		if !before.Done() {
			t.Fatal("requests are in flight in a drained handle")
		}
		held := load(100)
		b.h.Resume()
		_ = On(t, b.Loop, func() error { return nil })
		if held.left.Load() != 100 {
			t.Fatal("a request went through the door of a drained handle")
		}
		if err := On(t, b.Loop, b.Q.Close); !errors.Is(err, block.ErrBusy) {
			t.Fatalf("closing a queue with requests at the door gives %v", err)
		}
		b.h.Resume()
		if err := errors.Join(before.Wait(t), held.Wait(t)); err != nil {
			t.Fatal(err)
		}
	}
	gone, stop := context.WithCancel(ctx)
	stop()
	if err := b.h.Drain(gone); err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("drain that was given up: %v", err)
	} else if err == nil {
		b.h.Resume()
	}
	if err := b.Write(0, make([]byte, 512)); err != nil {
		t.Errorf("after a drain that was given up: %v", err)
	}
}

// twoLoops has two loops write neighbouring sectors, so that on coarse blocks each is in the way of the other. A node of
// one loop refuses a second one, and is written by two queues of the first.
func twoLoops(t *testing.T, s Subject) {
	b := s.bed(t, nil)
	l := Loop(t, s.Loop)
	if b.n.Info().SingleLoop {
		if err := On(t, l, func() error { _, err := b.h.Queue(l); return err }); !errors.Is(err, block.ErrBusy) {
			t.Fatalf("a queue on a second loop: %v, want that it is in use", err)
		}
		l = b.Loop
	}
	second := Guarded(t, l, b.h)
	const sectors = 1024
	model := make([]byte, sectors*512)
	for round := range byte(4) {
		Pattern(model, 0, 20+round)
		var even, odd []*Call
		for i := range int64(sectors) {
			c := &Call{Op: block.OpWrite, Offset: i * 512, Bufs: [][]byte{model[i*512 : (i+1)*512]}}
			if i%2 == 0 {
				even = append(even, c)
			} else {
				odd = append(odd, c)
			}
		}
		b1, b2 := b.Start(even...), second.Start(odd...)
		if err := errors.Join(b1.Wait(t), b2.Wait(t)); err != nil {
			t.Fatal(err)
		}
		b.expect(t, 0, model)
		if err := b.h.Drain(context.Background()); err != nil {
			t.Fatal(err)
		}
		b.h.Resume()
	}
	stats, err := b.h.Stats(context.Background())
	if err != nil || stats.Writes != 4*sectors {
		t.Errorf("both loops counted %d writes, %v", stats.Writes, err)
	}
	second.Close()
}

func closeBusy(t *testing.T, s Subject) {
	b := s.bed(t, nil)
	if err := b.h.Close(); !errors.Is(err, block.ErrBusy) {
		t.Errorf("closing a handle with an open queue gives %v", err)
	}
	call := &Call{Op: block.OpRead, Bufs: [][]byte{make([]byte, 4096)}}
	var err error
	batch := &Batch{Calls: []*Call{call}, done: make(chan struct{})}
	batch.left.Store(1)
	call.d, call.batch = b.Disk, batch
	call.req = block.Request{Op: block.OpRead, Length: 4096, Mem: []block.IOVec{aio.IOVecOf(call.Bufs[0])}, Done: call}
	_ = On(t, b.Loop, func() error {
		b.Q.Submit(&call.req)
		err = b.Q.Close()
		return nil
	})
	if !errors.Is(err, block.ErrBusy) || !strings.Contains(fmt.Sprint(err), "in flight") {
		t.Errorf("closing a queue with a request in flight gives %v", err)
	}
	if err := batch.Wait(t); err != nil {
		t.Error(err)
	}
}
