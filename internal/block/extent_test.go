// SPDX-License-Identifier: Apache-2.0

package block_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/fault"
	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/node/null"
	"github.com/sluice-blk/sluice/internal/node/raw"
)

func must[T any](t *testing.T) func(T, error) T {
	return func(n T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
}

// opaque is a node that cannot tell how it stores.
type opaque struct{ block.Node }

func TestMap(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk.raw")
	f := must[*os.File](t)(os.Create(path))
	if err := errors.Join(f.Truncate(1<<20), write(f, 256<<10, 64<<10), f.Close()); err != nil {
		t.Fatal(err)
	}
	ram := must[*mem.Node](t)(mem.New(mem.Options{Size: 1 << 20}))
	d := blocktest.Bare(t, blocktest.Loop(t, nil), ram)
	if err := d.Write(256<<10, make([]byte, 32<<10), []byte{1}); err != nil {
		t.Fatal(err)
	}
	d.Close()
	type e = block.Extent
	const k = 1 << 10
	for name, c := range map[string]struct {
		node   block.Node
		off, n int64
		want   []block.Extent
	}{
		"file": {must[*file.Node](t)(file.Open(file.Options{Path: path})), 0, 1 << 20, []e{
			{Length: 256 * k, Zero: true, Present: true, File: path},
			{Offset: 256 * k, Length: 64 * k, Data: true, Present: true, Host: 256 * k, File: path},
			{Offset: 320 * k, Length: 704 * k, Zero: true, Present: true, Host: 320 * k, File: path},
		}},
		"mem": {ram, 100 * k, 900 * k, []e{
			{Offset: 100 * k, Length: 156 * k, Zero: true, Present: true, Host: 100 * k, File: "mem"},
			{Offset: 256 * k, Length: 64 * k, Data: true, Present: true, Host: 256 * k, File: "mem"},
			{Offset: 320 * k, Length: 680 * k, Zero: true, Present: true, Host: 320 * k, File: "mem"},
		}},
		"window under faults": {must[*fault.Node](t)(fault.New(must[*raw.Node](t)(raw.New(opened(t, path), &raw.Options{Offset: 300 * k})), "")), 10 * k, 40 * k, []e{
			{Offset: 10 * k, Length: 10 * k, Data: true, Present: true, Host: 310 * k, File: path},
			{Offset: 20 * k, Length: 30 * k, Zero: true, Present: true, Host: 320 * k, File: path},
		}},
		"null":        {null.New(null.Options{Size: 4096}), 0, 4096, []e{{Length: 4096, Data: true, Present: true, Host: -1, File: "null"}}},
		"null zeroes": {null.New(null.Options{Size: 4096, ReadZeroes: true}), 1, 2, []e{{Offset: 1, Length: 2, Zero: true, Present: true, Host: -1, File: "null"}}},
		"opaque":      {opaque{null.New(null.Options{Size: 4096})}, 1, 2, []e{{Offset: 1, Length: 2, Data: true, Present: true, Host: -1, File: "null"}}},
		"nothing":     {null.New(null.Options{Size: 1 << 20}), 1 << 20, 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			var got []block.Extent
			collect := func(x block.Extent) error { got = append(got, x); return nil }
			if err := block.Map(context.Background(), c.node, c.off, c.n, collect); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%+v, want %+v", got, c.want)
			}
			stop := errors.New("stop")
			if err := block.Map(context.Background(), c.node, c.off, c.n, func(block.Extent) error { return stop }); len(c.want) > 0 && err != stop {
				t.Errorf("the callback's error: %v", err)
			}
			if err := block.Map(context.Background(), c.node, c.off+1, c.node.Info().Size, collect); !errors.Is(err, syscall.EINVAL) {
				t.Errorf("beyond the end: %v", err)
			}
			if err := c.node.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

func write(f *os.File, at, n int64) error {
	b := make([]byte, n)
	blocktest.Pattern(b, at, 1)
	_, err := f.WriteAt(b, at)
	return err
}

func opened(t *testing.T, path string) block.Node {
	return must[*file.Node](t)(file.Open(file.Options{Path: path}))
}

// What grows has a length, takes writes beyond it, and reads zeros there, on every engine.
func TestGrowable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(path, make([]byte, 700), 0o600); err != nil {
		t.Fatal(err)
	}
	file := must[*file.Node](t)(file.Open(file.Options{Path: path, Growable: true, Cache: block.CacheWriteback}))
	ram := must[*mem.Node](t)(mem.New(mem.Options{Size: 1 << 20, Growable: true}))
	for _, n := range []block.Node{must[*fault.Node](t)(fault.New(file, "")), ram} {
		i := n.Info()
		if i.Size != block.Unbounded {
			t.Errorf("%s: size is %d", i.Name, i.Size)
		}
		h := block.NewHandle(n, nil)
		d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
		b, got := []byte("some bytes"), make([]byte, 20)
		if err := errors.Join(d.Write(9000, b), d.Read(9000-5, got)); err != nil {
			t.Fatal(err)
		}
		if string(got) != "\x00\x00\x00\x00\x00some bytes\x00\x00\x00\x00\x00" {
			t.Errorf("%s: %q", i.Name, got)
		}
		length := func(want int64) {
			t.Helper()
			if n, err := block.Length(n); n != want || err != nil {
				t.Errorf("%s: length is %d, want %d, %v", i.Name, n, want, err)
			}
		}
		length(9010)
		if err := d.Read(1<<40, got); err != nil || !slices.Equal(got, make([]byte, 20)) {
			t.Errorf("%s: far beyond the end: %q, %v", i.Name, got, err)
		}
		if err := block.Truncate(n, 9004); err != nil {
			t.Error(err)
		}
		length(9004)
		if err := errors.Join(block.Truncate(n, 9020), d.Read(9000, got)); err != nil || string(got[:10]) != "some\x00\x00\x00\x00\x00\x00" {
			t.Errorf("%s: %q after it was cut, %v", i.Name, got, err)
		}
		length(9020)
		if n == ram {
			if err := d.Write(1<<20-2, b); !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("beyond what memory holds: %v", err)
			}
		}
		d.Close()
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
	if err := block.Truncate(null.New(null.Options{Size: 1}), 2); !errors.Is(err, syscall.ENOTSUP) {
		t.Error(err)
	}
}
