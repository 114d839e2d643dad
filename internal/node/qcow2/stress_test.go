// SPDX-License-Identifier: Apache-2.0

package qcow2_test

import (
	"bytes"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/node/qcow2"
)

// verifier is a user of a disk who writes, zeroes, discards and flushes in his own parts of it, many requests at a time, and
// compares what he reads. Parts of different requests in flight share clusters, never bytes.
type verifier struct {
	t     *testing.T
	d     *blocktest.Disk
	rng   *rand.Rand
	want  []byte
	known []bool // of each sector
	unit  int64
	round byte
	last  []*blocktest.Call // of the last round
}

func newVerifier(t *testing.T, d *blocktest.Disk, size int64, seed uint64) *verifier {
	return &verifier{t: t, d: d, rng: rand.New(rand.NewPCG(seed, 7)), want: make([]byte, size), known: allTrue(size / 512), unit: 512}
}

func allTrue(n int64) []bool {
	b := make([]bool, n)
	for i := range b {
		b[i] = true
	}
	return b
}

// run carries out one round of up to depth requests at the same time.
func (v *verifier) run(depth int) {
	v.t.Helper()
	v.last = v.calls(depth)
	if err := v.d.Run(v.last...); err != nil {
		v.t.Fatal(err)
	}
	for _, c := range v.last {
		v.settle(c)
	}
}

// calls are up to depth requests that do not overlap.
func (v *verifier) calls(depth int) []*blocktest.Call {
	v.round++
	taken := make(map[int64]bool)
	var calls []*blocktest.Call
	for range depth {
		n := (1 + v.rng.Int64N(8)) * v.unit
		if v.rng.IntN(8) == 0 {
			n *= 24
		}
		off := v.rng.Int64N((int64(len(v.want))-n)/v.unit+1) * v.unit
		free := true
		for at := off; at < off+n; at += v.unit {
			free = free && !taken[at]
		}
		if !free {
			continue
		}
		for at := off; at < off+n; at += v.unit {
			taken[at] = true
		}
		calls = append(calls, v.call(off, n))
	}
	return calls
}

func (v *verifier) call(off, n int64) *blocktest.Call {
	c := &blocktest.Call{Offset: off}
	switch k := v.rng.IntN(20); {
	case k < 1:
		c.Op, c.Length = block.OpDiscard, n
	case k < 3:
		c.Op, c.Length = block.OpWriteZeroes, n
		if k == 2 {
			c.Flags = block.FlagUnmap
		}
	case k < 4:
		c.Op, c.Offset = block.OpFlush, 0
	default:
		c.Op = block.OpRead
		buf := blocktest.Memory(int(n), 4096, 0)
		if k < 14 {
			c.Op = block.OpWrite
			blocktest.Pattern(buf, off, v.round)
		}
		c.Bufs = blocktest.Segments(buf, 4096)
	}
	return c
}

func (v *verifier) settle(c *blocktest.Call) {
	v.t.Helper()
	at := c.Offset
	switch c.Op {
	case block.OpDiscard:
		v.know(at, c.Length, false)
	case block.OpWriteZeroes:
		clear(v.want[at : at+c.Length])
		v.know(at, c.Length, true)
	case block.OpWrite, block.OpRead:
		for _, b := range c.Bufs {
			if c.Op == block.OpWrite {
				copy(v.want[at:], b)
				v.know(at, int64(len(b)), true)
			} else {
				v.compare(at, b)
			}
			at += int64(len(b))
		}
	}
}

// know notes that it is known what whole sectors hold, or that it is not.
func (v *verifier) know(at, n int64, is bool) {
	for i := at / 512; i < (at+n)/512; i++ {
		v.known[i] = is
	}
}

func (v *verifier) compare(at int64, got []byte) {
	v.t.Helper()
	if bytes.Equal(got, v.want[at:at+int64(len(got))]) {
		return
	}
	for i := range got {
		if p := at + int64(i); v.known[p/512] && got[i] != v.want[p] {
			v.t.Fatalf("byte at %#x is %#x, want %#x", p, got[i], v.want[p])
		}
	}
}

// all reads the whole disk.
func (v *verifier) all() {
	v.t.Helper()
	buf := make([]byte, 1<<20)
	for at := int64(0); at < int64(len(v.want)); at += int64(len(buf)) {
		b := buf[:min(int64(len(buf)), int64(len(v.want))-at)]
		if err := v.d.Read(at, b); err != nil {
			v.t.Fatal(err)
		}
		v.compare(at, b)
	}
}

func seedOf(t *testing.T) uint64 {
	seed := uint64(time.Now().UnixNano())
	if text := os.Getenv(blocktest.SeedVariable); text != "" {
		n, err := strconv.ParseUint(text, 0, 64)
		if err != nil {
			t.Fatal(err)
		}
		seed = n
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("repeat with %s=%d", blocktest.SeedVariable, seed)
		}
	})
	return seed
}

// Many requests at the same time in few clusters, with caches that hold next to nothing.
func TestManyRequestsInFewClusters(t *testing.T) {
	rounds := 60
	if testing.Short() || raced {
		rounds = 15
	}
	for _, g := range geometries {
		t.Run(g.name, func(t *testing.T) {
			size := int64(6 << 20)
			var o *qcow2.Options
			if g.o.ClusterSize != 512 {
				o = &qcow2.Options{L2CacheBytes: 4096, RefcountCacheBytes: 4096}
			}
			below := inMemory(t, newImage(t, g.o, size), mem.Options{Size: 256 << 20})
			stress(t, below, o, nil, size, rounds)
		})
	}
}

// The same on files, by each engine, with images and requests that pass the page cache by.
func TestManyRequestsOnFiles(t *testing.T) {
	for _, kind := range []aio.EngineKind{aio.EngineIOUring, aio.EngineLinuxAIO, aio.EngineThreads} {
		t.Run(kind.String(), func(t *testing.T) {
			var lo *aio.LoopOptions
			if kind == aio.EngineIOUring {
				lo = &aio.LoopOptions{Poller: aio.PollerIOUring}
			}
			size := int64(16 << 20)
			stress(t, onFile(t, geometries[0].o, size, file.Options{Engine: kind}), nil, lo, size, 20)
		})
	}
}

func stress(t *testing.T, below block.Node, o *qcow2.Options, lo *aio.LoopOptions, size int64, rounds int) {
	n := open(t, below, o)
	h := block.NewHandle(n, nil)
	l := blocktest.Loop(t, lo)
	d := blocktest.Guarded(t, l, h)
	v := newVerifier(t, d, size, seedOf(t))
	v.unit = int64(max(512, n.Info().Align))
	for range rounds {
		v.run(64)
	}
	v.all()
	d.Close()
	// What was not flushed is there when the image was closed, and is found by whoever opens it next.
	again := blocktest.Guarded(t, l, h)
	v.d = again
	v.all()
	for range 3 {
		v.run(64)
	}
	again.Close()
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}

// More requests than there are coroutines wait for their turn, and each gets it.
func TestMoreRequestsThanCoroutines(t *testing.T) {
	size := int64(32 << 20)
	n := open(t, inMemory(t, newImage(t, geometries[0].o, size), mem.Options{}), nil)
	h := block.NewHandle(n, nil)
	d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
	var calls []*blocktest.Call
	for i := range size / 65536 {
		b := make([]byte, 4096)
		blocktest.Pattern(b, i, 1)
		calls = append(calls, &blocktest.Call{Op: block.OpWrite, Offset: i*65536 + i%16*4096, Bufs: [][]byte{b}})
	}
	if err := d.Run(calls...); err != nil {
		t.Fatal(err)
	}
	for _, c := range calls {
		got := make([]byte, 4096)
		if err := d.Read(c.Offset, got); err != nil || !bytes.Equal(got, c.Bufs[0]) {
			t.Fatalf("at %d: other bytes, or %v", c.Offset, err)
		}
	}
	d.Close()
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}
