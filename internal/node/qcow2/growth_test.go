// SPDX-License-Identifier: Apache-2.0

package qcow2_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/node/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

func lengthOf(t *testing.T, n block.Node) int64 {
	t.Helper()
	length, err := block.Length(n)
	if err != nil {
		t.Fatal(err)
	}
	return length
}

// Writing the same place again and again, with a flush each time, takes no more space.
func TestOverwritesTakeNoSpace(t *testing.T) {
	for _, o := range []create.Options{{}, {ClusterSize: 4096, RefcountBits: 64}, {LazyRefcounts: true}, {ExtendedL2: true}} {
		b := newBed(t, o, 64<<20, nil)
		data := make([]byte, 4096)
		round := func() {
			t.Helper()
			if err := errors.Join(b.Write(12<<20, data), b.Flush()); err != nil {
				t.Fatal(err)
			}
		}
		for range 10 {
			round()
		}
		before := lengthOf(t, b.below)
		for range 2000 {
			round()
		}
		if after := lengthOf(t, b.below); after > before+2*cluster {
			t.Errorf("%+v: the file had %d bytes and has %d", o, before, after)
		}
	}
}

// Trims and new writes at random places do not make a file longer than its disk, its tables and a tenth. Where discarded
// clusters are kept, it does not become longer at all, and what was trimmed reads as zeros.
func TestTrimsAndWritesBoundTheFile(t *testing.T) {
	const size = 64 << 20
	for _, keep := range []bool{false, true} {
		below := inMemory(t, newImage(t, create.Options{}, size), mem.Options{Size: 2 * size})
		n := open(t, below, &qcow2.Options{KeepOnDiscard: keep})
		h := block.NewHandle(n, nil)
		d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
		data := make([]byte, 1<<20)
		blocktest.Pattern(data, 0, 1)
		for at := int64(0); at < size; at += 1 << 20 {
			if err := d.Write(at, data); err != nil {
				t.Fatal(err)
			}
		}
		if err := d.Flush(); err != nil {
			t.Fatal(err)
		}
		full := lengthOf(t, below)
		rng := rand.New(rand.NewPCG(1, 4))
		for range 50 {
			for range 20 {
				length := (1 + rng.Int64N(16)) * cluster
				at := rng.Int64N(size/cluster-length/cluster+1) * cluster
				if err := d.Discard(at, length); err != nil {
					t.Fatal(err)
				}
				got := make([]byte, length)
				if err := d.Read(at, got); err != nil || keep && got[0]|got[length-1] != 0 {
					t.Fatalf("what was trimmed does not read as zeros, or %v", err)
				}
				length = (1 + rng.Int64N(16)) * cluster
				at = rng.Int64N(size/cluster-length/cluster+1) * cluster
				if err := d.Write(at, data[:length]); err != nil {
					t.Fatal(err)
				}
			}
			if err := d.Flush(); err != nil {
				t.Fatal(err)
			}
		}
		after := lengthOf(t, below)
		if keep && after > full+2*cluster || after > size+size/10+2<<20 {
			t.Errorf("kept %v: the file had %d bytes when it was full, and has %d", keep, full, after)
		}
		d.Close()
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
}

// On a device, which ends, a write for which there is no room is ENOSPC, and the image stays sound.
func TestDeviceIsFull(t *testing.T) {
	const size = 8 << 20
	contents := newImage(t, create.Options{}, size)
	below := inMemory(t, append(contents, make([]byte, 2<<20-len(contents))...), mem.Options{Size: 2 << 20})
	shaped := blocktest.NewShape(t, below, func(i *block.Info) { i.Size = 2 << 20 })
	n := open(t, shaped, nil)
	h := block.NewHandle(n, nil)
	d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
	data := make([]byte, 256<<10)
	full := false
	for at := int64(0); at < size && !full; at += int64(len(data)) {
		blocktest.Pattern(data, at, 1)
		err := d.Write(at, data)
		if full = errors.Is(err, syscall.ENOSPC); err != nil && !full {
			t.Fatal(err)
		}
	}
	if !full {
		t.Error("8 MiB fitted into 2")
	}
	got := make([]byte, len(data))
	blocktest.Pattern(data, 0, 1)
	if err := errors.Join(d.Flush(), d.Read(0, got)); err != nil || !bytes.Equal(got, data) {
		t.Errorf("other bytes, or %v", err)
	}
	if err := errors.Join(d.Discard(0, 1<<20), d.Flush(), d.Write(6<<20, data), d.Flush()); err != nil {
		t.Errorf("after space was freed: %v", err)
	}
	d.Close()
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}
