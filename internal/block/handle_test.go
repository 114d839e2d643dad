// SPDX-License-Identifier: Apache-2.0

package block_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/sys"
)

// shapes are devices that ask for something. Each must look like any other through a handle.
var shapes = []struct {
	name   string
	change func(i *block.Info)
	refuse bool // zeroes and discard are offered and then refused
}{
	{"align 512", func(i *block.Info) { i.Align, i.MemAlign = 512, 512 }, false},
	{"align 4096", func(i *block.Info) { i.Align, i.MemAlign = 4096, 4096 }, false},
	{"align 4096, memory 4", func(i *block.Info) { i.Align, i.MemAlign = 4096, 4 }, false},
	{"align 1, memory 512", func(i *block.Info) { i.MemAlign = 512 }, false},
	{"align 512, memory 4096", func(i *block.Info) { i.Align, i.MemAlign = 512, 4096 }, false},
	{"align 65536", func(i *block.Info) { i.Align, i.MemAlign = 65536, 65536 }, false},
	{"small transfers", func(i *block.Info) { i.MaxTransfer, i.MaxSegments = 10000, 3 }, false},
	{"small aligned transfers", func(i *block.Info) {
		i.Align, i.MemAlign, i.MaxTransfer, i.MaxSegments = 4096, 512, 10000, 2
		i.MaxDiscard, i.MaxWriteZeroes = 10000, 5000
	}, false},
	{"no FUA, no zeroes, no discard", func(i *block.Info) {
		i.Align, i.FUA, i.WriteZeroes, i.Discard = 4096, block.None, block.None, block.None
	}, false},
	{"zeroes and discard refused", func(i *block.Info) { i.Align = 512 }, true},
	{"no flush, nothing volatile", func(i *block.Info) {
		i.Align, i.FUA, i.Flush, i.WriteCache = 512, block.None, block.None, false
	}, false},
}

func TestEveryShapeLooksTheSame(t *testing.T) {
	for _, shape := range shapes {
		t.Run(shape.name, func(t *testing.T) {
			t.Parallel()
			blocktest.Conform(t, blocktest.Subject{Open: func(t *testing.T, size int64) block.Node {
				n := newMem(t, size)
				s := blocktest.NewShape(t, n, shape.change)
				s.RefuseZeroes, s.RefuseDiscard = shape.refuse, shape.refuse
				return s
			}})
		})
	}
}

func newMem(t *testing.T, size int64) block.Node {
	t.Helper()
	n, err := mem.New(mem.Options{Size: size, Journal: true})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// disk puts a shape above memory behind a handle.
func disk(t *testing.T, o *block.HandleOptions, change func(i *block.Info)) (*blocktest.Disk, *block.Handle, *blocktest.Shape) {
	t.Helper()
	s := blocktest.NewShape(t, newMem(t, blocktest.DiskSize), change)
	h := block.NewHandle(s, o)
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return blocktest.Guarded(t, blocktest.Loop(t, nil), h), h, s
}

func counters(t *testing.T, h *block.Handle) block.Counters {
	t.Helper()
	c, err := h.Stats(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// What a node can take as it is goes to it as it is.
func TestAlignedRequestsAreNotTouched(t *testing.T) {
	d, h, s := disk(t, nil, func(i *block.Info) { i.Align, i.MemAlign = 4096, 512 })
	buf := blocktest.Memory(64<<10, 4096, 0)
	if err := errors.Join(d.Write(8192, blocktest.Segments(buf, 4096)...), d.Read(8192, buf)); err != nil {
		t.Fatal(err)
	}
	c := counters(t, h)
	if c.Bounced+c.Split+c.Merged+c.Waited != 0 || s.Seen(block.OpRead) != 1 || s.Seen(block.OpWrite) != 1 {
		t.Errorf("counted %+v, the node saw %d reads and %d writes", c, s.Seen(block.OpRead), s.Seen(block.OpWrite))
	}
}

// Many small writes at random places of few blocks, from two loops at once: each is as last acknowledged.
func TestPartialWritesOfOneBlockKeepEachOther(t *testing.T) {
	for _, align := range []int{4096, 65536} {
		d, h, _ := disk(t, nil, func(i *block.Info) { i.Align, i.MemAlign = align, align })
		d2 := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
		const sectors = 256
		model := make([]byte, sectors*512)
		rng := rand.New(rand.NewPCG(7, 7))
		for round := range byte(30) {
			var calls [2][]*blocktest.Call
			for _, i := range rng.Perm(sectors)[:100] {
				p := model[i*512 : (i+1)*512]
				blocktest.Pattern(p, int64(i)*512, round+byte(i))
				k := rng.IntN(2)
				calls[k] = append(calls[k], &blocktest.Call{Op: block.OpWrite, Offset: int64(i) * 512, Bufs: [][]byte{p}})
				if rng.IntN(10) == 0 {
					calls[k] = append(calls[k], &blocktest.Call{Op: block.OpFlush})
				}
			}
			a, b := d.Start(calls[0]...), d2.Start(calls[1]...)
			if err := errors.Join(a.Wait(t), b.Wait(t)); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(model))
			if err := d.Read(0, got); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, model) {
				t.Fatalf("a write is lost in round %d, alignment %d", round, align)
			}
		}
		if c := counters(t, h); c.Merged == 0 {
			t.Errorf("no block was read to write a part of it: %+v", c)
		}
		d2.Close()
	}
}

// 1024 segments from an odd sector: with the padding to whole blocks that is more than one vector holds.
func TestPaddingDoesNotOverflowTheVector(t *testing.T) {
	d, h, _ := disk(t, &block.HandleOptions{LogicalBlockSize: 512}, func(i *block.Info) { i.Align, i.MemAlign, i.MaxSegments = 4096, 4096, 1024 })
	whole := make([]byte, 1<<20)
	blocktest.Pattern(whole, 0, 1)
	w := make([]byte, 1024*512)
	blocktest.Pattern(w, 512, 2)
	r := make([]byte, len(w))
	if err := errors.Join(d.Write(0, whole), d.Write(3*512, blocktest.Segments(w, 512)...), d.Read(3*512, blocktest.Segments(r, 512)...)); err != nil {
		t.Fatal(err)
	}
	copy(whole[3*512:], w)
	got := make([]byte, len(whole))
	if err := d.Read(0, got); err != nil || !bytes.Equal(r, w) || !bytes.Equal(got, whole) {
		t.Errorf("other bytes, or %v", err)
	}
	if i := h.Info(); i.LogicalBlock != 512 {
		t.Errorf("handle shows blocks of %d", i.LogicalBlock)
	}
}

// Durable writes on a device without FUA are followed by a flush, and by nothing where nothing is volatile.
func TestDurableWrites(t *testing.T) {
	for _, c := range []struct {
		name          string
		change        func(i *block.Info)
		off           bool // write cache switched off
		flags         block.Flags
		flushes       int64
		durable       bool
		wantFUAOffer  block.Capability
		wantCacheTold bool
	}{
		{"native", func(i *block.Info) {}, false, block.FlagFUA, 0, true, block.Native, true},
		{"emulated", func(i *block.Info) { i.FUA = block.None }, false, block.FlagFUA, 1, true, block.Emulated, true},
		{"cache off, native", func(i *block.Info) {}, true, 0, 0, true, block.Native, false},
		{"cache off, emulated", func(i *block.Info) { i.FUA = block.None }, true, 0, 1, true, block.Emulated, false},
		{"plain write", func(i *block.Info) {}, false, 0, 0, false, block.Native, true},
		{"nothing volatile", func(i *block.Info) { i.WriteCache, i.FUA = false, block.None }, false, block.FlagFUA, 0, false, block.Emulated, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, h, s := disk(t, nil, c.change)
			told := d.SetWriteCache(!c.off)
			if i := h.Info(); i.FUA != c.wantFUAOffer || told != c.wantCacheTold {
				t.Errorf("handle shows FUA %s, write cache %v", i.FUA, told)
			}
			for _, at := range []int64{0, 512, 1001} {
				before := s.Seen(block.OpFlush)
				w := make([]byte, 512)
				blocktest.Pattern(w, at, 3)
				if err := d.Run(&blocktest.Call{Op: block.OpWrite, Flags: c.flags, Offset: at, Bufs: [][]byte{w}}); err != nil {
					t.Fatal(err)
				}
				if n := s.Seen(block.OpFlush) - before; n != c.flushes {
					t.Errorf("%d flushes, want %d", n, c.flushes)
				}
			}
		})
	}
}

// A node that cannot do what it offered is asked once, and not again.
func TestWhatTurnsOutMissingIsRemembered(t *testing.T) {
	d, h, s := disk(t, nil, func(i *block.Info) {})
	s.RefuseZeroes, s.RefuseDiscard = true, true
	for range 3 {
		if err := errors.Join(d.Zero(0, 100000, block.FlagUnmap), d.Zero(0, 4096, 0)); err != nil {
			t.Fatal(err)
		}
		if err := d.Discard(0, 4096); !errors.Is(err, syscall.EOPNOTSUPP) {
			t.Fatalf("discard gives %v", err)
		}
	}
	if s.Seen(block.OpWriteZeroes) != 2 || s.Seen(block.OpDiscard) != 1 {
		t.Errorf("zeroes were tried %d times (once to unmap, once not), discard %d times", s.Seen(block.OpWriteZeroes), s.Seen(block.OpDiscard))
	}
	if i := h.Info(); i.WriteZeroes != block.Emulated || i.Discard != block.None {
		t.Errorf("handle still shows zeroes %s, discard %s", i.WriteZeroes, i.Discard)
	}
}

func TestIgnoredDiscard(t *testing.T) {
	d, h, s := disk(t, &block.HandleOptions{IgnoreDiscard: true}, func(i *block.Info) {})
	if err := errors.Join(d.Write(0, bytes.Repeat([]byte{1}, 512)), d.Discard(0, 512)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 512)
	if err := d.Read(0, b); err != nil || b[0] != 1 {
		t.Errorf("discarded contents: %v, %d", err, b[0])
	}
	if h.Info().Discard != block.None || s.Seen(block.OpDiscard) != 0 {
		t.Error("discard is offered or passed on")
	}
}

// Memory of a guest may vanish while its request is under way. That is an error of the request, whatever way it takes.
func TestMemoryThatVanishes(t *testing.T) {
	page := sys.PageSize()
	fd, err := sys.MemfdCreate("guest", sys.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer sys.Close(fd)
	if err := sys.Ftruncate(fd, int64(page)); err != nil {
		t.Fatal(err)
	}
	p, err := sys.MmapShared(fd, 0, uintptr(page))
	if err != nil {
		t.Fatal(err)
	}
	defer sys.MunmapShared(p, uintptr(page))
	guest := unsafe.Slice((*byte)(p), page)
	if err := sys.Ftruncate(fd, 0); err != nil {
		t.Fatal(err)
	}
	for _, align := range []int{1, 4096} {
		d, _, _ := disk(t, nil, func(i *block.Info) { i.Align = align })
		for _, call := range []*blocktest.Call{
			{Op: block.OpWrite, Offset: 512, Bufs: [][]byte{guest[:512]}},
			{Op: block.OpRead, Offset: 512, Bufs: [][]byte{guest[:512]}},
		} {
			if err := d.Run(call); !errors.Is(err, syscall.EFAULT) {
				t.Errorf("%s, alignment %d: %v, want EFAULT", call, align, err)
			}
		}
		if err := d.Write(512, make([]byte, 512)); err != nil {
			t.Errorf("the next request: %v", err)
		}
	}
}

// A node whose size is no multiple of its blocks loses the rest, rather than have it read past its end.
func TestSizeIsCutToWholeBlocks(t *testing.T) {
	d, h, _ := disk(t, nil, func(i *block.Info) { i.Align, i.Size = 4096, 10000 })
	if h.Info().Size != 8192 {
		t.Errorf("size is %d", h.Info().Size)
	}
	if err := d.Read(8191, make([]byte, 2)); !errors.Is(err, block.ErrRange) {
		t.Error(err)
	}
}

func TestErrorsCarryErrnos(t *testing.T) {
	for _, c := range []struct {
		err  error
		want syscall.Errno
	}{
		{nil, 0},
		{block.ErrNotSupported, syscall.EOPNOTSUPP},
		{block.ErrReadOnly, syscall.EROFS},
		{block.ErrRange, syscall.EIO},
		{block.Corruptf("table at %#x", 0x30000), syscall.EIO},
		{errors.New("without"), syscall.EIO},
	} {
		if got := block.Errno(c.err); got != c.want {
			t.Errorf("%v carries %v, want %v", c.err, got, c.want)
		}
	}
	if err := block.Corruptf("table at %#x", 0x30000); !errors.Is(err, block.ErrCorrupt) || !strings.Contains(err.Error(), "0x30000") {
		t.Error(err)
	}
}

func TestCacheModesByName(t *testing.T) {
	for m := block.CacheDefault; m <= block.CacheUnsafe; m++ {
		if got, err := block.ParseCacheMode(m.String()); err != nil || got != m {
			t.Errorf("%s becomes %s, %v", m, got, err)
		}
	}
	if _, err := block.ParseCacheMode("directsync"); err == nil {
		t.Error("an unknown mode is taken")
	}
}
