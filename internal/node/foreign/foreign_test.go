// SPDX-License-Identifier: Apache-2.0

package foreign_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/fault"
	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/node/foreign"
)

// kinds are the images that qemu-img makes.
var kinds = []struct {
	name, format, options string
	fixed                 bool
}{
	{"vmdk sparse", "vmdk", "subformat=monolithicSparse", false},
	{"vmdk sparse, zeroed grains", "vmdk", "subformat=monolithicSparse,zeroed_grain=on", false},
	{"vmdk stream", "vmdk", "subformat=streamOptimized", false},
	{"vhdx dynamic", "vhdx", "subformat=dynamic", false},
	{"vhdx dynamic, small blocks", "vhdx", "subformat=dynamic,block_size=1M", false},
	{"vhdx fixed", "vhdx", "subformat=fixed", true},
	{"vpc dynamic", "vpc", "subformat=dynamic,force_size=on", false},
	{"vpc fixed", "vpc", "subformat=fixed,force_size=on", true},
	{"vdi dynamic", "vdi", "", false},
	{"vdi static", "vdi", "static=on", true},
}

func needQemuImg(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Skip("needs qemu-img to make images (apt-get install qemu-utils)")
	}
}

// convert makes an image of a raw file.
func convert(t testing.TB, format, options string, raw []byte) string {
	t.Helper()
	needQemuImg(t)
	dir := t.TempDir()
	source, image := filepath.Join(dir, "source"), filepath.Join(dir, "image")
	if err := os.WriteFile(source, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"convert", "-f", "raw", "-O", format}
	if options != "" {
		args = append(args, "-o", options)
	}
	if out, err := exec.Command("qemu-img", append(args, source, image)...).CombinedOutput(); err != nil {
		t.Fatalf("qemu-img %q: %v\n%s", args, err, out)
	}
	if err := os.Remove(source); err != nil {
		t.Fatal(err)
	}
	return image
}

// sparseBytes is a disk of patterns, zeros, and what cannot be compressed, with edges at odd sectors.
func sparseBytes(size int) []byte {
	b := make([]byte, size)
	rng := rand.New(rand.NewPCG(3, 9))
	for at := 0; at < size; {
		n := min(512*(1+rng.IntN(400)), size-at)
		switch rng.IntN(4) {
		case 0:
			blocktest.Pattern(b[at:at+n], int64(at), 1)
		case 1:
			for i := range b[at : at+n] {
				b[at+i] = byte(rng.Uint32())
			}
		default:
			n = min(n+512*rng.IntN(3000), size-at)
		}
		at += n
	}
	return b
}

func openFile(t testing.TB, path string, cache block.CacheMode) *file.Node {
	t.Helper()
	f, err := file.Open(file.Options{Path: path, ReadOnly: true, Cache: cache})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func openImage(t testing.TB, path, format string) *foreign.Node {
	t.Helper()
	f := openFile(t, path, block.CacheWriteback)
	n, err := foreign.Open(f, format)
	if err != nil {
		t.Fatal(errors.Join(err, f.Close()))
	}
	return n
}

// disk opens the image behind a handle, on a loop.
func disk(t testing.TB, n block.Node) *blocktest.Disk {
	t.Helper()
	h := block.NewHandle(n, nil)
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return blocktest.Guarded(t, blocktest.Loop(t, nil), h)
}

// over is a file with other nodes above it.
type over struct {
	block.Node
	f *file.Node
}

func (o over) ReadAt(p []byte, off int64) (int, error) { return o.f.ReadAt(p, off) }
func (o over) FileSize() int64                         { return o.f.FileSize() }

// Goal: the disk is the one that the image was made from, and the node keeps to its contract. Method: the suite for nodes
// that are only read, over images that qemu-img makes.
func TestConformance(t *testing.T) {
	needQemuImg(t)
	for _, size := range []int{5<<20 + 512*3, 512} {
		raw := sparseBytes(size)
		for _, k := range kinds {
			t.Run(fmt.Sprintf("%s of %d", k.name, size), func(t *testing.T) {
				t.Parallel()
				image := convert(t, k.format, k.options, raw)
				faulty := func(t *testing.T, text string) (block.Node, *fault.Node) {
					f := openFile(t, image, block.CacheWriteback)
					faults, err := fault.New(f, text)
					if err != nil {
						t.Fatal(err)
					}
					n, err := foreign.Open(over{faults, f}, k.format)
					if err != nil {
						t.Fatal(err)
					}
					return n, faults
				}
				blocktest.ConformReadOnly(t, blocktest.ReadOnlySubject{
					Open:    func(t *testing.T) block.Node { return openImage(t, image, k.format) },
					Faulty:  faulty,
					Content: raw,
				})
			})
		}
	}
}

// Larger than a page of the table, a grain directory's entry, and a block of every format.
func TestLargeDisk(t *testing.T) {
	raw := make([]byte, 70<<20+512)
	copy(raw[34<<20:], sparseBytes(3<<20))
	copy(raw[70<<20:], "the last sector")
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			d := disk(t, openImage(t, convert(t, k.format, k.options, raw), k.format))
			got := make([]byte, len(raw))
			if err := d.Read(0, got); err != nil || sha256.Sum256(got) != sha256.Sum256(raw) {
				t.Errorf("other bytes, %v", err)
			}
		})
	}
}

// Where a map names a place in the file, the bytes are found there, and a sparse image has holes.
func TestMapNamesPlaces(t *testing.T) {
	raw := sparseBytes(9 << 20)
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			image := convert(t, k.format, k.options, raw)
			n := openImage(t, image, k.format)
			defer n.Close()
			bytesOf, err := os.ReadFile(image)
			if err != nil {
				t.Fatal(err)
			}
			holes := int64(0)
			err = block.Map(context.Background(), n, 0, n.Info().Size, func(e block.Extent) error {
				if e.Zero {
					holes += e.Length
				}
				if e.Host >= 0 && !bytes.Equal(raw[e.Offset:e.Offset+e.Length], bytesOf[e.Host:e.Host+e.Length]) {
					return fmt.Errorf("%+v is not in the file where it is said to be", e)
				}
				return nil
			})
			if err != nil || holes == 0 && k.format == "vmdk" {
				t.Errorf("%d bytes of holes, %v", holes, err)
			}
		})
	}
}

func TestDamagedGrain(t *testing.T) {
	raw := sparseBytes(1 << 20)
	for i := range raw {
		raw[i] |= 1
	}
	image := convert(t, "vmdk", "subformat=streamOptimized", raw)
	b, err := os.ReadFile(image)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		at   int64 // behind the first grain's marker
		to   []byte
	}{
		{"its bytes", 20, []byte("damaged")},
		{"its place", -12, []byte{9}},
		{"its length", -4, []byte{0xff, 0xff, 0x10}},
		{"no length", -4, []byte{0, 0, 0}},
		{"no stream", 0, []byte{0, 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			damaged := bytes.Clone(b)
			grain := int64(bytes.Index(b, []byte{0x78, 0x9c}))
			if grain%512 != 12 {
				t.Fatalf("the first grain is thought to be at %d", grain)
			}
			copy(damaged[grain+c.at:], c.to)
			if err := os.WriteFile(image, damaged, 0o600); err != nil {
				t.Fatal(err)
			}
			d := disk(t, openImage(t, image, "vmdk"))
			if err := d.Read(0, make([]byte, 512)); !errors.Is(err, block.ErrCorrupt) || block.Errno(err) != syscall.EIO {
				t.Errorf("read: %v", err)
			}
			got := make([]byte, 512)
			if err := d.Read(512<<10, got); err != nil || !bytes.Equal(got, raw[512<<10:512<<10+512]) {
				t.Errorf("another grain: %v", err)
			}
		})
	}
}

// Direct I/O works where its blocks are sectors, and is refused clearly where they are larger.
func TestAlignment(t *testing.T) {
	raw := sparseBytes(3 << 20)
	image := convert(t, "vmdk", "subformat=streamOptimized", raw)
	for _, align := range []int{512, 4096} {
		f := openFile(t, image, block.CacheWriteback)
		shape := over{blocktest.NewShape(t, f, func(i *block.Info) {
			i.Align, i.MemAlign = align, align
			i.Size = (i.Size + int64(align) - 1) &^ (int64(align) - 1)
		}), f}
		n, err := foreign.Open(shape, "vmdk")
		if align > 512 {
			if !errors.Is(err, block.ErrNotSupported) {
				t.Errorf("blocks of %d: %v", align, err)
			}
			if err := f.Close(); err != nil {
				t.Error(err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(raw))
		if err := disk(t, n).Read(0, got); err != nil || !bytes.Equal(got, raw) {
			t.Errorf("other bytes, %v", err)
		}
	}
}

// A read of one stretch is the same request below; reads allocate nothing.
func TestWalkAllocatesNothing(t *testing.T) {
	raw := sparseBytes(2 << 20)
	for _, k := range []int{0, 2, 8} {
		n := openImage(t, convert(t, kinds[k].format, kinds[k].options, raw), kinds[k].format)
		d := disk(t, n)
		buf := make([]byte, len(raw))
		read := func() {
			if err := d.Read(0, buf); err != nil {
				t.Error(err)
			}
		}
		read()
		// The test's own request takes about ten; a grain that allocated would add a hundred.
		if got := testing.AllocsPerRun(20, read); got > 30 {
			t.Errorf("%s: %v allocations a read of the whole disk", kinds[k].name, got)
		}
	}
}
