// SPDX-License-Identifier: Apache-2.0

package img

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/fault"
	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/node/mem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// lab is two loops and what is open on them.
type lab struct {
	*testing.T
	loops *Loops
}

func newLab(t *testing.T) *lab {
	t.Helper()
	loops, err := StartLoops(2)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(loops.Stop)
	return &lab{t, loops}
}

// disk puts a node behind faults on a loop.
func (l *lab) disk(loop int, n block.Node, faults string) *Disk {
	l.Helper()
	f, err := fault.New(n, faults)
	if err != nil {
		l.Fatal(err)
	}
	d, err := NewDisk(context.Background(), l.loops.At(loop), n.Info().Name, f, nil)
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() {
		if err := d.Close(); err != nil {
			l.Error(err)
		}
	})
	return d
}

// file is an image file with these bytes in it, without those that are zeros where holes is set.
func (l *lab) file(data []byte, holes bool) *file.Node {
	l.Helper()
	path := filepath.Join(l.TempDir(), "image")
	f, err := os.Create(path)
	if err != nil {
		l.Fatal(err)
	}
	const page = 4096
	for at := 0; at < len(data); at += page {
		p := data[at:min(at+page, len(data))]
		if holes && allZero(p) {
			continue
		}
		if _, err := f.WriteAt(p, int64(at)); err != nil {
			l.Fatal(err)
		}
	}
	if err := errors.Join(f.Truncate(int64(len(data))), f.Close()); err != nil {
		l.Fatal(err)
	}
	n, err := file.Open(file.Options{Path: path, Cache: block.CacheWriteback})
	if err != nil {
		l.Fatal(err)
	}
	return n
}

func (l *lab) memory(size int64) block.Node {
	l.Helper()
	n, err := mem.New(mem.Options{Size: size})
	if err != nil {
		l.Fatal(err)
	}
	return n
}

// content reads a whole disk.
func (l *lab) content(d *Disk) []byte {
	l.Helper()
	b := make([]byte, d.Size())
	if err := d.Read(b, 0); err != nil {
		l.Fatal(err)
	}
	return b
}

// patchwork is data, zeros, and zeros in data, of all lengths.
func patchwork(seed uint64, size int64) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	b := make([]byte, size)
	for at := int64(0); at < size; {
		n := min(int64(512)<<r.IntN(12), size-at)
		if r.IntN(2) == 0 {
			for i := range b[at : at+n] {
				b[at+int64(i)] = byte(r.Uint32())
			}
		}
		at += n
	}
	return b
}

func TestConvertCopiesEverything(t *testing.T) {
	const size = 6<<20 + 512
	data := patchwork(3, size)
	for name, c := range map[string]Convert{
		"one worker":        {Sparse: 4096, TargetZero: true, Workers: 1},
		"in order":          {Sparse: 4096, TargetZero: true},
		"out of order":      {Sparse: 4096, TargetZero: true, Workers: 16, OutOfOrder: true},
		"over old data":     {Sparse: 4096},
		"nothing sparse":    {},
		"sparse by sectors": {Sparse: 512, TargetZero: true},
		"sparse by 64k":     {Sparse: 64 << 10, TargetZero: true},
		"sparse by 1500k":   {Sparse: 1500 << 10, TargetZero: true},
		"whole clusters":    {Sparse: 4096, TargetZero: true, Grain: 64 << 10},
		"large clusters":    {Sparse: 4096, Grain: 2 << 20},
		"a part":            {Sparse: 4096, Skip: 777, Length: 3<<20 + 1},
		"a part, whole":     {Skip: 5 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			a, b := data[:size/2&^511], data[size/2&^511:]
			c.Sources = []*Disk{l.disk(0, l.file(a, true), ""), l.disk(0, l.file(b, true), "")}
			want := data[c.Skip:]
			if c.Length > 0 {
				want = want[:c.Length]
			}
			c.Target = l.disk(1, l.memory(size), "")
			if !c.TargetZero {
				if err := c.Target.Write(bytes.Repeat([]byte{7}, size), 0); err != nil {
					t.Fatal(err)
				}
			}
			var mu sync.Mutex
			var done int64
			c.Advance = func(n int64) {
				mu.Lock()
				defer mu.Unlock()
				done += n
			}
			if err := c.Run(context.Background()); err != nil {
				t.Fatal(err)
			}
			if got := l.content(c.Target)[:len(want)]; !bytes.Equal(got, want) {
				t.Errorf("the target differs, first at %d", firstDifference(got, want))
			}
			if done != int64(len(want)) {
				t.Errorf("%d bytes were told as done, want %d", done, len(want))
			}
		})
	}
}

func firstDifference(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

// Every request of source and target fails once, and for ever: it is told each time, with where, and nothing hangs.
func TestConvertTellsEveryFailure(t *testing.T) {
	const size = 3 << 20
	data := patchwork(5, size)
	for _, c := range []struct{ side, op, text string }{
		{"source", "read", "error while reading at byte "},
		{"target", "write", "error while writing at byte "},
		{"target", "write-zeroes", "error while writing at byte "},
		{"target", "flush", "error while flushing"},
	} {
		for _, count := range []string{"count=1", ""} {
			n := 0
			for ; n < 2000; n++ {
				l := newLab(t)
				faults := map[string]string{c.side: fmt.Sprintf("%s after=%d error=ENOSPC %s", c.op, n, count)}
				engine := Convert{Sparse: 4096, Workers: 3, OutOfOrder: n%2 == 0}
				engine.Sources = []*Disk{l.disk(0, l.file(data, true), faults["source"])}
				engine.Target = l.disk(1, l.memory(size), faults["target"])
				injected := func(d *Disk) uint64 { return d.Node().(*fault.Node).Injected() }
				err := engine.Run(context.Background())
				if injected(engine.Sources[0])+injected(engine.Target) == 0 {
					if err != nil {
						t.Fatalf("nothing was injected, yet: %v", err)
					}
					break
				}
				if err == nil || !strings.HasPrefix(err.Error(), c.text) || !strings.HasSuffix(err.Error(), ": No space left on device") {
					t.Fatalf("%s of %s, number %d: %v", c.op, c.side, n, err)
				}
				n += n / 8 // many are alike
			}
			if n == 0 || n >= 2000 {
				t.Errorf("%s of %s: %d failures, which cannot be", c.op, c.side, n)
			}
		}
	}
}

func TestConvertSalvages(t *testing.T) {
	l := newLab(t)
	data := patchwork(9, 2<<20)
	for i := range data[:1<<20] {
		data[i] |= 1
	}
	var told []string
	var mu sync.Mutex
	c := Convert{
		Sources: []*Disk{l.disk(0, l.file(data, true), "read 300000-301000 error=EIO")}, Target: l.disk(1, l.memory(2<<20), ""),
		Sparse: 4096, Workers: 4, Salvage: func(text string) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, text)
		},
	}
	if err := c.Run(context.Background()); err != nil {
		t.Fatal(err)
	}
	const from, to = 300000 &^ 511, (301000 + 511) &^ 511
	clear(data[from:to])
	if !bytes.Equal(l.content(c.Target), data) {
		t.Error("the target differs")
	}
	want := ""
	for _, off := range []int{from, from + 512, from + 1024} {
		want += fmt.Sprintf("error while reading offset %d: Input/output error\n", off)
	}
	if got := strings.Join(told, "\n") + "\n"; got != want {
		t.Errorf("told\n%swant\n%s", got, want)
	}
}

// An interrupt ends a conversion whose source does not hurry.
func TestConvertIsInterrupted(t *testing.T) {
	l := newLab(t)
	data := bytes.Repeat([]byte{1}, 8<<20)
	ctx, cancel := context.WithCancel(context.Background())
	c := Convert{
		Sources: []*Disk{l.disk(0, l.file(data, false), "read delay=20ms")}, Target: l.disk(1, l.memory(8<<20), ""), Workers: 1,
		Advance: func(int64) { cancel() },
	}
	if err := c.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	cancel()
}

func TestPace(t *testing.T) {
	p := pace{rate: 10 << 20}
	start := time.Now()
	for range 8 {
		if err := p.wait(context.Background(), 512<<10); err != nil {
			t.Fatal(err)
		}
	}
	// The last piece may go when the seven before it are paid for, less the slack.
	if took := time.Since(start); took < 240*time.Millisecond {
		t.Errorf("4 MiB at 10 MiB a second took %v", took)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := p.wait(ctx, 1<<40); err == nil {
		err = p.wait(ctx, 1)
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
}

func TestZeroRun(t *testing.T) {
	z, d := make([]byte, 4096), bytes.Repeat([]byte{1}, 4096)
	join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
	for _, c := range []struct {
		b           []byte
		off, sparse int64
		want        string
	}{
		{join(z, z), 0, 4096, "z8192"},
		{join(d, z, d), 0, 4096, "d4096 z4096 d4096"},
		{join(d, z, d), 0, 8192, "d12288"},
		{join(d, z, z, d), 0, 8192, "d16384"},
		{join(d, d, z, z, d), 0, 8192, "d8192 z8192 d4096"},
		{join(d, d, z, z, z, z), 0, 12288, "d8192 z16384"},
		{join(d, z), 0, 8192, "d8192"},
		{join(z, d), 0, 8192, "d8192"},
		{join(d[:100], z[:512], d[:412]), 0, 512, "d1024"},
		{join(d[:512], z[:512], d[:512]), 0, 512, "d512 z512 d512"},
		{join(z, d, z)[2048:], 2048, 4096, "d6144 z4096"},
		{join(d, z)[:4097], 0, 4096, "d4096 z1"},
	} {
		var got []string
		for b, off := c.b, c.off; len(b) > 0; {
			n, zero := zeroRun(b, off, c.sparse)
			got = append(got, fmt.Sprintf("%c%d", "dz"[map[bool]int{true: 1}[zero]], n))
			b, off = b[n:], off+int64(n)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%d bytes, sparse %d: %v, want %s", len(c.b), c.sparse, got, c.want)
		}
	}
}
