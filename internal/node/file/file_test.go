// SPDX-License-Identifier: Apache-2.0

package file_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/file"
)

// image makes a sparse file.
func image(t testing.TB, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk.img")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	return path
}

// memoryImage makes one in memory.
func memoryImage(t testing.TB, size int64) string {
	t.Helper()
	f, err := os.CreateTemp("/dev/shm", "sluice-test-*")
	if err != nil {
		t.Skipf("needs a file system in memory at /dev/shm: %v", err)
	}
	t.Cleanup(func() { os.Remove(f.Name()) })
	if err := errors.Join(f.Truncate(size), f.Close()); err != nil {
		t.Fatal(err)
	}
	return f.Name()
}

func mustOpen(t testing.TB, o file.Options) *file.Node {
	t.Helper()
	n, err := file.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// guarded opens a file behind a handle on a loop.
func guarded(t testing.TB, o file.Options) (*blocktest.Disk, *block.Handle) {
	t.Helper()
	h := block.NewHandle(mustOpen(t, o), nil)
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return blocktest.Guarded(t, blocktest.Loop(t, nil), h), h
}

func TestConformance(t *testing.T) {
	for _, kind := range []aio.EngineKind{aio.EngineIOUring, aio.EngineLinuxAIO, aio.EngineThreads} {
		for _, place := range []struct {
			name  string
			make  func(testing.TB, int64) string
			cache block.CacheMode
		}{
			{"direct", image, block.CacheNone},
			{"buffered", image, block.CacheWriteback},
			{"through", image, block.CacheWritethrough},
			{"memory", memoryImage, block.CacheDefault},
		} {
			if testing.Short() && place.name == "through" {
				continue
			}
			t.Run(fmt.Sprintf("%s/%s", kind, place.name), func(t *testing.T) {
				s := blocktest.Subject{Open: func(t *testing.T, size int64) block.Node {
					return mustOpen(t, file.Options{Path: place.make(t, size), Engine: kind, Cache: place.cache, Lock: true})
				}}
				if kind == aio.EngineIOUring {
					s.Loop = &aio.LoopOptions{Poller: aio.PollerIOUring}
				}
				if place.cache == block.CacheNone {
					refuseWithoutDirect(t)
				}
				blocktest.Conform(t, s)
			})
		}
	}
}

// refuseWithoutDirect skips where the file system of temporary files takes no direct I/O.
func refuseWithoutDirect(t *testing.T) {
	t.Helper()
	n, err := file.Open(file.Options{Path: image(t, 4096), Cache: block.CacheNone})
	if err != nil {
		t.Skipf("needs a file system with direct I/O: %v", err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestOpenFailsWithTheRemedy(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		o     file.Options
		errno syscall.Errno
		words string
	}{
		{"missing", file.Options{Path: filepath.Join(dir, "none")}, syscall.ENOENT, "none"},
		{"directory", file.Options{Path: dir, ReadOnly: true}, syscall.ENOTSUP, "neither a regular file nor a block device"},
		{"fifo", file.Options{Path: fifo}, syscall.ENOTSUP, "neither"},
		{"odd size direct", file.Options{Path: image(t, 1000), Cache: block.CacheNone}, syscall.EINVAL, "cache=writeback"},
		{"no direct I/O", file.Options{Path: "/proc/self/status", ReadOnly: true, Cache: block.CacheNone}, syscall.EINVAL, "cache=writeback"},
		{"shared and writable", file.Options{Path: image(t, 512), LockShared: true}, 0, "set readonly"},
	} {
		t.Run(c.name, func(t *testing.T) {
			n, err := file.Open(c.o)
			if err == nil {
				n.Close()
				t.Fatal("it was opened")
			}
			if c.errno != 0 && !errors.Is(err, c.errno) || !strings.Contains(err.Error(), c.words) || !strings.Contains(err.Error(), c.o.Path) {
				t.Errorf("error is %q", err)
			}
		})
	}
}

// A file whose length is no multiple of a sector shows its last sector whole.
func TestOddSize(t *testing.T) {
	for _, size := range []int64{1, 511, 1000, 4096 + 512 + 7} {
		path := image(t, size)
		if err := os.WriteFile(path, bytes.Repeat([]byte{7}, int(size)), 0o600); err != nil {
			t.Fatal(err)
		}
		d, h := guarded(t, file.Options{Path: path})
		want := (size + 511) / 512 * 512
		if i := h.Info(); i.Size != want || !strings.Contains(i.Engine, "no multiple") {
			t.Errorf("size is %d, want %d; engine %q", i.Size, want, i.Engine)
		}
		if n := h.Node().(*file.Node).FileSize(); n != size {
			t.Errorf("file size is %d, want %d", n, size)
		}
		got := bytes.Repeat([]byte{9}, 512)
		if err := d.Read(want-512, got); err != nil {
			t.Fatal(err)
		}
		for i, v := range got {
			at := want - 512 + int64(i)
			if at < size && v != 7 || at >= size && v != 0 {
				t.Fatalf("size %d: byte at %d is %d", size, at, v)
			}
		}
		if err := d.Read(want-511, got); !errors.Is(err, block.ErrRange) {
			t.Errorf("beyond the last sector: %v", err)
		}
		if err := d.Write(want-512, got); err != nil {
			t.Fatal(err)
		}
		if st, err := os.Stat(path); err != nil || st.Size() != want {
			t.Errorf("file is %d bytes after the last sector was written, want %d", st.Size(), want)
		}
	}
}

func TestModesAreTold(t *testing.T) {
	path := image(t, 8192)
	for _, c := range []struct {
		cache block.CacheMode
		info  block.Info // those that are compared
	}{
		{block.CacheWriteback, block.Info{WriteCache: true, Flush: block.Native, FUA: block.Native, Discard: block.Native, WriteZeroes: block.Native, Durability: "fdatasync"}},
		{block.CacheWritethrough, block.Info{WriteCache: false, Flush: block.Native, FUA: block.Native, Discard: block.Native, WriteZeroes: block.Native, Durability: "write-through"}},
		{block.CacheUnsafe, block.Info{WriteCache: true, Flush: block.Native, FUA: block.Native, Discard: block.Native, WriteZeroes: block.Native, Durability: "do nothing"}},
	} {
		n := mustOpen(t, file.Options{Path: path, Cache: c.cache})
		i := n.Info()
		if i.WriteCache != c.info.WriteCache || i.Flush != c.info.Flush || i.FUA != c.info.FUA || i.Discard != c.info.Discard ||
			i.WriteZeroes != c.info.WriteZeroes || !strings.Contains(i.Durability, c.info.Durability) {
			t.Errorf("%s: %+v", c.cache, i)
		}
		if i.Align != 1 || i.LogicalBlock != 512 {
			t.Errorf("%s: alignment %d, block %d", c.cache, i.Align, i.LogicalBlock)
		}
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
	}
	n := mustOpen(t, file.Options{Path: path, ReadOnly: true, IgnoreDiscard: true})
	defer n.Close()
	if i := n.Info(); i.Discard != block.None || i.WriteZeroes != block.None || !i.ReadOnly {
		t.Errorf("read-only: %+v", i)
	}
}

func TestHead(t *testing.T) {
	path := image(t, 8192)
	if err := os.WriteFile(path, append([]byte("QFI"), make([]byte, 8189)...), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, cache := range []block.CacheMode{block.CacheDefault, block.CacheWriteback} {
		n := mustOpen(t, file.Options{Path: path, Cache: cache})
		if b, err := n.Head(5); err != nil || string(b) != "QFI\x00\x00" {
			t.Errorf("%q, %v", b, err)
		}
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// Holes are found, the one at the end too, and what is only in the page cache is data.
func TestExtents(t *testing.T) {
	const k = 1024
	path := image(t, 10000*k)
	d, h := guarded(t, file.Options{Path: path, Cache: block.CacheWriteback})
	if err := d.Write(192*k, bytes.Repeat([]byte{1}, 64*k)); err != nil {
		t.Fatal(err)
	}
	n := h.Node().(*file.Node)
	got, err := n.Extents(context.Background(), 0, 1<<40)
	if err != nil {
		t.Fatal(err)
	}
	if len(got) == 1 && !got[0].Hole {
		t.Skip("needs a file system that tells holes")
	}
	want := []file.Extent{{Offset: 0, Length: 192 * k, Hole: true}, {Offset: 192 * k, Length: 64 * k}, {Offset: 256 * k, Length: (10000 - 256) * k, Hole: true}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	got, err = n.Extents(context.Background(), 200*k, 60*k)
	want = []file.Extent{{Offset: 200 * k, Length: 56 * k}, {Offset: 256 * k, Length: 4 * k, Hole: true}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Error(diff, err)
	}
	if _, err := n.Extents(context.Background(), -1, 1); err == nil {
		t.Error("a negative offset is taken")
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := n.Extents(ctx, 0, 1); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := d.Discard(192*k, 64*k); err != nil {
		t.Fatal(err)
	}
	if got, err := n.Extents(context.Background(), 0, 1<<40); err != nil || len(got) != 1 || !got[0].Hole {
		t.Errorf("after the discard: %v, %v", got, err)
	}
}

// A flush, a durable write and a write to a write-through file ask the kernel to make something durable; an unsafe file
// never does.
func TestFlushReachesTheFile(t *testing.T) {
	requests := func(l *aio.Loop) (n uint64) {
		for _, e := range l.Stats().Engines {
			n += e.Requests
		}
		return n
	}
	for _, c := range []struct {
		cache block.CacheMode
		flush uint64 // requests to the kernel
	}{{block.CacheDefault, 1}, {block.CacheWriteback, 1}, {block.CacheWritethrough, 1}, {block.CacheUnsafe, 0}} {
		d, _ := guarded(t, file.Options{Path: image(t, 1<<20), Cache: c.cache})
		if err := d.Write(0, blocktest.Memory(4096, 4096, 0)); err != nil {
			t.Fatal(err)
		}
		before := requests(d.Loop)
		if err := d.Flush(); err != nil {
			t.Fatal(err)
		}
		if n := requests(d.Loop) - before; n != c.flush {
			t.Errorf("%s: a flush made %d requests, want %d", c.cache, n, c.flush)
		}
	}
}
