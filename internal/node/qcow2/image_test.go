// SPDX-License-Identifier: Apache-2.0

package qcow2_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"slices"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/fault"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/node/null"
	"github.com/sluice-blk/sluice/internal/node/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
	"github.com/sluice-blk/sluice/internal/sys"
)

const cluster = 65536

// bed is an image in memory behind a guard, on a loop.
type bed struct {
	*blocktest.Disk
	n     *qcow2.Node
	h     *block.Handle
	below *checked
}

func newBed(t *testing.T, o create.Options, size int64, backing block.Node) *bed {
	t.Helper()
	b := &bed{below: inMemory(t, newImage(t, o, size), mem.Options{})}
	b.n = open(t, b.below, nil)
	if backing != nil {
		b.n.SetBacking(backing)
	}
	b.h = block.NewHandle(b.n, nil)
	b.Disk = blocktest.Guarded(t, blocktest.Loop(t, nil), b.h)
	t.Cleanup(func() {
		b.Disk.Close()
		if err := b.h.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// extents maps an image.
func extents(t *testing.T, n block.Node) (list []block.Extent) {
	t.Helper()
	err := block.Map(context.Background(), n, 0, n.Info().Size, func(e block.Extent) error {
		list = append(list, e)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

// An image of zero clusters reads as zeros up to its end, and is told as one stretch.
func TestZeroClustersOnly(t *testing.T) {
	const size = 1 << 30
	b := newBed(t, create.Options{}, size, nil)
	if err := b.Zero(0, size, block.FlagUnmap); err != nil {
		t.Fatal(err)
	}
	buf := bytes.Repeat([]byte{1}, 4<<20)
	for at := int64(0); at < size; at += int64(len(buf)) {
		if buf[0], buf[len(buf)-1] = 1, 1; true {
			if err := b.Read(at, buf); err != nil {
				t.Fatal(err)
			}
		}
		if buf[0] != 0 || buf[len(buf)-1] != 0 || at == 0 && !bytes.Equal(buf, make([]byte, len(buf))) {
			t.Fatalf("bytes behind %d are not zeros", at)
		}
	}
	list := slices.CompactFunc(extents(t, b.n), func(a, b block.Extent) bool { return a.Zero && b.Zero && !a.Data && !b.Data })
	if len(list) != 1 || !list[0].Zero || list[0].Data {
		t.Errorf("it is told as %+v", list)
	}
}

// The file's header is nowhere on the disk.
func TestHeaderIsNotOnTheDisk(t *testing.T) {
	const size = 64 << 20
	b := newBed(t, create.Options{}, size, nil)
	data := make([]byte, cluster)
	for at := int64(0); at < size; at += 33 * cluster {
		blocktest.Pattern(data, at, 1)
		if err := b.Write(at, data); err != nil {
			t.Fatal(err)
		}
	}
	all := make([]byte, size)
	if err := b.Read(0, all); err != nil {
		t.Fatal(err)
	}
	if at := bytes.Index(all, []byte("QFI\xfb")); at >= 0 {
		t.Errorf("the magic is at %d", at)
	}
	for at := int64(0); at < size; at += cluster {
		want := make([]byte, cluster)
		if at/cluster%33 == 0 {
			blocktest.Pattern(want, at, 1)
		}
		if !bytes.Equal(all[at:at+cluster], want) {
			t.Fatalf("cluster at %d holds other bytes", at)
		}
	}
}

// What is told of an image, in front of a backing node that is shorter.
func TestMapOfAnImage(t *testing.T) {
	base, err := mem.New(mem.Options{Size: 8*cluster + 512})
	if err != nil {
		t.Fatal(err)
	}
	d := blocktest.Bare(t, blocktest.Loop(t, nil), base)
	if err := d.Write(7*cluster, bytes.Repeat([]byte{5}, cluster)); err != nil {
		t.Fatal(err)
	}
	d.Close()
	b := newBed(t, create.Options{BackingFile: "x", BackingFormat: "raw"}, 20*cluster, base)
	if err := errors.Join(
		b.Write(0, bytes.Repeat([]byte{1}, 2*cluster)),
		b.Zero(3*cluster, cluster, block.FlagUnmap),
	); err != nil {
		t.Fatal(err)
	}
	host := int64(-1)
	for _, e := range extents(t, b.n) {
		if e.Offset == 0 {
			host = e.Host
		}
	}
	want := []block.Extent{
		{Length: 2 * cluster, Data: true, Present: true, Host: host, File: "mem"},
		{Offset: 2 * cluster, Length: cluster, Zero: true, Present: true, Depth: 1, Host: 2 * cluster, File: "mem"},
		{Offset: 3 * cluster, Length: cluster, Zero: true, Present: true, Host: -1, File: "mem"},
		{Offset: 4 * cluster, Length: 3 * cluster, Zero: true, Present: true, Depth: 1, Host: 4 * cluster, File: "mem"},
		{Offset: 7 * cluster, Length: cluster, Data: true, Present: true, Depth: 1, Host: 7 * cluster, File: "mem"},
		{Offset: 8 * cluster, Length: 512, Zero: true, Present: true, Depth: 1, Host: 8 * cluster, File: "mem"},
		{Offset: 8*cluster + 512, Length: 12*cluster - 512, Zero: true, Host: -1},
	}
	if got := extents(t, b.n); !slices.Equal(got, want) || host < 0 {
		t.Errorf("while a loop has it:\n%+v, want\n%+v", got, want)
	}
	b.Disk.Close()
	if got := extents(t, b.n); !slices.Equal(got, want) {
		t.Errorf("while no loop has it:\n%+v, want\n%+v", got, want)
	}
}

// Reads of what the image does not have, across the end of the backing node, and copies of it.
func TestBackingNodeThatIsShorter(t *testing.T) {
	for _, skew := range []int64{0, 512, 5000} {
		base, err := mem.New(mem.Options{Size: 3*cluster + skew})
		if err != nil {
			t.Fatal(err)
		}
		want := make([]byte, 8*cluster)
		blocktest.Pattern(want[:3*cluster+skew], 0, 3)
		d := blocktest.Bare(t, blocktest.Loop(t, nil), base)
		if err := d.Write(0, want[:3*cluster+skew]); err != nil {
			t.Fatal(err)
		}
		d.Close()
		// The backing node wants requests aligned that the image does not align.
		shaped := blocktest.NewShape(t, base, func(i *block.Info) {
			if skew == 0 {
				i.Align, i.MemAlign = 4096, 512
			}
		})
		b := newBed(t, create.Options{BackingFile: "x", BackingFormat: "raw"}, 8*cluster, shaped)
		got := make([]byte, len(want))
		check := func() {
			t.Helper()
			if err := b.Read(0, got); err != nil || !bytes.Equal(got, want) {
				t.Fatalf("skew %d: other bytes, or %v", skew, err)
			}
			for _, at := range []int64{3*cluster - 700, 3*cluster + skew - 300, 3*cluster + skew, 7*cluster - 1} {
				part := got[:600]
				if err := b.Read(at, part); err != nil || !bytes.Equal(part, want[at:at+600]) {
					t.Fatalf("skew %d: other bytes at %d, or %v", skew, at, err)
				}
			}
		}
		check()
		for _, at := range []int64{3*cluster - 100, 3*cluster + skew - 50, 6 * cluster} {
			blocktest.Pattern(want[at:at+333], at, 8)
			if err := b.Write(at, want[at:at+333]); err != nil {
				t.Fatal(err)
			}
			check()
		}
		if err := b.Zero(cluster+5, 100, 0); err != nil {
			t.Fatal(err)
		}
		clear(want[cluster+5 : cluster+105])
		check()
	}
}

// A chain that is longer than a request has room for layers.
func TestLongChain(t *testing.T) {
	const depth = 20
	base, err := mem.New(mem.Options{Size: 4 * cluster})
	if err != nil {
		t.Fatal(err)
	}
	want := make([]byte, 4*cluster)
	blocktest.Pattern(want, 0, 1)
	d := blocktest.Bare(t, blocktest.Loop(t, nil), base)
	if err := d.Write(0, want); err != nil {
		t.Fatal(err)
	}
	d.Close()
	var below block.Node = base
	for range depth {
		n := open(t, inMemory(t, newImage(t, create.Options{BackingFile: "x", BackingFormat: "raw"}, 4*cluster), mem.Options{}), &qcow2.Options{ReadOnly: true})
		n.SetBacking(below)
		below = n
	}
	b := newBed(t, create.Options{BackingFile: "x", BackingFormat: "qcow2"}, 4*cluster, below)
	got := make([]byte, len(want))
	for range 3 {
		if err := b.Read(0, got); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("other bytes, or %v", err)
		}
		blocktest.Pattern(want[cluster+100:][:50], 5, 5)
		if err := b.Write(cluster+100, want[cluster+100:][:50]); err != nil {
			t.Fatal(err)
		}
	}
	for _, e := range extents(t, b.n) {
		if wantDepth := map[bool]int{true: 0, false: depth + 1}[e.Offset == cluster]; e.Depth != wantDepth {
			t.Errorf("%+v, want depth %d", e, wantDepth)
		}
	}
}

// An image is at home on one loop, and moves when nobody uses it there any more.
func TestHome(t *testing.T) {
	n := open(t, inMemory(t, newImage(t, create.Options{}, 1<<20), mem.Options{}), nil)
	one, two := blocktest.Loop(t, nil), blocktest.Loop(t, nil)
	if !n.Info().SingleLoop {
		t.Error("it does not say that it wants one loop")
	}
	a, b := blocktest.Bare(t, one, n), blocktest.Bare(t, one, n)
	queueOn := func(l *aio.Loop) error { return blocktest.On(t, l, func() error { _, err := n.Queue(l); return err }) }
	if err := queueOn(two); !errors.Is(err, block.ErrBusy) {
		t.Errorf("a second loop: %v", err)
	}
	if err := n.Close(); !errors.Is(err, block.ErrBusy) {
		t.Errorf("closed while it is used: %v", err)
	}
	data, got := bytes.Repeat([]byte{7}, 1000), make([]byte, 1000)
	if err := errors.Join(a.Write(5000, data), b.Read(5000, got)); err != nil || !bytes.Equal(got, data) {
		t.Errorf("the other queue reads other bytes, or %v", err)
	}
	a.Close()
	if err := queueOn(two); !errors.Is(err, block.ErrBusy) {
		t.Errorf("a second loop, while a queue is left: %v", err)
	}
	b.Close()
	c := blocktest.Bare(t, two, n)
	clear(got)
	if err := c.Read(5000, got); err != nil || !bytes.Equal(got, data) {
		t.Errorf("other bytes on another loop, or %v", err)
	}
	s, err := n.Stats(context.Background())
	if err != nil || s.Direct+s.Indirect == 0 || s.Tables.L2CacheCovers < 1<<20 {
		t.Errorf("%+v, %v", s, err)
	}
	c.Close()
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if err := queueOn(two); !errors.Is(err, syscall.EBADF) {
		t.Errorf("a queue of a closed image: %v", err)
	}
	if _, err := n.Stats(context.Background()); !errors.Is(err, syscall.EBADF) {
		t.Errorf("counters of a closed image: %v", err)
	}
}

// Memory that vanishes under a request fails that request, and nothing else.
func TestMemoryVanishes(t *testing.T) {
	b := newBed(t, create.Options{}, 8*cluster, nil)
	if err := errors.Join(b.Write(0, bytes.Repeat([]byte{1}, cluster)), b.Zero(cluster, cluster, 0)); err != nil {
		t.Fatal(err)
	}
	fd, err := sys.MemfdCreate("guest", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer sys.Close(fd)
	page := sys.PageSize()
	if err := sys.Ftruncate(fd, int64(page)); err != nil {
		t.Fatal(err)
	}
	guest, err := sys.Mmap(fd, 0, page, sys.PROT_READ|sys.PROT_WRITE, sys.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer sys.Munmap(guest)
	if err := sys.Ftruncate(fd, 0); err != nil {
		t.Fatal(err)
	}
	for _, c := range []*blocktest.Call{
		{Op: block.OpRead, Offset: 100},               // data
		{Op: block.OpRead, Offset: cluster},           // zeros
		{Op: block.OpRead, Offset: 5 * cluster},       // nothing
		{Op: block.OpRead, Offset: cluster - 512},     // data and zeros
		{Op: block.OpWrite, Offset: 200},              // in place
		{Op: block.OpWrite, Offset: 3*cluster - 1000}, // new clusters
	} {
		c.Bufs = [][]byte{guest}
		if err := b.Run(c); block.Errno(err) != syscall.EFAULT {
			t.Errorf("%s: %v", c, err)
		}
	}
	got := make([]byte, 2*cluster)
	if err := errors.Join(b.Write(3*cluster-1000, got), b.Read(0, got)); err != nil || got[0] != 1 || got[cluster] != 0 {
		t.Errorf("after that: %v", err)
	}
}

// Images that cannot be opened say why, and leave the file to the caller.
func TestImagesThatAreRefused(t *testing.T) {
	change := func(at int, v uint32) func(b []byte) {
		return func(b []byte) { binary.BigEndian.PutUint32(b[at:], v) }
	}
	for name, c := range map[string]struct {
		change func(b []byte)
		o      *qcow2.Options
		errno  syscall.Errno
	}{
		"no image":               {change(0, 0), nil, syscall.EINVAL},
		"version 4":              {change(4, 4), nil, syscall.EOPNOTSUPP},
		"encrypted":              {change(32, 2), nil, syscall.EOPNOTSUPP},
		"unknown feature":        {change(76, 1<<5), nil, syscall.EOPNOTSUPP},
		"unknown feature, read":  {change(76, 1<<5), &qcow2.Options{ReadOnly: true}, syscall.EOPNOTSUPP},
		"corrupt":                {change(76, 1<<1), nil, syscall.EACCES},
		"no refcounts":           {change(56, 0), nil, syscall.EINVAL},
		"snapshot to write":      {func([]byte) {}, &qcow2.Options{Snapshot: "x"}, syscall.EINVAL},
		"snapshot that is not":   {func([]byte) {}, &qcow2.Options{Snapshot: "x", ReadOnly: true}, syscall.ENOENT},
		"length of header short": {change(100, 96), nil, syscall.EINVAL},
		"length of header odd":   {change(100, 108), nil, syscall.EINVAL},
	} {
		t.Run(name, func(t *testing.T) {
			contents := newImage(t, create.Options{}, 1<<20)
			c.change(contents)
			m, err := mem.New(mem.Options{Size: 4 << 20, Growable: true})
			if err != nil {
				t.Fatal(err)
			}
			if err := fill(m, contents); err != nil {
				t.Fatal(err)
			}
			n, err := qcow2.Open(m, c.o)
			if err == nil {
				n.Close()
				t.Fatal("it was opened")
			}
			if block.Errno(err) != c.errno {
				t.Errorf("error is %q (%v), want %v", err, block.Errno(err), c.errno)
			}
			if err := m.Close(); err != nil { // it is ours
				t.Error(err)
			}
		})
	}
	if _, err := qcow2.Open(null.New(null.Options{Size: 1 << 20, ReadZeroes: true}), nil); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("nothing at all: %v", err)
	}
}

// What is damaged, or marked so, can be read all the same.
func TestCorruptImageIsRead(t *testing.T) {
	contents := newImage(t, create.Options{}, 1<<20)
	contents[79] |= 2
	below := inMemory(t, contents, mem.Options{})
	n := open(t, below.Node, &qcow2.Options{ReadOnly: true})
	h := block.NewHandle(n, nil)
	d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
	if err := d.Read(0, make([]byte, 4096)); err != nil {
		t.Error(err)
	}
	if err := d.Write(0, make([]byte, 4096)); !errors.Is(err, block.ErrReadOnly) {
		t.Error(err)
	}
	d.Close()
	if err := h.Close(); err != nil {
		t.Error(err)
	}
}

// Blocks of the file that are larger than an image's clusters are refused, with a remedy.
func TestAlignmentIsTooCoarse(t *testing.T) {
	shaped := blocktest.NewShape(t, inMemory(t, newImage(t, create.Options{ClusterSize: 2048}, 1<<20), mem.Options{}), func(i *block.Info) { i.Align, i.MemAlign = 4096, 512 })
	if _, err := qcow2.Open(shaped, nil); !errors.Is(err, qcow2.ErrAlign) {
		t.Error(err)
	}
	if err := shaped.Close(); err != nil {
		t.Error(err)
	}
}

// A cluster that is let go while a write to it is still under way is given to nobody else before that has ended.
func TestClustersAreNotReusedUnderARequest(t *testing.T) {
	for _, op := range []block.Op{block.OpWrite, block.OpRead} {
		faults, err := fault.New(inMemory(t, newImage(t, create.Options{}, 64*cluster), mem.Options{}), "")
		if err != nil {
			t.Fatal(err)
		}
		n := open(t, faults, nil)
		h := block.NewHandle(n, nil)
		d := blocktest.Guarded(t, blocktest.Loop(t, nil), h)
		old, late, fresh := bytes.Repeat([]byte{1}, cluster), bytes.Repeat([]byte{2}, cluster), make([]byte, 32*cluster)
		if err := errors.Join(d.Write(0, old), d.Flush()); err != nil {
			t.Fatal(err)
		}
		if err := faults.Set(op.String() + " delay=300ms count=1"); err != nil {
			t.Fatal(err)
		}
		held := d.Start(&blocktest.Call{Op: op, Offset: 0, Bufs: [][]byte{late}})
		if err := errors.Join(d.Discard(0, cluster), d.Flush(), d.Flush()); err != nil {
			t.Fatal(err)
		}
		blocktest.Pattern(fresh, 0, 3)
		if err := errors.Join(d.Write(8*cluster, fresh), d.Flush()); err != nil {
			t.Fatal(err)
		}
		if err := held.Wait(t); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(fresh))
		if err := d.Read(8*cluster, got); err != nil || !bytes.Equal(got, fresh) {
			t.Errorf("%s: another cluster holds the late bytes, or %v", op, err)
		}
		if op == block.OpRead && !bytes.Equal(late, old) && !bytes.Equal(late, make([]byte, cluster)) {
			t.Error("a late read found another cluster's bytes")
		}
		d.Close()
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
}
