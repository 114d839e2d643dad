// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

// an image of the most usual kind, with one user
func usual(t testing.TB, o create.Options, open Options) (*memStore, *guest) {
	t.Helper()
	if o.Size == 0 {
		o.Size = 4 << 20
	}
	sh := shape{"", o, open}
	s := newImage(t, &sh)
	return s, newGuest(mustOpen(t, s, &open), s)
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func (g *guest) mustWrite(t testing.TB, off, n int64) {
	t.Helper()
	must(t, g.write(g.fill(off, n), off))
}

func put64(s *memStore, off int64, v uint64) { binary.BigEndian.PutUint64(s.data[off:], v) }

func TestHeaderIsKeptAsItWasRead(t *testing.T) {
	s, g := usual(t, create.Options{LazyRefcounts: true}, Options{})
	must(t, g.m.Close())
	h, err := qcow2.ReadHeader(s.Read)
	must(t, err)
	h.Compatible |= 1 << 5
	h.Autoclear |= 1 << 7
	h.SetExtension(0x12345678, []byte("what is this?"))
	b, err := h.Encode()
	must(t, err)
	copy(s.data, b)
	g.m = mustOpen(t, s, &Options{})
	if !bytes.Equal(s.data[:len(b)], b) {
		t.Error("opening changed the header")
	}
	g.mustWrite(t, 0, 512)
	must(t, g.m.Close())
	put64(s, qcow2.OffsetAutoclear, 1<<7)
	if !bytes.Equal(s.data[:len(b)], b) {
		t.Errorf("header has changed otherwise than in its autoclear bits")
	}
}

// TestUnknownAutoclearBitsGoBeforeTheFirstChange: and stay without one.
func TestUnknownAutoclearBitsGoBeforeTheFirstChange(t *testing.T) {
	s, g := usual(t, create.Options{}, Options{})
	g.mustWrite(t, 0, 512)
	must(t, g.m.Close())
	put64(s, qcow2.OffsetAutoclear, 1<<9)
	g.m = mustOpen(t, s, &Options{})
	must(t, g.m.Commit())
	if binary.BigEndian.Uint64(s.data[qcow2.OffsetAutoclear:]) != 1<<9 {
		t.Error("a flush cleared the bit")
	}
	s.logged = true
	g.mustWrite(t, 0, 512) // in place
	if s.log[0].off != 0 || s.log[1].data != nil {
		t.Error("data were written before the bit was durably cleared")
	}
	if binary.BigEndian.Uint64(s.data[qcow2.OffsetAutoclear:]) != 0 {
		t.Error("bit is still set")
	}
}

func TestCorruptImageIsOpenedForReadingOnly(t *testing.T) {
	s, g := usual(t, create.Options{}, Options{})
	must(t, g.m.Close())
	put64(s, qcow2.OffsetIncompatible, qcow2.Corrupt)
	if _, err := Open(s, nil); !errors.Is(err, syscall.EACCES) {
		t.Errorf("open for writing: %v", err)
	}
	mustOpen(t, s, &Options{ReadOnly: true})
	mustOpen(t, s, &Options{KeepCorrupt: true})
}

// TestDataNeverGoUponTables patches an L2 entry to lead to each kind of table, and writes there.
func TestDataNeverGoUponTables(t *testing.T) {
	for _, to := range []string{"L1 table", "refcount table", "refcount block", "L2 table", "snapshot table", "snapshot's L1 table"} {
		t.Run(to, func(t *testing.T) {
			s, g := usual(t, create.Options{ClusterSize: 4096}, Options{})
			_, err := g.m.CreateSnapshot(SnapshotInfo{Name: "one"})
			must(t, err)
			g.mustWrite(t, 0, 8192)
			must(t, g.m.Close())
			h, _ := qcow2.ReadHeader(s.Read)
			l2 := qcow2.L1Entry(binary.BigEndian.Uint64(s.data[h.L1Offset:])).Offset()
			all, _, _ := qcow2.ReadSnapshots(s.Read, h)
			target := map[string]int64{
				"L1 table": h.L1Offset, "refcount table": h.RefcountTableOffset, "L2 table": l2,
				"refcount block": int64(binary.BigEndian.Uint64(s.data[h.RefcountTableOffset:])),
				"snapshot table": h.SnapshotsOffset, "snapshot's L1 table": all[0].L1Offset,
			}[to]
			put64(s, l2, uint64(target)|1<<63)
			before := append([]byte(nil), s.data[target:target+4096]...)
			g.m = mustOpen(t, s, &Options{})
			if err := g.write(g.fill(0, 512), 0); !errors.Is(err, syscall.EIO) {
				t.Errorf("write: %v", err)
			}
			if !bytes.Equal(before, s.data[target:target+4096]) {
				t.Error("table has changed")
			}
			wantBroken(t, s, g)
		})
	}
}

// wantBroken is what must hold when damage was found: all changes fail, reads elsewhere do not, and the image says so.
func wantBroken(t *testing.T, s *memStore, g *guest) {
	t.Helper()
	if binary.BigEndian.Uint64(s.data[qcow2.OffsetIncompatible:])&qcow2.Corrupt == 0 {
		t.Error("image is not marked corrupt")
	}
	if err := g.write(g.fill(1<<20, 512), 1<<20); !errors.Is(err, syscall.EIO) {
		t.Errorf("write elsewhere: %v", err)
	}
	if x, ok := g.m.Lookup(4096, 512); ok && x.InPlace {
		t.Error("data may still be overwritten")
	}
	must(t, g.read(make([]byte, 512), 4096))
	if err := g.m.Commit(); !errors.Is(err, syscall.EIO) {
		t.Errorf("flush: %v", err)
	}
	_ = g.m.Close()
}

func TestEntryThatIsNotSoundIsRefused(t *testing.T) {
	for _, word := range []uint64{0x12345200, 0x12345200 | 1<<63} {
		s, g := usual(t, create.Options{}, Options{})
		g.mustWrite(t, 0, 8192)
		must(t, g.m.Close())
		h, _ := qcow2.ReadHeader(s.Read)
		l2 := qcow2.L1Entry(binary.BigEndian.Uint64(s.data[h.L1Offset:])).Offset()
		put64(s, l2+8*16, word) // at 1 MiB
		g.m = mustOpen(t, s, &Options{ReadOnly: true})
		if err := g.read(make([]byte, 512), 1<<20); !errors.Is(err, syscall.EIO) {
			t.Errorf("read: %v", err)
		}
		if binary.BigEndian.Uint64(s.data[qcow2.OffsetIncompatible:]) != 0 {
			t.Error("an image that is open for reading was written to")
		}
		g.m = mustOpen(t, s, &Options{})
		if err := g.read(make([]byte, 512), 1<<20); !errors.Is(err, syscall.EIO) {
			t.Errorf("read: %v", err)
		}
		wantBroken(t, s, g)
	}
}

// TestTablesThatOverlapAreNotWritten: two L1 entries lead to one L2 table, or one to a refcount block.
func TestTablesThatOverlapAreNotWritten(t *testing.T) {
	for _, block := range []bool{false, true} {
		s, g := usual(t, create.Options{ClusterSize: 4096, Size: 16 << 20}, Options{})
		g.mustWrite(t, 0, 8192)
		must(t, g.m.Close())
		h, _ := qcow2.ReadHeader(s.Read)
		e := binary.BigEndian.Uint64(s.data[h.L1Offset:])
		if block {
			e = binary.BigEndian.Uint64(s.data[h.RefcountTableOffset:]) | 1<<63
		}
		put64(s, h.L1Offset+8, e)
		g.m = mustOpen(t, s, &Options{})
		if err := g.write(g.fill(3<<20, 512), 3<<20); !errors.Is(err, syscall.EIO) {
			t.Errorf("write: %v", err)
		}
		if binary.BigEndian.Uint64(s.data[qcow2.OffsetIncompatible:])&qcow2.Corrupt == 0 {
			t.Error("image is not marked corrupt")
		}
	}
}

// TestFreeClusterThatIsATableIsNotUsed: refcounts say that a table's cluster is free.
func TestFreeClusterThatIsATableIsNotUsed(t *testing.T) {
	s, g := usual(t, create.Options{ClusterSize: 4096}, Options{})
	g.mustWrite(t, 0, 4096)
	must(t, g.m.Close())
	h, _ := qcow2.ReadHeader(s.Read)
	l2 := qcow2.L1Entry(binary.BigEndian.Uint64(s.data[h.L1Offset:])).Offset()
	block := int64(binary.BigEndian.Uint64(s.data[h.RefcountTableOffset:]))
	qcow2.SetRefcount(s.data[block:], 4, int(l2>>12), 0)
	g.m = mustOpen(t, s, &Options{})
	if err := g.write(g.fill(1<<20, 512), 1<<20); !errors.Is(err, syscall.EIO) {
		t.Errorf("write: %v", err)
	}
	wantBroken(t, s, g)
}

func TestImageThatWasNotClosedIsRebuilt(t *testing.T) {
	s, g := usual(t, create.Options{LazyRefcounts: true}, Options{})
	g.mustWrite(t, 0, 1<<20)
	must(t, g.m.Commit())
	if binary.BigEndian.Uint64(s.data[qcow2.OffsetIncompatible:]) != qcow2.Dirty {
		t.Fatal("dirty bit is not set")
	}
	g.m = mustOpen(t, s, &Options{ReadOnly: true})
	g.verify(t)
	g.m = mustOpen(t, s, &Options{})
	if g.m.Header().IsDirty() {
		t.Error("dirty bit is still set after opening")
	}
	g.verify(t)
	g.mustWrite(t, 2<<20, 1<<20)
	must(t, g.m.Close())
	if binary.BigEndian.Uint64(s.data[qcow2.OffsetIncompatible:]) != 0 {
		t.Error("dirty bit is set after closing")
	}
	wantClean(t, s, false, havePeer())
}

// TestCommitFlushesNoMoreThanItMust counts flushes, and lazy refcounts that are not written.
func TestCommitFlushesNoMoreThanItMust(t *testing.T) {
	s, g := usual(t, create.Options{Size: 16 << 20, ClusterSize: 4096}, Options{})
	count := func(want int, what string, fn func()) {
		t.Helper()
		before := s.flushes
		fn()
		must(t, g.m.Commit())
		if n := s.flushes - before; n != want {
			t.Errorf("%s: %d flushes, want %d", what, n, want)
		}
	}
	count(1, "nothing changed", func() {})
	count(2, "first cluster of an L2 table", func() { g.mustWrite(t, 0, 512) })
	count(2, "one more cluster", func() { g.mustWrite(t, 1<<20, 512) })
	count(1, "data in place", func() { g.mustWrite(t, 1<<20, 512) })
	count(2, "another L2 table and one more", func() { g.mustWrite(t, 6<<20, 512); g.mustWrite(t, 1<<20+4096, 512) })
	count(2, "discard", func() { must(t, g.discard(0, 1<<20)) })
}

func TestLookupTakesNoMemory(t *testing.T) {
	_, g := usual(t, create.Options{}, Options{})
	g.mustWrite(t, 0, 1<<20)
	m := g.m
	if n := testing.AllocsPerRun(1000, func() {
		ticket := m.Enter()
		x, ok := m.Lookup(4096, 1<<20)
		if !ok || !x.InPlace || x.Length != 1<<20-4096 {
			t.Fatal(x, ok)
		}
		m.Exit(ticket)
	}); n != 0 {
		t.Errorf("%v allocations for a lookup", n)
	}
}

// TestRunsAreAsLongAsTheyCanBe looks at extents across slices and across tables that are not there.
func TestRunsAreAsLongAsTheyCanBe(t *testing.T) {
	sh := shape{"", create.Options{Size: 1 << 40}, Options{}}
	x, err := mustOpen(t, newImage(t, &sh), &sh.open).Map(0, 1<<40)
	must(t, err)
	if x.Kind != Unallocated || x.Length != 1<<40 {
		t.Errorf("empty disk: %+v", x)
	}
	_, g := usual(t, create.Options{Size: 1 << 20, ClusterSize: 512}, Options{})
	for _, off := range []int64{0, 32 << 10} {
		g.mustWrite(t, off, 32<<10)
	}
	x, err = g.m.Map(31<<10, 2<<10)
	must(t, err)
	if x.Kind != Data || x.Length > 2<<10 {
		t.Errorf("across tables: %+v", x)
	}
}

// TestOverwritingDoesNotGrowTheFile does the same write and flush again and again, in place and by way of discards.
func TestOverwritingDoesNotGrowTheFile(t *testing.T) {
	for _, how := range []string{"write", "discard", "compress", "zero"} {
		s, g := usual(t, create.Options{Size: 64 << 20}, Options{})
		var early int
		for i := range 2000 {
			switch how {
			case "discard":
				must(t, g.discard(0, 65536))
			case "zero":
				must(t, g.zero(0, 65536, true))
			case "compress":
				must(t, g.compress(0))
			}
			g.mustWrite(t, 0, 4096)
			must(t, g.m.Commit())
			if i == 10 {
				early = len(s.data)
			}
		}
		if late := len(s.data); late > early+2*65536 {
			t.Errorf("%s: file grew from %d to %d bytes", how, early, late)
		}
		must(t, g.m.Close())
		wantClean(t, s, false, false)
	}
}

// TestTrimmingAndWritingKeepsTheFileSmall trims and writes at random, without a flush.
func TestTrimmingAndWritingKeepsTheFileSmall(t *testing.T) {
	const size = 32 << 20
	for _, keep := range []bool{false, true} {
		s, g := usual(t, create.Options{Size: size, ClusterSize: 4096}, Options{KeepOnDiscard: keep})
		r := rand.New(rand.NewPCG(1, 1))
		g.mustWrite(t, 0, size)
		full := int64(len(s.data))
		for range 300 {
			n := (4 + r.Int64N(60)) << 10
			off := r.Int64N((size-n)>>12) << 12
			must(t, g.discard(off, n))
			if x, err := g.m.Map((off+4095)&^4095, 512); err != nil || x.Kind != Zero && x.Kind != ZeroAllocated {
				t.Fatalf("discarded range is %+v (%v)", x, err)
			}
			off = r.Int64N((size-n)>>12) << 12
			g.mustWrite(t, off, n)
		}
		limit := full + size/10
		if keep {
			limit = full
		}
		if now := int64(len(s.data)); now > limit {
			t.Errorf("keep %v: file grew from %d to %d bytes", keep, full, now)
		}
		g.verify(t)
		must(t, g.m.Close())
		wantClean(t, s, false, false)
	}
}

func TestResize(t *testing.T) {
	for _, sh := range shapes() {
		if sh.o.BackingFile != "" {
			continue
		}
		t.Run(sh.name, func(t *testing.T) {
			s := newImage(t, &sh)
			g := newGuest(mustOpen(t, s, &sh.open), s)
			r := rand.New(rand.NewPCG(1, 9))
			for i := range 24 {
				for range 10 {
					_, err := g.step(r)
					must(t, err)
				}
				g.resize(t, sh.o.Size/4&^511+r.Int64N(sh.o.Size*8/512)*512)
				g.verify(t)
				if i%6 == 5 {
					must(t, g.m.Close())
					wantClean(t, s, false, havePeer() && i == 23)
					g.m = mustOpen(t, s, &sh.open)
					g.verify(t)
				}
			}
		})
	}
}

// resize changes the disk, and zeroes what the tables could not.
func (g *guest) resize(t *testing.T, size int64) {
	t.Helper()
	old := g.m.Size()
	must(t, g.m.Resize(size, true))
	if g.m.Size() != size {
		t.Fatalf("size is %d, want %d", g.m.Size(), size)
	}
	disk := make([]byte, size)
	copy(disk, g.disk)
	g.disk = disk
	cluster := g.m.Geometry().ClusterSize
	if rest := min(size, (old+cluster-1)&^(cluster-1)) - old; rest > 0 {
		must(t, g.write(make([]byte, rest), old))
	}
}

func TestResizeRefuses(t *testing.T) {
	_, g := usual(t, create.Options{Version: 2}, Options{})
	for _, c := range []struct {
		size   int64
		shrink bool
		want   error
	}{{4<<20 + 1, true, syscall.EINVAL}, {-512, true, syscall.EINVAL}, {1 << 20, false, syscall.EINVAL}, {1 << 61, true, syscall.EFBIG}} {
		if err := g.m.Resize(c.size, c.shrink); !errors.Is(err, c.want) {
			t.Errorf("resize to %d: %v, want %v", c.size, err, c.want)
		}
	}
	_, err := g.m.CreateSnapshot(SnapshotInfo{})
	must(t, err)
	if err := g.m.Resize(8<<20, true); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("resize version 2 with snapshots: %v", err)
	}
}

func TestSnapshotsKeepTheDisk(t *testing.T) {
	for _, sh := range shapes() {
		if sh.o.RefcountBits == 1 || sh.o.BackingFile != "" {
			continue
		}
		t.Run(sh.name, func(t *testing.T) {
			s := newImage(t, &sh)
			g := newGuest(mustOpen(t, s, &sh.open), s)
			r := rand.New(rand.NewPCG(3, 9))
			kept := make(map[string][]byte)
			for i := range 12 {
				for range 12 {
					_, err := g.step(r)
					must(t, err)
				}
				id := string(rune('1' + i))
				sn, err := g.m.CreateSnapshot(SnapshotInfo{Name: "n" + id, Seconds: 5})
				must(t, err)
				if sn.ID != id {
					t.Fatalf("ID %q, want %q", sn.ID, id)
				}
				kept[id] = append([]byte(nil), g.disk...)
				if i == 5 {
					must(t, g.m.ApplySnapshot("n3"))
					g.disk = append([]byte(nil), kept["3"]...)
				}
				if i == 8 {
					must(t, g.m.DeleteSnapshot("2"), g.m.DeleteSnapshot("n5"))
					delete(kept, "2")
					delete(kept, "5")
				}
				if sh.o.Version != 2 && i == 3 {
					g.resize(t, g.m.Size()+int64(64<<10))
				}
				g.verify(t)
				if i == 8 {
					break // the next ID would have two digits
				}
			}
			for id, want := range kept {
				v, err := g.m.OpenSnapshot(id)
				must(t, err)
				p := make([]byte, v.Size())
				must(t, (&guest{m: v, s: s}).read(p, 0))
				if i := firstDifference(p, want); i >= 0 {
					t.Errorf("snapshot %s differs at %#x", id, i)
				}
			}
			must(t, g.m.Close())
			wantClean(t, s, false, havePeer())
			g.m = mustOpen(t, s, &sh.open)
			for id := range kept {
				must(t, g.m.DeleteSnapshot(id))
			}
			g.verify(t)
			must(t, g.m.Close())
			wantClean(t, s, false, havePeer())
		})
	}
}

// TestSnapshotThatIsRefusedLeavesNothing: refcounts of one bit cannot count a second use.
func TestSnapshotThatIsRefusedLeavesNothing(t *testing.T) {
	s, g := usual(t, create.Options{RefcountBits: 1}, Options{})
	g.mustWrite(t, 0, 1<<20)
	if _, err := g.m.CreateSnapshot(SnapshotInfo{Name: "no"}); !errors.Is(err, syscall.ERANGE) {
		t.Errorf("snapshot with refcounts of one bit: %v", err)
	}
	g.mustWrite(t, 0, 1<<20)
	must(t, g.m.Close())
	wantClean(t, s, false, havePeer())
	if _, err := g.m.OpenSnapshot("no"); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("open a snapshot that is not there: %v", err)
	}
}

func TestPeerReadsOurSnapshots(t *testing.T) {
	if !havePeer() {
		t.Skip("needs qemu-img (package qemu-utils)")
	}
	s, g := usual(t, create.Options{}, Options{})
	g.mustWrite(t, 0, 1<<20)
	_, err := g.m.CreateSnapshot(SnapshotInfo{Name: "first", Seconds: 1e9})
	must(t, err)
	was := append([]byte(nil), g.disk...)
	g.mustWrite(t, 65536*3, 300)
	must(t, g.m.Close())
	path := s.save(t)
	out, err := exec.Command("qemu-img", "convert", "-l", "first", "-O", "raw", path, path+".raw").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	raw := readFile(t, path+".raw")
	if i := firstDifference(raw, was); i >= 0 {
		t.Errorf("snapshot differs at %#x for qemu-img", i)
	}
}

func TestBitmaps(t *testing.T) {
	s, g := usual(t, create.Options{Size: 256 << 20, ClusterSize: 4096}, Options{})
	m := g.m
	must(t, m.AddBitmap("a", 0, false), m.AddBitmap("b", 512, true), m.AddBitmap("c", 65536, true))
	if err := m.AddBitmap("a", 0, false); !errors.Is(err, syscall.EEXIST) {
		t.Errorf("add a bitmap twice: %v", err)
	}
	if err := m.AddBitmap("d", 1000, false); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("granularity 1000: %v", err)
	}
	must(t, m.EnableBitmap("c", true), m.EnableBitmap("a", false), m.ClearBitmap("b"), m.MergeBitmap("a", m, "b"))
	must(t, m.RemoveBitmap("b"))
	must(t, m.Close())
	wantClean(t, s, false, havePeer())
	g.m = mustOpen(t, s, &Options{})
	g.resize(t, 300<<20)
	must(t, g.m.Close())
	wantClean(t, s, false, havePeer())
	g.m = mustOpen(t, s, &Options{})
	flags := map[string]uint32{}
	for _, b := range g.m.Bitmaps() {
		flags[b.Name] = b.Flags
	}
	if len(flags) != 2 || flags["a"] != 0 || flags["c"] != qcow2.BitmapAuto {
		t.Errorf("flags are %v after a resize", flags)
	}
	g.mustWrite(t, 0, 512)
	if err := g.m.ClearBitmap("c"); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("clear an inconsistent bitmap: %v", err)
	}
	must(t, g.m.RemoveBitmap("c"), g.m.RemoveBitmap("a"))
	must(t, g.m.Close())
	wantClean(t, s, false, havePeer())
	if h, _ := qcow2.ReadHeader(s.Read); h.Autoclear != 0 {
		t.Error("autoclear bit is set without bitmaps")
	}
}

// TestWritingOutdatesEnabledBitmaps before the data are written, and leaves the others alone.
func TestWritingOutdatesEnabledBitmaps(t *testing.T) {
	s, g := usual(t, create.Options{}, Options{})
	g.mustWrite(t, 0, 65536)
	must(t, g.m.AddBitmap("on", 0, false), g.m.AddBitmap("off", 0, true))
	must(t, g.m.Close())
	g.m = mustOpen(t, s, &Options{})
	must(t, g.m.Commit())
	s.logged = true
	g.mustWrite(t, 0, 512)
	for i, e := range s.log {
		if bytes.Equal(e.data, g.disk[:512]) && i < 3 {
			t.Error("data came before the mark was durable")
		}
	}
	for _, b := range g.m.Bitmaps() {
		if in := b.Flags&qcow2.BitmapInUse != 0; in != (b.Name == "on") {
			t.Errorf("bitmap %s: in use %v", b.Name, in)
		}
	}
	must(t, g.m.Close())
	wantClean(t, s, false, havePeer())
}

// TestPeerSeesOurMerge sets bits with the peer, merges with ours, and looks with the peer.
func TestPeerSeesOurMerge(t *testing.T) {
	if !havePeer() {
		t.Skip("needs qemu-img (package qemu-utils)")
	}
	s, g := usual(t, create.Options{Size: 64 << 20}, Options{})
	must(t, g.m.Close())
	path := s.save(t)
	for _, args := range [][]string{
		{"qemu-img", "bitmap", "--add", "-g", "4096", path, "src"},
		{"qemu-io", "-f", "qcow2", "-c", "write 1M 192k", "-c", "write 9M 4k", path},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	s.data = readFile(t, path)
	m := mustOpen(t, s, &Options{})
	must(t, m.AddBitmap("dst", 65536, true), m.MergeBitmap("dst", m, "src"))
	if b := m.Bitmaps()[0]; !b.Usable() {
		t.Error("source has become inconsistent")
	}
	set := bitSet{perCluster: m.g.ClusterSize * 8, clusters: make(map[int64][]byte)}
	dst := m.Bitmaps()[1]
	must(t, m.addBits(&set, m, &dst, dst.GranularityBits))
	if want := []byte{0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}; !bytes.HasPrefix(set.clusters[0], want) {
		t.Errorf("bits % x, want % x", set.clusters[0][:20], want)
	}
	must(t, m.Close())
	wantClean(t, s, false, true)
	out, err := exec.Command("qemu-img", "info", "--output=json", s.save(t)).Output()
	must(t, err)
	if !json.Valid(out) || !strings.Contains(string(out), `"dst"`) {
		t.Errorf("qemu-img info does not show the bitmap: %s", out)
	}
}

// TestExternalDataFile keeps guest data where the guest has them, in a file of its own.
func TestExternalDataFile(t *testing.T) {
	data := &memStore{}
	s := &memStore{}
	_, err := create.Create(s, &create.Options{Size: 1 << 20, ClusterSize: 4096, DataFile: "data"})
	must(t, err)
	if _, err := Open(s, nil); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("open for writing without the data file: %v", err)
	}
	m := mustOpen(t, s, &Options{Data: data})
	g := newGuest(m, data)
	r := rand.New(rand.NewPCG(4, 4))
	for range 300 {
		off := r.Int64N(m.Size()/512) * 512
		n := min(m.Size()-off, (1+r.Int64N(40))*512)
		switch r.IntN(4) {
		case 0:
			must(t, g.zero(off, n, true))
		case 1:
			must(t, g.discard(off, n))
		default:
			g.mustWrite(t, off, n)
		}
	}
	g.verify(t)
	g.mustWrite(t, 0, 65536)
	must(t, g.discard(4096, 8192))
	if p := data.data[4096 : 4096+8192]; len(bytes.Trim(p, "\xdb")) > 0 {
		t.Error("discarded range was not discarded in the data file")
	}
	g.verify(t)
	for off := int64(0); off < m.Size(); {
		x, err := m.Map(off, m.Size()-off)
		must(t, err)
		if x.Kind == Data && x.Host != off {
			t.Errorf("guest offset %#x is at %#x", off, x.Host)
		}
		off += x.Length
	}
	before := data.flushes
	must(t, m.Commit())
	if data.flushes == before {
		t.Error("data file was not flushed")
	}
	if _, err := m.CreateSnapshot(SnapshotInfo{}); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("snapshot: %v", err)
	}
	must(t, m.Close())
	wantClean(t, s, false, false)
}

// TestFullStoreIsLeftAgain: no space for a while, as on a file system that others fill.
func TestFullStoreIsLeftAgain(t *testing.T) {
	s, g := usual(t, create.Options{Size: 64 << 20}, Options{})
	full := &limited{memStore: s, limit: 8 << 20}
	g.m = mustOpen(t, full, &Options{})
	g.s = full
	var off int64
	var err error
	for ; err == nil; off += 1 << 20 {
		err = g.write(g.fill(off, 1<<20), off)
	}
	if !errors.Is(err, syscall.ENOSPC) || off < 7<<20 {
		t.Fatalf("after %d bytes: %v", off, err)
	}
	must(t, g.m.Commit()) // what is there can be flushed without more space
	must(t, g.read(g.disk[off-1<<20:off], off-1<<20))
	g.verify(t)
	full.limit = 64 << 20
	g.mustWrite(t, off-1<<20, 2<<20)
	g.verify(t)
	must(t, g.m.Close())
	wantClean(t, s, false, havePeer())
}

// limited is a store that does not grow beyond a length.
type limited struct {
	*memStore
	limit int64
}

func (l *limited) Write(p []byte, off int64) error {
	if off+int64(len(p)) > l.limit {
		return syscall.ENOSPC
	}
	return l.memStore.Write(p, off)
}

// TestCommitsAreShared: flushes that come while one runs wait for one more, not for one each.
func TestCommitsAreShared(t *testing.T) {
	w := newWorld(1)
	sh := shape{"", create.Options{Size: 4 << 20}, Options{Waiter: w}}
	s := newImage(t, &sh)
	m := mustOpen(t, s, &sh.open)
	s.turn = w.turn
	w.spawn(func() { must(t, m.Commit()) })
	for range 8 {
		w.spawn(func() {
			w.Wait(func() bool { return m.running })
			must(t, m.Commit())
		})
	}
	if !w.run() {
		t.Fatal("all wait")
	}
	if n := m.Stats().Commits; n != 2 {
		t.Errorf("%d commits for 9 flushes, want 2", n)
	}
}

// TestZeroStopsBeforeWhatIsBeingWritten: an allocation is under way in a later cluster of the range.
func TestZeroStopsBeforeWhatIsBeingWritten(t *testing.T) {
	_, g := usual(t, create.Options{ClusterSize: 16384, ExtendedL2: true}, Options{})
	g.mustWrite(t, 0, 32768)
	var a Allocation
	must(t, g.m.BeginWrite(&a, 49152, 512))
	n, err := g.m.Zero(0, 65536, true)
	if err != nil || n != 49152 {
		t.Errorf("zeroed %d bytes (%v), want all before the allocation", n, err)
	}
	g.m.Abort(&a)
}

// TestWriteDoesNotTouchTheRestOfASubcluster that has data, where others may be writing in place.
func TestWriteDoesNotTouchTheRestOfASubcluster(t *testing.T) {
	_, g := usual(t, create.Options{ClusterSize: 65536, ExtendedL2: true}, Options{})
	g.mustWrite(t, 2048, 2048) // subcluster 1
	var a Allocation
	must(t, g.m.BeginWrite(&a, 1024, 2048)) // the end of 0 and the beginning of 1
	if a.Head != 1024 || a.Tail != 0 || a.Length != 2048 {
		t.Errorf("head %d, length %d, tail %d; want 1024, 2048, 0", a.Head, a.Length, a.Tail)
	}
	g.m.Abort(&a)
}

// TestSingleUserIsToldThatHeWaitsForHimself instead of waiting for ever.
func TestSingleUserIsToldThatHeWaitsForHimself(t *testing.T) {
	_, g := usual(t, create.Options{}, Options{})
	var a, b Allocation
	must(t, g.m.BeginWrite(&a, 0, 512))
	if err := g.m.BeginWrite(&b, 512, 512); !errors.Is(err, syscall.EDEADLK) {
		t.Errorf("second allocation of a cluster: %v", err)
	}
	g.m.Abort(&a)
	g.mustWrite(t, 0, 512)
}

func TestReadOnlyImageIsNotChanged(t *testing.T) {
	s, g := usual(t, create.Options{}, Options{})
	g.mustWrite(t, 0, 65536)
	must(t, g.m.Close())
	before := append([]byte(nil), s.data...)
	m := mustOpen(t, s, &Options{ReadOnly: true})
	var a Allocation
	_, zeroed := m.Zero(0, 512, true)
	_, made := m.CreateSnapshot(SnapshotInfo{})
	for i, err := range []error{m.BeginWrite(&a, 0, 512), zeroed, m.Discard(0, 65536), made, m.Resize(8<<20, true), m.AddBitmap("x", 0, true)} {
		if !errors.Is(err, syscall.EROFS) {
			t.Errorf("change %d: %v", i, err)
		}
	}
	must(t, m.Commit(), m.Close())
	if !bytes.Equal(before, s.data) {
		t.Error("file has changed")
	}
	if x, ok := m.Lookup(0, 512); ok && x.InPlace {
		t.Error("data may be overwritten")
	}
}
