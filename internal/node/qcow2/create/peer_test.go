// SPDX-License-Identifier: Apache-2.0

package create

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-blk/sluice/internal/blocktest/memstore"
	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

func qemuImg(t *testing.T, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Skip("qemu-img is not installed")
	}
	out, err := exec.Command("qemu-img", args...).CombinedOutput()
	if err != nil {
		t.Fatalf("qemu-img %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// peers are option sets in both languages.
var peers = []struct {
	flags string
	o     Options
}{
	{"size=1G", Options{Size: gib}},
	{"size=1", Options{Size: 1}},
	{"size=1G,compat=0.10", Options{Size: gib, Version: 2}},
	{"size=1G,cluster_size=512", Options{Size: gib, ClusterSize: 512}},
	{"size=1G,cluster_size=2048", Options{Size: gib, ClusterSize: 2048}},
	{"size=1T,cluster_size=2M", Options{Size: tib, ClusterSize: 2 * mib}},
	{"size=64M,cluster_size=512,preallocation=metadata", Options{Size: 64 * mib, ClusterSize: 512, Preallocation: Metadata}},
	{"size=64M,refcount_bits=1,preallocation=metadata", Options{Size: 64 * mib, RefcountBits: 1, Preallocation: Metadata}},
	{"size=64M,refcount_bits=64,cluster_size=4k,preallocation=metadata", Options{Size: 64 * mib, ClusterSize: 4096, RefcountBits: 64, Preallocation: Metadata}},
	{"size=64M,lazy_refcounts=on", Options{Size: 64 * mib, LazyRefcounts: true}},
	{"size=64M,extended_l2=on", Options{Size: 64 * mib, ExtendedL2: true}},
	{"size=64M,extended_l2=on,preallocation=metadata", Options{Size: 64 * mib, ExtendedL2: true, Preallocation: Metadata}},
	{"size=64M,compression_type=zstd", Options{Size: 64 * mib, CompressionType: qcow2.CompressionZstd}},
	{"size=8M,preallocation=falloc", Options{Size: 8 * mib, Preallocation: Falloc}},
	{"size=8M,preallocation=full", Options{Size: 8 * mib, Preallocation: Full}},
	{"size=8M,backing_file=base.raw,backing_fmt=raw", Options{Size: 8 * mib, BackingFile: "base.raw", BackingFormat: "raw"}},
	{"size=8M,data_file=d.raw", Options{Size: 8 * mib, DataFile: "d.raw"}},
	{"size=8M,data_file=d.raw,data_file_raw=on", Options{Size: 8 * mib, DataFile: "d.raw", DataFileRaw: true}},
	{"size=8M,data_file=d.raw,preallocation=metadata", Options{Size: 8 * mib, DataFile: "d.raw", Preallocation: Metadata}},
}

// The other program finds no fault with our images, and sees the same in them as in its own.
func TestPeerAgreesWithOurImages(t *testing.T) {
	for i, c := range peers {
		t.Run(fmt.Sprint(i), func(t *testing.T) { // the flags would be in the names of files
			t.Log(c.flags)
			dir := t.TempDir()
			base := new(memstore.Store)
			_ = base.Truncate(c.o.Size)
			base.Save(t, filepath.Join(dir, "base.raw"))
			ours, theirs := filepath.Join(dir, "ours.qcow2"), filepath.Join(dir, "theirs.qcow2")
			qemuImg(t, "create", "-q", "-f", "qcow2", "-o", strings.ReplaceAll(strings.ReplaceAll(c.flags, "d.raw", filepath.Join(dir, "d.raw")), "base.raw", filepath.Join(dir, "base.raw")), theirs)

			s := new(memstore.Store)
			if c.o.DataFile != "" {
				c.o.DataFile = filepath.Join(dir, "d.raw")
			}
			if c.o.BackingFile != "" {
				c.o.BackingFile = filepath.Join(dir, "base.raw")
			}
			h, err := Create(s, &c.o)
			if err != nil {
				t.Fatal(err)
			}
			s.Save(t, ours)
			qemuImg(t, "check", ours)
			// L1, L2, and where they are differ; what a user sees does not
			if d := cmp.Diff(info(t, theirs), info(t, ours)); d != "" {
				t.Errorf("info (-theirs +ours):\n%s", d)
			}
			if d := cmp.Diff(peerMap(t, theirs), peerMap(t, ours)); d != "" {
				t.Errorf("map (-theirs +ours):\n%s", d)
			}
			other, err := qcow2.ReadHeader(memstore.Load(t, theirs).Read)
			if err != nil {
				t.Fatal(err)
			}
			for _, x := range []*qcow2.Header{h, other} {
				x.L1Offset, x.L1Entries, x.RefcountTableOffset, x.RefcountTableClusters = 0, 0, 0, 0
			}
			if d := cmp.Diff(other, h); d != "" {
				t.Errorf("header (-theirs +ours):\n%s", d)
			}
		})
	}
}

func info(t *testing.T, path string) map[string]any {
	var v map[string]any
	if err := json.Unmarshal([]byte(qemuImg(t, "info", "--output=json", path)), &v); err != nil {
		t.Fatal(err)
	}
	delete(v, "filename")
	delete(v, "actual-size")
	return v
}

// peerMap is which parts of the disk are there. Whether they read as zeros depends on holes in the file.
func peerMap(t *testing.T, path string) (runs []string) {
	var v []struct {
		Start, Length, Depth int64
		Present              bool
	}
	if err := json.Unmarshal([]byte(qemuImg(t, "map", "--output=json", path)), &v); err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(v); {
		first := v[i]
		for i++; i < len(v) && v[i].Present == first.Present && v[i].Depth == first.Depth; i++ {
			first.Length += v[i].Length
		}
		runs = append(runs, fmt.Sprintf("%+v", first))
	}
	return runs
}

// Measured sizes are those that the other program gives.
func TestPeerMeasuresTheSame(t *testing.T) {
	for _, size := range []int64{0, 512, gib + 512, 100 * gib} {
		for _, cluster := range []int64{512, 65536, 2 * mib} {
			for _, width := range []uint32{0, 6} {
				for _, extended := range []bool{false, true} {
					if extended && cluster < 16384 {
						continue
					}
					flags := fmt.Sprintf("cluster_size=%d,refcount_bits=%d,extended_l2=%v", cluster, 1<<width, map[bool]string{true: "on", false: "off"}[extended])
					var want struct {
						Required int64 `json:"required"`
						Full     int64 `json:"fully-allocated"`
					}
					if size > gib && cluster == 512 && width == 6 {
						continue // the peer does not look at the limit of the refcount table
					}
					if err := json.Unmarshal([]byte(qemuImg(t, "measure", "-O", "qcow2", "--output=json", "-o", flags, "--size", fmt.Sprint(size))), &want); err != nil {
						t.Fatal(err)
					}
					h, err := (&Options{ClusterSize: cluster, RefcountBits: 1 << width, ExtendedL2: extended}).Header()
					if err != nil {
						t.Fatal(err)
					}
					g := h.Geometry()
					got, err := g.Measure(size, 0)
					if err != nil || got.Required != want.Required || got.FullyAllocated != want.Full {
						t.Errorf("%s, %d bytes: %+v, want %+v (%v)", flags, size, got, want, err)
					}
				}
			}
		}
	}
}

// The bitmaps that an image carries are measured as the other program measures them.
func TestPeerMeasuresBitmaps(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.qcow2")
	qemuImg(t, "create", "-q", "-f", "qcow2", path, "3G")
	for i, granularity := range []int64{512, 65536, 1 << 20} {
		qemuImg(t, "bitmap", "--add", "-g", fmt.Sprint(granularity), path, fmt.Sprint("bitmap ", i))
	}
	var want struct{ Bitmaps int64 }
	if err := json.Unmarshal([]byte(qemuImg(t, "measure", "-O", "qcow2", "--output=json", path)), &want); err != nil {
		t.Fatal(err)
	}
	s := memstore.Load(t, path)
	h, err := qcow2.ReadHeader(s.Read)
	if err != nil {
		t.Fatal(err)
	}
	all, err := qcow2.ReadBitmaps(s.Read, h)
	if err != nil || len(all) != 3 {
		t.Fatalf("%d bitmaps, %v", len(all), err)
	}
	g := h.Geometry()
	if got := g.MeasureBitmaps(h.Size, all); got != want.Bitmaps {
		t.Errorf("bitmaps need %d bytes, want %d", got, want.Bitmaps)
	}
}
