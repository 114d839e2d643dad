// SPDX-License-Identifier: Apache-2.0

package file_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/file"
)

// loopDevice makes a block device of blocks of 4096 bytes over a file.
func loopDevice(t *testing.T, size int64) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make a loop device")
	}
	path := image(t, size)
	out, err := exec.Command("losetup", "-b", "4096", "--direct-io=on", "-f", "--show", path).CombinedOutput()
	if err != nil {
		t.Skipf("needs loop devices with blocks of 4096 bytes: %v: %s", err, out)
	}
	device := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "-d", device).CombinedOutput(); err != nil {
			t.Errorf("losetup -d %s: %v: %s", device, err, out)
		}
	})
	return device
}

var kinds = []aio.EngineKind{aio.EngineIOUring, aio.EngineLinuxAIO, aio.EngineThreads}

func loopFor(kind aio.EngineKind) *aio.LoopOptions {
	if kind == aio.EngineIOUring {
		return &aio.LoopOptions{Poller: aio.PollerIOUring}
	}
	return nil
}

// The size of a device is exact, its blocks are told, and opening it reads nothing that it does not take.
func TestDeviceIsDescribed(t *testing.T) {
	const size = 5<<20 + 4096*3
	device := loopDevice(t, size)
	for _, cache := range []block.CacheMode{block.CacheDefault, block.CacheNone, block.CacheWriteback} {
		n := mustOpen(t, file.Options{Path: device, Cache: cache, Lock: true})
		i := n.Info()
		if i.Size != size || i.LogicalBlock != 4096 || i.PhysicalBlock < 4096 {
			t.Errorf("%s: size %d, blocks %d and %d", cache, i.Size, i.LogicalBlock, i.PhysicalBlock)
		}
		if direct := cache != block.CacheWriteback; direct != n.Direct() || direct && i.Align != 4096 {
			t.Errorf("%s: direct %v, alignment %d", cache, n.Direct(), i.Align)
		}
		if b, err := n.Head(512); err != nil || len(b) != 512 {
			t.Errorf("%s: the first sector: %d bytes, %v", cache, len(b), err)
		}
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// A device that takes no writes is opened for reading, or not at all: a guest would have each of its writes fail.
func TestDeviceThatIsWriteProtected(t *testing.T) {
	device := loopDevice(t, 1<<20)
	if out, err := exec.Command("blockdev", "--setro", device).CombinedOutput(); err != nil {
		t.Fatalf("blockdev --setro: %v: %s", err, out)
	}
	t.Cleanup(func() { _ = exec.Command("blockdev", "--setrw", device).Run() }) // whoever gets the device next wants to write
	for _, cache := range []block.CacheMode{block.CacheDefault, block.CacheWriteback} {
		if n, err := file.Open(file.Options{Path: device, Cache: cache}); err == nil {
			n.Close()
			t.Errorf("%s: it was opened for writing", cache)
		} else if !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), "set readonly") {
			t.Errorf("%s: %v", cache, err)
		}
		if err := mustOpen(t, file.Options{Path: device, Cache: cache, ReadOnly: true}).Close(); err != nil {
			t.Error(err)
		}
	}
}

// Devices of coarse blocks take what guests of 512 byte sectors send.
func TestDeviceConforms(t *testing.T) {
	for _, kind := range kinds {
		for _, cache := range []block.CacheMode{block.CacheNone, block.CacheWriteback} {
			t.Run(kind.String()+"/"+cache.String(), func(t *testing.T) {
				blocktest.Conform(t, blocktest.Subject{Loop: loopFor(kind), Open: func(t *testing.T, size int64) block.Node {
					return mustOpen(t, file.Options{Path: loopDevice(t, size), Engine: kind, Cache: cache})
				}})
			})
		}
	}
}

// smallDisk makes a file system in memory of size bytes.
func smallDisk(t *testing.T, size string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root, to mount a small file system")
	}
	dir := t.TempDir()
	if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size="+size, "tmpfs", dir).CombinedOutput(); err != nil {
		t.Skipf("needs a small file system: %v: %s", err, out)
	}
	t.Cleanup(func() {
		if out, err := exec.Command("umount", dir).CombinedOutput(); err != nil {
			t.Errorf("umount %s: %v: %s", dir, err, out)
		}
	})
	return dir
}

// A full file system is an error of the write that finds it so, never a success, and a state that one can leave.
func TestFullFileSystem(t *testing.T) {
	for _, kind := range kinds {
		t.Run(kind.String(), func(t *testing.T) {
			path := filepath.Join(smallDisk(t, "8m"), "disk.img")
			if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 64<<20)); err != nil {
				t.Fatal(err)
			}
			h := block.NewHandle(mustOpen(t, file.Options{Path: path, Engine: kind}), nil)
			t.Cleanup(func() {
				if err := h.Close(); err != nil {
					t.Error(err)
				}
			})
			d := blocktest.Guarded(t, blocktest.Loop(t, loopFor(kind)), h)
			const piece = 1<<20 - 4096 // so that the space ends inside of one
			w, r := make([]byte, piece), make([]byte, piece)
			written := int64(0)
			for ; written < 20; written++ {
				blocktest.Pattern(w, written, 1)
				err := d.Write(written*piece, w)
				if err == nil {
					continue
				}
				if !errors.Is(err, syscall.ENOSPC) {
					t.Fatalf("the file system is full: %v", err)
				}
				break
			}
			if written < 6 || written > 8 {
				t.Fatalf("%d pieces fitted into 8 MiB", written)
			}
			check := func(from int64) {
				t.Helper()
				for i := from; i < written; i++ {
					blocktest.Pattern(w, i, 1)
					if err := d.Read(i*piece, r); err != nil || !bytes.Equal(r, w) {
						t.Fatalf("piece %d is not what was acknowledged, or %v", i, err)
					}
				}
			}
			if err := d.Flush(); err != nil {
				t.Fatal(err)
			}
			check(0)
			if err := errors.Join(d.Discard(0, 2*piece), d.Write(written*piece, make([]byte, piece)), d.Flush()); err != nil {
				t.Fatalf("after space was freed: %v", err)
			}
			check(2)
		})
	}
}
