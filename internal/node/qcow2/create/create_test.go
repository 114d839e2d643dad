// SPDX-License-Identifier: Apache-2.0

// Goal: every image is laid out so that each of its clusters counts one and nothing is named that is not there. Method:
// the tables of images of every geometry are read back and counted here, independently of the checker; every call of the
// store fails once.
package create

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/blocktest/memstore"
	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

const (
	kib = int64(1) << 10
	mib = kib << 10
	gib = mib << 10
	tib = gib << 10
)

// count reads the image's tables and gives the clusters it uses, by what uses them.
func count(t *testing.T, s *memstore.Store) (h *qcow2.Header, users map[int64]string) {
	t.Helper()
	h, err := qcow2.ReadHeader(s.Read)
	if err != nil {
		t.Fatal(err)
	}
	g := h.Geometry()
	users = make(map[int64]string)
	use := func(off, n int64, what string) {
		for c := off >> g.ClusterBits; c < g.Clusters(off+n); c++ {
			if users[c] != "" {
				t.Fatalf("cluster %d is used by %s and by %s", c, users[c], what)
			}
			users[c] = what
		}
	}
	entries := func(off, n int64) []uint64 {
		b := make([]byte, n*8)
		if err := s.Read(b, off); err != nil {
			t.Fatal(err)
		}
		all := make([]uint64, n)
		plain := qcow2.NewGeometry(3, h.ClusterBits, 4, false, false)
		for i := range all {
			all[i] = plain.Entry(b, i).Word
		}
		return all
	}
	use(0, 1, "header")
	use(h.L1Offset, int64(h.L1Entries)*8, "L1")
	tableBytes := int64(h.RefcountTableClusters) << g.ClusterBits
	use(h.RefcountTableOffset, tableBytes, "refcount table")
	for _, e := range entries(h.RefcountTableOffset, tableBytes/8) {
		if e != 0 {
			use(int64(e), 1, "refcount block")
		}
	}
	table := make([]byte, g.ClusterSize)
	for _, e := range entries(h.L1Offset, int64(h.L1Entries)) {
		l1 := qcow2.L1Entry(e)
		if l1.Offset() == 0 {
			continue
		}
		if !l1.Copied() {
			t.Fatal("L1 entry is not marked as the only one")
		}
		use(l1.Offset(), 1, "L2")
		if err := s.Read(table, l1.Offset()); err != nil {
			t.Fatal(err)
		}
		for i := range g.L2Entries() {
			if e := g.Entry(table, i); g.HasHost(e) && !h.HasDataFile() {
				use(e.Offset(), 1, "data")
			}
		}
	}
	return h, users
}

// refcounts reads every refcount of the image's file and one block beyond.
func refcounts(t *testing.T, s *memstore.Store, h *qcow2.Header, each func(cluster int64, n uint64)) {
	g := h.Geometry()
	table, block := make([]byte, int64(h.RefcountTableClusters)<<g.ClusterBits), make([]byte, g.ClusterSize)
	if err := s.Read(table, h.RefcountTableOffset); err != nil {
		t.Fatal(err)
	}
	plain := qcow2.NewGeometry(3, h.ClusterBits, 4, false, false)
	for i := range len(table) / 8 {
		off := int64(plain.Entry(table, i).Word)
		if off == 0 {
			continue
		}
		if err := s.Read(block, off); err != nil {
			t.Fatal(err)
		}
		for j := range int(g.RefcountBlockEntries()) {
			each(int64(i)<<g.RefcountBlockBits+int64(j), qcow2.Refcount(block, h.RefcountOrder, j))
		}
	}
}

func TestEveryClusterOfANewImageCountsOne(t *testing.T) {
	// below, on and above the edge of what one cluster of refcount table counts, for the smallest clusters
	edge := int64(64*256) * 512
	type c struct {
		name string
		o    Options
	}
	cases := []c{{"nothing", Options{}}}
	for _, size := range []int64{1, 512, mib, 16 * gib, 8 * tib} {
		cases = append(cases, c{fmt.Sprint("overlay of ", size), Options{Size: size, BackingFile: "base.qcow2", BackingFormat: "qcow2"}})
	}
	for d := int64(-6); d <= 6; d++ {
		cases = append(cases, c{fmt.Sprintf("512 bytes, edge %+d", d), Options{Size: edge*15/16 + d*512*16, ClusterSize: 512, Preallocation: Metadata}})
	}
	for _, bits := range []int{1, 8, 16, 64} {
		cases = append(cases, c{fmt.Sprint("width ", bits), Options{Size: 40 * mib, ClusterSize: 4096, RefcountBits: bits, Preallocation: Metadata}})
	}
	cases = append(cases,
		c{"full", Options{Size: 3*mib + 512, Preallocation: Full}},
		c{"falloc", Options{Size: 3*mib + 512, Preallocation: Falloc}},
		c{"version 2", Options{Size: 10 * mib, Version: 2, Preallocation: Metadata}},
		c{"extended", Options{Size: 10 * mib, ExtendedL2: true, Preallocation: Metadata}},
		c{"data file", Options{Size: 10*mib + 512, DataFile: "d", Preallocation: Metadata}},
		c{"raw data file", Options{Size: 10*mib + 512, DataFile: "d", DataFileRaw: true, ExtendedL2: true}},
		c{"huge clusters", Options{Size: tib, ClusterSize: 2 * mib, Preallocation: Metadata}},
	)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := new(memstore.Store)
			_ = s.Write([]byte("what was there before"), 12345678)
			want, err := Create(s, &c.o)
			if err != nil {
				t.Fatal(err)
			}
			h, users := count(t, s)
			if h.Size != want.Size || h.Size != (c.o.Size+511)/512*512 || h.BackingFile != c.o.BackingFile {
				t.Errorf("header is %+v", h)
			}
			g := h.Geometry()
			refcounts(t, s, h, func(cluster int64, n uint64) {
				if (n == 1) != (users[cluster] != "") || n > 1 {
					t.Fatalf("cluster %d, used by %q, counts %d", cluster, users[cluster], n)
				}
				delete(users, cluster)
			})
			if len(users) != 0 {
				t.Errorf("%d clusters are beyond every refcount block", len(users))
			}
			sizes, err := g.Measure(h.Size, 0)
			if err != nil {
				t.Fatal(err)
			}
			length, _ := s.Size()
			if c.o.Preallocation != Off && !h.HasDataFile() && length != sizes.FullyAllocated {
				t.Errorf("file has %d bytes, measured as %d", length, sizes.FullyAllocated)
			}
			if length > sizes.FullyAllocated+g.ClusterSize {
				t.Errorf("file has %d bytes, at most %d were expected", length, sizes.FullyAllocated)
			}
		})
	}
}

func TestOptionsThatMakeNoImage(t *testing.T) {
	for name, o := range map[string]Options{
		"version 1":               {Version: 1},
		"small cluster":           {ClusterSize: 256},
		"large cluster":           {ClusterSize: 4 * mib},
		"odd cluster":             {ClusterSize: 65535},
		"width 3":                 {RefcountBits: 3},
		"width 128":               {RefcountBits: 128},
		"lazy in version 2":       {Version: 2, LazyRefcounts: true},
		"width in version 2":      {Version: 2, RefcountBits: 8},
		"extended in version 2":   {Version: 2, ExtendedL2: true},
		"zstd in version 2":       {Version: 2, CompressionType: qcow2.CompressionZstd},
		"data file in version 2":  {Version: 2, DataFile: "x"},
		"extended, small cluster": {ExtendedL2: true, ClusterSize: 8192},
		"compression 2":           {CompressionType: 2},
		"format without backing":  {BackingFormat: "raw"},
		"raw without data file":   {DataFileRaw: true},
		"raw with backing":        {DataFileRaw: true, DataFile: "x", BackingFile: "y"},
		"full with backing":       {Preallocation: Full, BackingFile: "y"},
		"long backing name":       {BackingFile: string(make([]byte, 1024))},
		"name beside the header":  {ClusterSize: 512, BackingFile: string(make([]byte, 500))},
	} {
		s := new(memstore.Store)
		if _, err := Create(s, &o); !errors.Is(err, syscall.EINVAL) || s.Writes != 0 {
			t.Errorf("%s: %v, %d writes", name, err, s.Writes)
		}
	}
	for name, o := range map[string]Options{
		"negative":              {Size: -1},
		"beyond the L1 table":   {Size: 129 * gib, ClusterSize: 512},
		"beyond every L1 table": {Size: 1 << 61 * 2, ClusterSize: 2 * mib},
		"refcount table":        {Size: 64 * gib, ClusterSize: 512, RefcountBits: 64, Preallocation: Metadata},
	} {
		if _, err := Create(new(memstore.Store), &o); !errors.Is(err, syscall.EFBIG) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A data file is emptied and made as long as the disk; without one at hand it is left alone.
func TestDataFile(t *testing.T) {
	data := new(memstore.Store)
	_ = data.Write([]byte("old"), 0)
	h, err := Create(new(memstore.Store), &Options{Size: mib, DataFile: "d.raw", Data: data, Preallocation: Full})
	if err != nil {
		t.Fatal(err)
	}
	n, _ := data.Size()
	b := make([]byte, 3)
	_ = data.Read(b, 0)
	if n != mib || b[0] != 0 || h.DataFile() != "d.raw" || !h.HasDataFile() {
		t.Errorf("data file has %d bytes, %q", n, b)
	}
}

// Whatever call fails, the error arrives, and what is there is no image.
func TestCreateThatFailsLeavesNoImage(t *testing.T) {
	for _, forever := range []bool{false, true} {
		for n := 1; ; n++ {
			s := &memstore.Store{FailAt: n, Forever: forever}
			_, err := Create(s, &Options{Size: 64 * mib, ClusterSize: 4096, Preallocation: Full})
			if s.Calls < n {
				if err != nil {
					t.Fatal(err)
				}
				if n < 10 {
					t.Fatalf("only %d calls", n)
				}
				break
			}
			if !errors.Is(err, memstore.ErrInjected) {
				t.Fatalf("call %d fails: %v", n, err)
			}
			last := s.Flushes == 2 // the header was written, its flush failed
			s.FailAt = 0
			if _, err := qcow2.ReadHeader(s.Read); err == nil && !last {
				t.Fatalf("call %d fails, and there is an image", n)
			}
		}
	}
}
