// SPDX-License-Identifier: Apache-2.0

package qcow2_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/fault"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/node/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

// Each request that an image makes of its file fails, once and from then on. The guest is told, what it was not told of is
// there, the image has at worst leaks, and all is well when the file works again.
func TestEachFailureOfTheFile(t *testing.T) {
	for _, g := range []geometry{
		{"64k", create.Options{}},
		{"4k", create.Options{ClusterSize: 4096, RefcountBits: 1}},
		{"512", create.Options{ClusterSize: 512}},
		{"extended", create.Options{ExtendedL2: true, ClusterSize: 16384}},
	} {
		t.Run(g.name, func(t *testing.T) {
			const size = 2 << 20
			contents := newImage(t, g.o, size)
			l := blocktest.Loop(t, nil)
			step := 3
			switch {
			case testing.Short() || raced:
				step = 11
			case os.Getenv("SLUICE_SOAK") != "":
				step = 1
			}
			for _, how := range []string{"error=EIO count=1", "error=ENOSPC"} {
				n := 0
				for failFile(t, l, contents, size, fmt.Sprintf("any after=%d %s", n, how)) {
					if n += step; n > 3000 {
						t.Fatal("there is no end to it")
					}
				}
				t.Logf("%s: %d requests of the file failed, one after the other", how, n/step)
			}
		})
	}
}

// failFile does the same work each time, with a fault in the file, and tells whether it met one.
func failFile(t *testing.T, l *aio.Loop, contents []byte, size int64, text string) (met bool) {
	t.Helper()
	below := inMemory(t, contents, mem.Options{})
	below.leaky = true
	faults, err := fault.New(below, "")
	if err != nil {
		t.Fatal(err)
	}
	n := open(t, faults, &qcow2.Options{L2CacheBytes: 4096})
	h := block.NewHandle(n, nil)
	d := blocktest.Guarded(t, l, h)
	if err := faults.Set(text); err != nil {
		t.Fatal(err)
	}
	v := newVerifier(t, d, size, 99)
	for range 6 {
		v.runFailing(12)
	}
	met = faults.Injected() > 0
	if err := faults.Set(""); err != nil {
		t.Fatal(err)
	}
	if err := d.Flush(); err != nil {
		t.Fatalf("%s: the file works again, and a flush: %v", text, err)
	}
	v.all()
	v.run(12)
	v.all()
	d.Close()
	if err := h.Close(); err != nil {
		t.Fatalf("%s: close: %v", text, err)
	}
	if t.Failed() {
		t.Fatalf("with %s", text)
	}
	return met
}

// runFailing is run where requests may fail: of what did, nothing is known.
func (v *verifier) runFailing(depth int) {
	v.t.Helper()
	v.round++
	for range depth {
		n := (1 + v.rng.Int64N(8)) * v.unit
		if v.rng.IntN(6) == 0 {
			n *= 24
		}
		c := v.call(v.rng.Int64N((int64(len(v.want))-n)/v.unit+1)*v.unit, n)
		if err := v.d.Run(c); err == nil {
			v.settle(c)
			continue
		} else if e := block.Errno(err); e != syscall.EIO && e != syscall.ENOSPC {
			v.t.Fatal(err)
		}
		if c.Op == block.OpWrite || c.Op == block.OpWriteZeroes || c.Op == block.OpDiscard {
			v.know(c.Offset, n, false)
		}
	}
}

// A file that is full is an error of the write that finds it so. When there is space again, the next write works.
func TestFileIsFull(t *testing.T) {
	const size = 32 << 20
	n := open(t, inMemory(t, newImage(t, create.Options{}, size), mem.Options{Size: 4<<20 + 12345}), nil)
	h := block.NewHandle(n, nil)
	d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
	b := make([]byte, 65536)
	written := int64(0)
	for ; ; written += 65536 {
		blocktest.Pattern(b, written, 1)
		err := d.Write(written, b)
		if errors.Is(err, syscall.ENOSPC) {
			break
		}
		if err != nil || written > 8<<20 {
			t.Fatalf("after %d bytes: %v", written, err)
		}
	}
	check := func(from int64) {
		t.Helper()
		got := make([]byte, 65536)
		for at := from; at < written; at += 65536 {
			blocktest.Pattern(b, at, 1)
			if err := d.Read(at, got); err != nil || !bytes.Equal(got, b) {
				t.Fatalf("at %d: other bytes, or %v", at, err)
			}
		}
	}
	check(0)
	if err := errors.Join(d.Flush(), d.Discard(0, 1<<20), d.Flush()); err != nil {
		t.Fatal(err)
	}
	for at := int64(20 << 20); at < 20<<20+512<<10; at += 65536 {
		if err := d.Write(at, b); err != nil {
			t.Fatalf("after space was freed: %v", err)
		}
	}
	check(1 << 20)
	d.Close()
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}

// Damage below is an error of the request that meets it, and of no other.
func TestDamagedCompressedCluster(t *testing.T) {
	const cluster = 65536
	below := inMemory(t, newImage(t, create.Options{}, 4*cluster), mem.Options{})
	n := open(t, below, nil)
	h := block.NewHandle(n, nil)
	l := blocktest.Loop(t, nil)
	d := blocktest.Guarded(t, l, h)
	want := make([]byte, 4*cluster)
	rng := rand.New(rand.NewPCG(1, 1))
	for i := range want {
		want[i] = byte(rng.IntN(9))
	}
	writeCompressed(t, n, d, want, cluster)
	if err := d.Flush(); err != nil {
		t.Fatal(err)
	}
	// The second one lies behind the first.
	image := make([]byte, 1<<20)
	_, _ = below.ReadAt(image, 0)
	p, err := qcow2.NewPacker(0)
	if err != nil {
		t.Fatal(err)
	}
	packed, _ := p.Pack(nil, want[cluster:2*cluster])
	at := bytes.Index(image, packed)
	if at < 0 {
		t.Fatal("the compressed cluster is not in the file")
	}
	if _, err := below.WriteAt(bytes.Repeat([]byte{0xff}, 200), int64(at)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 100)
	for i := range int64(4) {
		err := d.Read(i*cluster+77, got)
		if i == 1 && !errors.Is(err, syscall.EIO) || i != 1 && (err != nil || !bytes.Equal(got, want[i*cluster+77:][:100])) {
			t.Errorf("cluster %d: %v", i, err)
		}
	}
	// It can be overwritten whole, and then it is sound.
	if err := errors.Join(d.Write(cluster, want[:cluster]), d.Read(cluster, got)); err != nil || !bytes.Equal(got, want[:100]) {
		t.Errorf("after it was overwritten: %v", err)
	}
	d.Close()
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}
