// SPDX-License-Identifier: Apache-2.0

package check

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/blocktest/memstore"
	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

const mib = int64(1) << 20

// image makes a sound one with every guest cluster mapped.
func image(t testing.TB, o create.Options) (*memstore.Store, *qcow2.Header) {
	t.Helper()
	if o.Size == 0 {
		o.Size, o.Preallocation = 4*mib, create.Metadata
	}
	s := new(memstore.Store)
	h, err := create.Create(s, &o)
	if err != nil {
		t.Fatal(err)
	}
	return s, h
}

func word(t testing.TB, s *memstore.Store, at int64) uint64 {
	t.Helper()
	var b [8]byte
	if err := s.Read(b[:], at); err != nil {
		t.Fatal(err)
	}
	return binary.BigEndian.Uint64(b[:])
}

func setWord(t testing.TB, s *memstore.Store, at int64, v uint64) {
	t.Helper()
	if err := s.Write(binary.BigEndian.AppendUint64(nil, v), at); err != nil {
		t.Fatal(err)
	}
}

func mustRun(t testing.TB, s *memstore.Store, repair Repair) (*Result, string) {
	t.Helper()
	o := &Options{Repair: repair}
	said := lines(o)
	r, err := Run(s, o)
	if err != nil {
		t.Fatalf("check: %v\n%s", err, strings.Join(*said, "\n"))
	}
	return r, strings.Join(*said, "\n")
}

func TestSoundImagesAreClean(t *testing.T) {
	for _, bits := range []int64{512, 4096, 65536, 2 * mib} {
		for _, width := range []int{1, 2, 4, 8, 16, 32, 64} {
			s, h := image(t, create.Options{ClusterSize: bits, RefcountBits: width})
			writes := s.Writes
			r, said := mustRun(t, s, Nothing)
			if !r.Clean() || said != "" || s.Writes != writes {
				t.Errorf("clusters of %d, width %d: %+v\n%s", bits, width, r, said)
			}
			g := h.Geometry()
			size, _ := s.Size()
			if r.AllocatedClusters != r.TotalClusters || r.TotalClusters != g.Clusters(h.Size) || r.FragmentedClusters != 0 || r.ImageEndOffset != size {
				t.Errorf("clusters of %d, width %d: %+v", bits, width, r)
			}
		}
	}
}

func TestFaultsAreCountedAndRepaired(t *testing.T) {
	// places in an image with clusters of 4 KiB and everything mapped
	const cluster = 4096
	type places struct {
		s       *memstore.Store
		h       *qcow2.Header
		l2, blk int64
	}
	for name, c := range map[string]struct {
		damage func(t *testing.T, p places)
		want   Result // the counts of faults
		left   Result // after a repair of everything
	}{
		"leak":           {func(t *testing.T, p places) { leak(t, p.s, p.blk) }, Result{Leaks: 1}, Result{}},
		"count too low":  {func(t *testing.T, p places) { setRefcount(t, p.s, p.blk, 0, 0) }, Result{Corruptions: 1}, Result{}},
		"count too high": {func(t *testing.T, p places) { setRefcount(t, p.s, p.blk, 0, 9) }, Result{Leaks: 1}, Result{}},
		"flag missing": {func(t *testing.T, p places) { setWord(t, p.s, p.l2, word(t, p.s, p.l2)&^(1<<63)) },
			Result{Corruptions: 1}, Result{}},
		"flag of the table missing": {func(t *testing.T, p places) { setWord(t, p.s, p.h.L1Offset, uint64(p.l2)) },
			Result{Corruptions: 1}, Result{}},
		"cluster used twice": {func(t *testing.T, p places) { setWord(t, p.s, p.l2+8, word(t, p.s, p.l2)) },
			Result{Corruptions: 1, Leaks: 1}, Result{}},
		"entry lost": {func(t *testing.T, p places) { setWord(t, p.s, p.l2, 0) }, Result{Leaks: 1}, Result{}},
		"misaligned without data": {func(t *testing.T, p places) { setWord(t, p.s, p.l2, word(t, p.s, p.l2)+512|1) },
			Result{Corruptions: 2}, Result{}}, // the entry, and the second cluster that it lies in
		"beyond the file": {func(t *testing.T, p places) { setWord(t, p.s, p.l2, 1<<63|1<<40) },
			Result{Corruptions: 2, Leaks: 1}, Result{Corruptions: 1}},
		"block lost": {func(t *testing.T, p places) { setWord(t, p.s, p.h.RefcountTableOffset, 0) }, Result{Corruptions: -1}, Result{}},
		"block in the L1 table": {func(t *testing.T, p places) { setWord(t, p.s, p.h.RefcountTableOffset, uint64(p.h.L1Offset)) },
			Result{Corruptions: -1, Leaks: -1}, Result{}},
		"block misaligned": {func(t *testing.T, p places) { setWord(t, p.s, p.h.RefcountTableOffset, uint64(p.blk)+512) },
			Result{Corruptions: 1, CheckErrors: -1}, Result{}},
		"block beyond the file": {func(t *testing.T, p places) { setWord(t, p.s, p.h.RefcountTableOffset, 1<<40) },
			Result{Corruptions: -1}, Result{}},
		"no refcount table": {func(t *testing.T, p places) { _ = p.s.Write(make([]byte, 4), 56) }, Result{Corruptions: -1}, Result{}},
	} {
		t.Run(name, func(t *testing.T) {
			s, h := image(t, create.Options{ClusterSize: cluster})
			p := places{s: s, h: h, l2: int64(word(t, s, h.L1Offset) &^ (1 << 63)), blk: int64(word(t, s, h.RefcountTableOffset))}
			_ = s.Write([]byte("data"), int64(word(t, s, p.l2+80)&^(1<<63)))
			c.damage(t, p)
			found, said := mustRun(t, s.Clone(), Nothing)
			for _, x := range []struct {
				what      string
				got, want int64
			}{{"corruptions", found.Corruptions, c.want.Corruptions}, {"leaks", found.Leaks, c.want.Leaks}, {"errors", found.CheckErrors, c.want.CheckErrors}} {
				if x.got != x.want && (x.want != -1 || x.got == 0) {
					t.Errorf("%d %s, want %d\n%s", x.got, x.what, x.want, said)
				}
			}
			fixed, said := mustRun(t, s, Everything)
			left, _ := mustRun(t, s, Nothing)
			if left.Corruptions != c.left.Corruptions || left.Leaks != 0 || left.CheckErrors != 0 {
				t.Errorf("after the repair: %+v\n%s", left, said)
			}
			if fixed.Corruptions != left.Corruptions || fixed.Leaks != left.Leaks || fixed.CorruptionsFixed+fixed.LeaksFixed == 0 {
				t.Errorf("repair says %+v, check after it %+v", fixed, left)
			}
			if b := make([]byte, 4); s.Read(b, int64(word(t, s, p.l2+80)&^(1<<63))) != nil || string(b) != "data" {
				t.Errorf("guest data are %q", b)
			}
		})
	}
}

func setRefcount(t testing.TB, s *memstore.Store, block, cluster int64, n uint64) {
	t.Helper()
	b := make([]byte, 4096)
	_ = s.Read(b, block)
	qcow2.SetRefcount(b, 4, int(cluster), n)
	_ = s.Write(b, block)
}

// leak counts a cluster at the end of the file that nobody uses.
func leak(t testing.TB, s *memstore.Store, block int64) {
	t.Helper()
	size, _ := s.Size()
	_ = s.Truncate(size + 4096)
	setRefcount(t, s, block, size/4096, 1)
}

// Repairing leaks alone leaves corruptions as they are.
func TestLeaksAreRepairedAlone(t *testing.T) {
	s, h := image(t, create.Options{ClusterSize: 4096})
	blk := int64(word(t, s, h.RefcountTableOffset))
	leak(t, s, blk)
	setRefcount(t, s, blk, 0, 0)
	r, _ := mustRun(t, s, Leaks)
	if r.LeaksFixed != 1 || r.Leaks != 0 || r.Corruptions != 1 || r.CorruptionsFixed != 0 {
		t.Errorf("repair says %+v", r)
	}
	if r, _ = mustRun(t, s, Nothing); r.Leaks != 0 || r.Corruptions != 1 {
		t.Errorf("check after it %+v", r)
	}
}

// An image that was not closed has counts that nobody wrote; one call makes it fit for use.
func TestRebuildRefcountsOfADirtyImage(t *testing.T) {
	s, h := image(t, create.Options{ClusterSize: 4096, LazyRefcounts: true})
	for i := range h.RefcountTableClusters {
		_ = s.Zero(h.RefcountTableOffset+int64(i)*4096, 4096)
	}
	setWord(t, s, qcow2.OffsetIncompatible, qcow2.Dirty|qcow2.Corrupt)
	if _, err := RebuildRefcounts(s); err != nil {
		t.Fatal(err)
	}
	again, err := qcow2.ReadHeader(s.Read)
	if err != nil || again.IsDirty() || again.IsCorrupt() || !again.IsLazy() {
		t.Errorf("header %+v, %v", again, err)
	}
	if r, said := mustRun(t, s, Nothing); !r.Clean() {
		t.Errorf("%+v\n%s", r, said)
	}
	// what cannot be repaired is an error, and the bits stay
	l2 := int64(word(t, s, h.L1Offset) &^ (1 << 63))
	setWord(t, s, l2, 1<<63|1<<40)
	setWord(t, s, qcow2.OffsetIncompatible, qcow2.Dirty)
	var corrupt *qcow2.CorruptError
	if _, err := RebuildRefcounts(s); !errors.As(err, &corrupt) || word(t, s, qcow2.OffsetIncompatible) != qcow2.Dirty {
		t.Errorf("%v, bits %#x", err, word(t, s, qcow2.OffsetIncompatible))
	}
}

// broken is an image with faults of all kinds that can be repaired.
func broken(t testing.TB, rebuild bool) *memstore.Store {
	s, h := image(t, create.Options{ClusterSize: 4096})
	blk := int64(word(t, s, h.RefcountTableOffset))
	l2 := int64(word(t, s, h.L1Offset) &^ (1 << 63))
	leak(t, s, blk)
	setRefcount(t, s, blk, 5, 0)
	setWord(t, s, l2, word(t, s, l2)&^(1<<63))
	setWord(t, s, l2+16, word(t, s, l2+16)+512|1)
	setWord(t, s, l2+32, word(t, s, l2+40))
	setWord(t, s, qcow2.OffsetIncompatible, qcow2.Dirty)
	if rebuild {
		setWord(t, s, h.RefcountTableOffset, 0)
	}
	return s
}

// Whatever call of a repair fails, the error arrives or is counted, and the repair can be done again.
func TestRepairThatFailsCanBeDoneAgain(t *testing.T) {
	for _, rebuild := range []bool{false, true} {
		for _, forever := range []bool{false, true} {
			for n := 1; ; n++ {
				s := broken(t, rebuild)
				s.Calls, s.FailAt, s.Forever = 0, n, forever
				r, err := Run(s, &Options{Repair: Everything})
				through := s.Calls < n
				if through && (err != nil || !r.Clean()) {
					t.Fatalf("without a failure: %+v, %v", r, err)
				}
				s.FailAt = 0
				if !through && err == nil && r.Clean() { // so it was a call that is not needed: the file does not grow
					if again, said := mustRun(t, s, Nothing); !again.Clean() {
						t.Fatalf("call %d fails and nobody knows: %+v\n%s", n, again, said)
					}
				}
				if r, err := Run(s, &Options{Repair: Everything}); err != nil || !r.Clean() {
					t.Fatalf("rebuild %v, call %d failed; again: %+v, %v", rebuild, n, r, err)
				}
				if r, said := mustRun(t, s, Nothing); !r.Clean() {
					t.Fatalf("rebuild %v, call %d failed; after a repair: %+v\n%s", rebuild, n, r, said)
				}
				if through {
					break
				}
			}
		}
	}
}

// On a device that cannot grow, new refcounts find a place among the clusters that nobody uses.
func TestRebuildWhereTheFileCannotGrow(t *testing.T) {
	s := broken(t, true)
	size, _ := s.Size()
	_ = s.Truncate(size + 1*mib)
	s.Limit = size + 1*mib
	if r, said := mustRun(t, s, Everything); !r.Clean() || r.ImageEndOffset > s.Limit {
		t.Errorf("%+v\n%s", r, said)
	}
	if r, said := mustRun(t, s, Nothing); !r.Clean() {
		t.Errorf("%+v\n%s", r, said)
	}
	s = broken(t, true)
	s.Limit, _ = s.Size()
	if _, err := Run(s, &Options{Repair: Everything}); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("without room: %v", err)
	}
}

// Who writes clears the autoclear bits that it does not know; who looks on does not.
func TestUnknownAutoclearBits(t *testing.T) {
	s, _ := image(t, create.Options{})
	setWord(t, s, qcow2.OffsetAutoclear, 1<<40)
	mustRun(t, s, Nothing)
	if w := word(t, s, qcow2.OffsetAutoclear); w != 1<<40 {
		t.Errorf("bits are %#x after a look", w)
	}
	mustRun(t, s, Leaks)
	if w := word(t, s, qcow2.OffsetAutoclear); w != 0 {
		t.Errorf("bits are %#x after a repair", w)
	}
}

// A refcount table that is larger than need be is no fault.
func TestLargeRefcountTable(t *testing.T) {
	s, h := image(t, create.Options{ClusterSize: 4096})
	size, _ := s.Size()
	b := make([]byte, 4*4096)
	_ = s.Read(b[:4096], h.RefcountTableOffset)
	_ = s.Write(b, size)
	h.RefcountTableOffset, h.RefcountTableClusters = size, 4
	field := h.RefcountTableField()
	_ = s.Write(field[:], qcow2.OffsetRefcountTable)
	if _, err := RebuildRefcounts(s); err != nil {
		t.Fatal(err)
	}
	r, said := mustRun(t, s, Nothing)
	if h, err := qcow2.ReadHeader(s.Read); err != nil || h.RefcountTableClusters != 4 || !r.Clean() {
		t.Errorf("%+v, %v\n%s", h, err, said)
	}
}

// An image whose header names no refcount table, with a place for one or without, gets a new one.
func TestNoRefcountTable(t *testing.T) {
	for _, at := range []int64{0, 4096} {
		s, h := image(t, create.Options{ClusterSize: 4096})
		h.RefcountTableOffset, h.RefcountTableClusters = at, 0
		field := h.RefcountTableField()
		_ = s.Write(field[:], qcow2.OffsetRefcountTable)
		if r, said := mustRun(t, s, Everything); r.CorruptionsFixed == 0 || r.Corruptions != 0 {
			t.Errorf("table at %#x: %+v\n%s", at, r, said)
		}
		if r, said := mustRun(t, s, Nothing); !r.Clean() {
			t.Errorf("table at %#x, after the repair: %+v\n%s", at, r, said)
		}
	}
}

// A failed read of one table is counted, and nothing is repaired by what could not be seen.
func TestTableThatCannotBeRead(t *testing.T) {
	s, h := image(t, create.Options{ClusterSize: 512})
	for n := 3; n < 200; n++ {
		c := s.Clone()
		c.FailAt = n
		r, err := Run(c, &Options{})
		if err == nil && r.CheckErrors == 0 {
			if n < 150 {
				t.Fatalf("read %d failed and nobody knows: %+v", n, r)
			}
			break
		}
	}
	// leaks are not repaired when a table could not be read: its clusters are no leaks
	for n := 3; n < 60; n++ {
		c := s.Clone()
		c.FailAt = n
		_, _ = Run(c, &Options{Repair: Everything})
		c.FailAt = 0
		if r, said := mustRun(t, c, Nothing); r.Corruptions != 0 {
			t.Fatalf("read %d of a sound image failed, and the repair broke it: %+v\n%s", n, r, said)
		}
	}
	_ = h
}

func TestProgress(t *testing.T) {
	s, _ := image(t, create.Options{ClusterSize: 512})
	last, end := int64(0), int64(0)
	_, err := Run(s, &Options{Progress: func(done, total int64) {
		if done < last || done > total {
			t.Errorf("%d of %d after %d", done, total, last)
		}
		last, end = done, total
	}})
	if err != nil || last != end || end == 0 {
		t.Errorf("%d of %d, %v", last, end, err)
	}
}

// An image whose snapshots all name one huge table costs what its file is worth.
func TestSnapshotsThatNameTheSameTable(t *testing.T) {
	s, h := image(t, create.Options{ClusterSize: 512})
	size, _ := s.Size()
	var all []qcow2.Snapshot
	for i := range 5000 {
		all = append(all, qcow2.Snapshot{L1Offset: h.L1Offset, L1Entries: h.L1Entries + uint32(i), ID: fmt.Sprint(i), DiskSize: h.Size, ICount: qcow2.NoICount, ExtraSize: 16})
	}
	b, err := qcow2.EncodeSnapshots(all)
	if err != nil {
		t.Fatal(err)
	}
	_ = s.Write(b, size)
	h.Snapshots, h.SnapshotsOffset = uint32(len(all)), size
	field := h.SnapshotsField()
	_ = s.Write(field[:], qcow2.OffsetSnapshots)
	s.Calls = 0
	r, _ := mustRun(t, s, Nothing)
	if r.Clean() || s.Calls > 50000 {
		t.Errorf("%d calls, %+v", s.Calls, r)
	}
}

// Snapshots of version 3 say how large their disk is: a repair writes the table anew.
func TestIncompleteSnapshotEntry(t *testing.T) {
	s, h := image(t, create.Options{ClusterSize: 4096})
	size, _ := s.Size()
	// an entry without extra data, and its L1 table: a copy of the active one, whose clusters count two from now on
	b := make([]byte, 48)
	binary.BigEndian.PutUint64(b, uint64(size))
	binary.BigEndian.PutUint32(b[8:], h.L1Entries)
	binary.BigEndian.PutUint16(b[12:], 1)
	b[40] = '1'
	l1 := make([]byte, 4096)
	_ = s.Read(l1, h.L1Offset)
	_ = s.Write(l1, size)
	_ = s.Write(b, size+4096)
	_ = s.Truncate(size + 8192)
	h.Snapshots, h.SnapshotsOffset = 1, size+4096
	field := h.SnapshotsField()
	_ = s.Write(field[:], qcow2.OffsetSnapshots)
	if r, err := RebuildRefcounts(s); err != nil {
		t.Fatalf("%+v, %v", r, err)
	}
	r, said := mustRun(t, s, Nothing)
	if !r.Clean() {
		t.Errorf("%+v\n%s", r, said)
	}
	h, _ = qcow2.ReadHeader(s.Read)
	all, _, err := qcow2.ReadSnapshots(s.Read, h)
	if err != nil || len(all) != 1 || all[0].ExtraSize != 16 || all[0].DiskSize != h.Size || all[0].ID != "1" {
		t.Errorf("%+v, %v", all, err)
	}
}

// A snapshot table beyond the limits is cut by a repair, and a look at it is an error.
func TestSnapshotTableBeyondTheLimits(t *testing.T) {
	for name, change := range map[string]func(b []byte) uint32{
		"extra data": func(b []byte) uint32 { binary.BigEndian.PutUint32(b[36:], 2000); copy(b[2040:], "1name"); return 1 },
		"number":     func(b []byte) uint32 { return qcow2.MaxSnapshots + 7 },
	} {
		t.Run(name, func(t *testing.T) {
			s, h := image(t, create.Options{ClusterSize: 4096})
			size, _ := s.Size()
			b := make([]byte, 64*(qcow2.MaxSnapshots+10))
			for i := range qcow2.MaxSnapshots + 10 {
				e := b[i*64:]
				binary.BigEndian.PutUint16(e[12:], 1)
				binary.BigEndian.PutUint16(e[14:], 4)
				binary.BigEndian.PutUint32(e[36:], 16)
				copy(e[56:], "1name")
			}
			h.Snapshots, h.SnapshotsOffset = change(b), size
			_ = s.Write(b, size)
			_ = s.Truncate(size + int64(len(b)+4095)&^4095)
			field := h.SnapshotsField()
			_ = s.Write(field[:], qcow2.OffsetSnapshots)
			if _, err := Run(s.Clone(), &Options{}); err == nil {
				t.Error("a look finds nothing")
			}
			r, said := mustRun(t, s, Everything)
			if !r.Clean() || r.CorruptionsFixed == 0 {
				t.Errorf("%+v\n%.2000s", r, said)
			}
			if r, said := mustRun(t, s, Nothing); !r.Clean() {
				t.Errorf("after the repair: %+v\n%.2000s", r, said)
			}
			h, err := qcow2.ReadHeader(s.Read)
			if err != nil {
				t.Fatal(err)
			}
			all, _, err := qcow2.ReadSnapshots(s.Read, h)
			if err != nil || len(all) == 0 || all[0].ID != "1" || all[0].Name != "name" {
				t.Errorf("%d snapshots, %v", len(all), err)
			}
		})
	}
}

// Whatever is in the file, a check ends, and a repair that says that all is well is right.
func FuzzRun(f *testing.F) {
	for seed := range 20 {
		s, _ := image(f, create.Options{Size: 64 << 10, ClusterSize: 512, Preallocation: create.Metadata, RefcountBits: 1 << (seed % 7)})
		if seed > 0 {
			breakImage(f, s, rand.New(rand.NewPCG(uint64(seed), 0)))
		}
		n, _ := s.Size()
		b := make([]byte, min(n, 16<<10))
		_ = s.Read(b, 0)
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 1<<16 {
			return
		}
		s := new(memstore.Store)
		_ = s.Write(b, 0)
		r, err := Run(s, &Options{Repair: Everything})
		if err != nil || !r.Clean() {
			return
		}
		if r, said := mustRun(t, s, Nothing); !r.Clean() {
			t.Fatalf("after a repair: %+v\n%s", r, said)
		}
	})
}
