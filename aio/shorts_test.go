// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/sys"
	"pgregory.net/rapid"
)

// TestAdvanceCoversEverythingOnce walks a vector by moves of any size and marks each byte that the transfers name.
func TestAdvanceCoversEverythingOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lens := rapid.SliceOfN(rapid.IntRange(0, 9), 1, 40).Draw(t, "lens")
		total := 0
		for _, n := range lens {
			total += n
		}
		buf := make([]byte, total)
		var mem []IOVec
		at := 0
		for _, n := range lens {
			mem = append(mem, IOVecOf(buf[at:at+n]))
			at += n
		}
		var dst [1]IOVec
		for moved := 0; moved < total; {
			vs := advance(dst[:0], mem, int64(moved))
			size := 0
			for _, v := range vs {
				size += int(v.Len)
			}
			if size == 0 || len(vs) > sys.IOV_MAX {
				t.Fatalf("%d bytes in %d segments after %d of %d", size, len(vs), moved, total)
			}
			step := rapid.IntRange(1, size).Draw(t, "step")
			for left, i := step, 0; left > 0; i++ {
				n := min(left, int(vs[i].Len))
				for j := range n {
					vs[i].Bytes()[j]++
				}
				left -= n
			}
			moved += step
		}
		for i, b := range buf {
			if b != 1 {
				t.Fatalf("byte %d was moved %d times", i, b)
			}
		}
	})
}

func TestAdvanceSplitsLongVectors(t *testing.T) {
	buf := make([]byte, 1500)
	mem := make([]IOVec, 1500)
	for i := range mem {
		mem[i] = IOVecOf(buf[i : i+1])
	}
	for _, c := range []struct{ moved, want int }{{0, 1024}, {1, 1024}, {476, 1024}, {1024, 476}, {1499, 1}, {1500, 0}} {
		if got := len(advance(nil, mem, int64(c.moved))); got != c.want {
			t.Errorf("after %d: %d segments, want %d", c.moved, got, c.want)
		}
	}
}

func TestZeroRest(t *testing.T) {
	for moved := range int64(13) {
		buf := []byte("abcdefghijkl")
		mem := []IOVec{IOVecOf(buf[:4]), IOVecOf(buf[4:4]), IOVecOf(buf[4:9]), IOVecOf(buf[9:])}
		if err := zeroRest(mem, moved); err != nil {
			t.Fatal(err)
		}
		for i, b := range buf {
			if want := byte("abcdefghijkl"[i]); int64(i) < moved && b != want || int64(i) >= moved && b != 0 {
				t.Errorf("moved %d: byte %d is %q", moved, i, b)
			}
		}
	}
}

// TestZeroRestOfVanishedMemory has the file behind a mapping truncated, as a guest's memory may be.
func TestZeroRestOfVanishedMemory(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "memory"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(4096); err != nil {
		t.Fatal(err)
	}
	b, err := sys.Mmap(int(f.Fd()), 0, 4096, sys.PROT_READ|sys.PROT_WRITE, sys.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer sys.Munmap(b)
	if err := f.Truncate(0); err != nil {
		t.Fatal(err)
	}
	if err := zeroRest([]IOVec{IOVecOf(b)}, 8); err != syscall.EFAULT {
		t.Errorf("error %v", err)
	}
}
