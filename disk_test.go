// SPDX-License-Identifier: Apache-2.0

package sluice

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/iotest"

	"go.uber.org/goleak"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/img"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const testSize = 1 << 20

// kinds are the disks that every test of this file runs on.
func kinds(t *testing.T, test func(t *testing.T, open func(o *Options) *Disk)) {
	for _, kind := range []string{"file", "buffered", "threads", "window", "memory", "qcow2"} {
		t.Run(kind, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "disk.raw")
			size := int64(testSize)
			if kind == "window" {
				size += 8192
			}
			if err := Create(path, size, nil); err != nil {
				t.Fatal(err)
			}
			if kind == "qcow2" {
				makeQcow2(t, path, size)
			}
			test(t, func(o *Options) *Disk {
				t.Helper()
				if o == nil {
					o = &Options{}
				}
				d, err := openKind(kind, path, *o)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					if err := d.Close(); err != nil {
						t.Errorf("close: %v", err)
					}
				})
				return d
			})
		})
	}
}

// makeQcow2 puts an empty image in the place of a file.
func makeQcow2(t *testing.T, path string, size int64) {
	t.Helper()
	s, err := img.CreateStore(path, img.StoreOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := create.Create(s, &create.Options{Size: size}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

func openKind(kind, path string, o Options) (*Disk, error) {
	ctx := context.Background()
	switch kind {
	case "memory":
		return OpenMemory(ctx, testSize, &o)
	case "buffered":
		o.Cache = CacheWriteback
	case "threads":
		o.Engine = aio.EngineThreads
	case "window":
		o.Offset, o.Size = 4096, testSize
	case "qcow2":
		o.Format = FormatQcow2
	}
	return Open(ctx, path, &o)
}

// The contracts of io.ReaderAt and io.WriterAt, at offsets and lengths of every alignment.
func TestReadsGiveWhatWasWritten(t *testing.T) {
	kinds(t, func(t *testing.T, open func(*Options) *Disk) {
		d := open(nil)
		seed := rand.Uint64()
		r := rand.New(rand.NewPCG(seed, 0))
		want := make([]byte, testSize)
		for range 200 {
			off := r.IntN(testSize)
			n := r.IntN(min(testSize-off, 70000)) + 1
			p := make([]byte, n)
			switch r.IntN(4) {
			case 0:
				clear(want[off : off+n])
				if err := d.WriteZeroes(int64(off), int64(n)); err != nil {
					t.Fatalf("seed %d: %v", seed, err)
				}
			case 1:
				if _, err := d.ReadAt(p, int64(off)); err != nil || !bytes.Equal(p, want[off:off+n]) {
					t.Fatalf("seed %d: %d bytes at %d differ, %v", seed, n, off, err)
				}
			default:
				for i := range p {
					p[i] = byte(r.Uint32())
				}
				copy(want[off:], p)
				if got, err := d.WriteAt(p, int64(off)); err != nil || got != n {
					t.Fatalf("seed %d: write: %d, %v", seed, got, err)
				}
			}
		}
		if err := d.Flush(); err != nil {
			t.Error(err)
		}
		const at = testSize - 777 // it is read byte by byte, so a piece must do
		if err := iotest.TestReader(io.NewSectionReader(d, at, testSize-at), want[at:]); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
		all, err := io.ReadAll(io.NewSectionReader(d, 0, testSize))
		if err != nil || !bytes.Equal(all, want) {
			t.Errorf("seed %d: the whole disk differs, %v", seed, err)
		}
	})
}

func TestTheEndOfTheDisk(t *testing.T) {
	kinds(t, func(t *testing.T, open func(*Options) *Disk) {
		d := open(nil)
		if d.Size() != testSize || d.Info().Size != testSize || d.Info().Engine == "" || d.Info().Durability == "" {
			t.Errorf("%+v", d.Info())
		}
		p := make([]byte, 100)
		for _, c := range []struct {
			off  int64
			want int
			err  error
		}{
			{testSize - 100, 100, nil}, {testSize - 40, 40, io.EOF}, {testSize, 0, io.EOF}, {testSize + 1, 0, io.EOF}, {math.MaxInt64, 0, io.EOF}, {-1, 0, ErrRange},
		} {
			if n, err := d.ReadAt(p, c.off); n != c.want || !errors.Is(err, c.err) || c.err == nil && err != nil {
				t.Errorf("read at %d: %d, %v; want %d, %v", c.off, n, err, c.want, c.err)
			}
		}
		for _, off := range []int64{-1, testSize - 99, testSize, math.MaxInt64} {
			_, err := d.WriteAt(p, off)
			for what, err := range map[string]error{"write": err, "zero": d.WriteZeroes(off, 100), "discard": d.Discard(off, 100)} {
				if !errors.Is(err, ErrRange) {
					t.Errorf("%s at %d: %v", what, off, err)
				}
			}
		}
		if err := d.WriteZeroes(0, -1); !errors.Is(err, ErrRange) {
			t.Errorf("a negative length: %v", err)
		}
		if n, err := d.ReadAt(nil, 0); n != 0 || err != nil {
			t.Errorf("read of nothing: %d, %v", n, err)
		}
		if n, err := d.WriteAt(nil, testSize); n != 0 || err != nil {
			t.Errorf("write of nothing: %d, %v", n, err)
		}
		if err := d.Discard(0, testSize); err != nil {
			t.Errorf("discard: %v", err)
		}
	})
}

func TestReadOnlyDisksDoNotChange(t *testing.T) {
	kinds(t, func(t *testing.T, open func(*Options) *Disk) {
		d := open(&Options{ReadOnly: true})
		_, err := d.WriteAt([]byte("x"), 0)
		for what, err := range map[string]error{"write": err, "zero": d.WriteZeroes(0, 512), "discard": d.Discard(0, 512)} {
			if !errors.Is(err, ErrReadOnly) || !errors.Is(err, syscall.EROFS) {
				t.Errorf("%s: %v", what, err)
			}
		}
		if _, err := d.ReadAt(make([]byte, 512), 0); err != nil {
			t.Error(err)
		}
		if err := d.Flush(); err != nil {
			t.Error(err)
		}
	})
}

// Many goroutines, a close among them: each call is carried out whole or answers ErrClosed.
func TestADiskIsSafeForConcurrentUse(t *testing.T) {
	kinds(t, func(t *testing.T, open func(*Options) *Disk) {
		d := open(nil)
		const users, rounds = 16, 50
		var wg sync.WaitGroup
		for u := range users {
			wg.Go(func() {
				p := bytes.Repeat([]byte{byte(u + 1)}, 3000)
				got := make([]byte, len(p))
				for i := range rounds {
					off := int64(u)*4096*12 + int64(i)*700
					if _, err := d.WriteAt(p, off); err != nil {
						if errors.Is(err, ErrClosed) {
							return
						}
						t.Error(err)
						return
					}
					if _, err := d.ReadAt(got, off); err != nil {
						if !errors.Is(err, ErrClosed) {
							t.Error(err)
						}
						return
					}
					if !bytes.Equal(got, p) {
						t.Errorf("user %d reads what it has not written", u)
						return
					}
					if u == 0 && i == rounds*9/10 {
						if err := d.Close(); err != nil {
							t.Error(err)
						}
					}
				}
			})
		}
		wg.Wait()
		_, err := d.ReadAt(make([]byte, 1), 0)
		_, werr := d.WriteAt(make([]byte, 1), 0)
		_, end := d.ReadAt(make([]byte, 1), testSize)
		for _, err := range []error{err, werr, end, d.Flush(), d.Discard(0, 512), d.WriteZeroes(0, 512)} {
			if !errors.Is(err, ErrClosed) {
				t.Errorf("after Close: %v", err)
			}
		}
	})
}

func TestOptionsThatMakeNoSense(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk.raw")
	if err := Create(path, testSize, nil); err != nil {
		t.Fatal(err)
	}
	for want, o := range map[string]*Options{
		"unknown cache mode": {Cache: "fast"},
		"needs readonly":     {Lock: LockShared},
		"unknown lock mode":  {Lock: "maybe"},
		"negative":           {Offset: -1},
		"no such engine":     {Engine: 77},
		"open disk " + path:  {Offset: testSize * 2},
	} {
		if d, err := Open(t.Context(), path, o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, %v; want %q", o, d, err, want)
		}
	}
	if _, err := Open(t.Context(), path+".none", nil); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
	if _, err := OpenMemory(t.Context(), 0, nil); err == nil {
		t.Error("a disk of no size was opened")
	}
}

func TestCreate(t *testing.T) {
	for _, prealloc := range []Prealloc{PreallocOff, PreallocFalloc, PreallocFull} {
		path := filepath.Join(t.TempDir(), "disk.raw")
		const size = 3<<20 + 512
		err := Create(path, size, &CreateOptions{Prealloc: prealloc, Mode: 0o600})
		if prealloc == PreallocFalloc && errors.Is(err, syscall.EOPNOTSUPP) {
			continue // the temporary directory's file system has no fallocate
		}
		if err != nil {
			t.Fatal(err)
		}
		fi, err := os.Stat(path)
		if err != nil || fi.Size() != size || fi.Mode().Perm() != 0o600 {
			t.Errorf("%q: %v, %v", prealloc, fi, err)
		}
		blocks := fi.Sys().(*syscall.Stat_t).Blocks * 512
		if full := blocks >= size; full != (prealloc != PreallocOff) {
			t.Errorf("%q takes %d bytes on the disk", prealloc, blocks)
		}
		if err := Create(path, size, nil); !errors.Is(err, fs.ErrExist) {
			t.Errorf("over an existing image: %v", err)
		}
		if err := os.WriteFile(path, []byte("old"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := Create(path, size, &CreateOptions{Overwrite: true, Prealloc: prealloc}); err != nil {
			t.Error(err)
		}
		b, err := os.ReadFile(path)
		if err != nil || int64(len(b)) != size || !bytes.Equal(b, make([]byte, size)) {
			t.Errorf("%q: an image that was overwritten does not read as zeros: %v", prealloc, err)
		}
	}
}

func TestCreateThatFails(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "disk.raw")
	for _, c := range []struct {
		path string
		size int64
		o    *CreateOptions
	}{
		{path, 0, nil}, {path, -512, nil}, {path, 513, nil}, {path, 512, &CreateOptions{Prealloc: "metadata"}},
		{path, math.MaxInt64 &^ 511, nil}, {dir, 512, &CreateOptions{Overwrite: true}}, {dir + "/none/disk", 512, nil},
	} {
		if err := Create(c.path, c.size, c.o); err == nil || !strings.HasPrefix(err.Error(), fmt.Sprintf("create %s: ", c.path)) {
			t.Errorf("%s, %d bytes: %v", c.path, c.size, err)
		}
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%d bytes: a file is there", c.size)
		}
	}
	if err := Create(path, testSize, nil); err != nil {
		t.Fatal(err)
	}
	d, err := Open(t.Context(), path, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := Create(path, 512, &CreateOptions{Overwrite: true}); !errors.Is(err, ErrInUse) {
		t.Errorf("over an image in use: %v", err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Size() != testSize {
		t.Errorf("the image in use was changed: %v, %v", fi, err)
	}
}

func TestServerRefuses(t *testing.T) {
	d, err := OpenMemory(t.Context(), testSize, nil)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	var s Server
	socket := filepath.Join(dir, "s")
	if err := s.ListenAndServeVhostUser(t.Context(), socket, d, &VhostUserOptions{Queues: 1000}); err == nil {
		t.Error("a thousand queues were offered")
	}
	if _, err := os.Lstat(socket); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if err := s.ListenAndServeVhostUser(t.Context(), socket, d, nil); !errors.Is(err, ErrClosed) {
		t.Errorf("a closed disk: %v", err)
	}
}
