// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/graph"
)

// image is a file that a case is about.
type image struct {
	*testing.T
	*bed
}

// newImage makes a directory for a case and, with options for qemu-img create, an image in it.
func newImage(t *testing.T, create ...string) *image {
	t.Helper()
	dir := t.TempDir()
	if err := writeSources(dir); err != nil {
		t.Fatal(err)
	}
	b := newBed(dir, &List{})
	if err := b.prepare(); err != nil {
		t.Fatal(err)
	}
	i := &image{t, b}
	if len(create) > 0 {
		i.img(append([]string{"create", "-q", "-f", "qcow2"}, create...)...)
	}
	return i
}

// img runs qemu-img, which must do it.
func (i *image) img(args ...string) {
	i.Helper()
	if err := qemuImg(i.dir, args...); err != nil {
		i.Fatal(err)
	}
}

// io runs qemu-io on the image.
func (i *image) io(lines ...string) {
	i.Helper()
	if err := i.qemuIO(imageName, lines); err != nil {
		i.Fatal(err)
	}
}

// clean wants the peer to find the image consistent.
func (i *image) clean() {
	i.Helper()
	if err := i.check(imageName); err != nil {
		i.Fatal(err)
	}
}

func (i *image) load() *naive {
	i.Helper()
	file, err := i.bed.load(imageName)
	if err != nil {
		i.Fatal(err)
	}
	n, err := openNaive(file, nil, nil)
	if err != nil {
		i.Fatal(err)
	}
	return n
}

// patch overwrites bytes of the file.
func (i *image) patch(off int64, b ...byte) {
	i.Helper()
	f, err := os.OpenFile(i.path(imageName), os.O_RDWR, 0)
	if err == nil {
		_, err = f.WriteAt(b, off)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		i.Fatal(err)
	}
}

func (i *image) patchWord(off int64, v uint64) {
	i.Helper()
	i.patch(off, binary.BigEndian.AppendUint64(nil, v)...)
}

// build opens the image as a disk would be.
func (i *image) build(change func(s *graph.Spec)) (block.Node, error) {
	s := graph.Spec{Path: i.path(imageName), Format: graph.FormatQcow2}
	if change != nil {
		change(&s)
	}
	return graph.Build(context.Background(), s, graph.AnyPath)
}

func readOnly(s *graph.Spec) { s.ReadOnly = true }

// opens runs the disk; the machine is closed when the test ends, at the latest.
func (i *image) opens(change func(s *graph.Spec)) *machine {
	i.Helper()
	k, err := newMachine()
	if err != nil {
		i.Fatal(err)
	}
	i.Cleanup(func() {
		if err := k.close(); err != nil && !i.Failed() {
			i.Error(err)
		}
	})
	k.open = func() (block.Node, error) { return i.build(change) }
	if err := k.start(); err != nil {
		i.Fatal(err)
	}
	return k
}

// refused wants the image not to open, and each of the words in what is said.
func (i *image) refused(change func(s *graph.Spec), words ...string) {
	i.Helper()
	n, err := i.build(change)
	if err == nil {
		i.Errorf("it opens: %v", n.Close())
		return
	}
	if block.Errno(err) == 0 {
		i.Errorf("%v: carries no errno", err)
	}
	for _, w := range words {
		if !strings.Contains(strings.ToLower(err.Error()), strings.ToLower(w)) {
			i.Errorf("%v: does not say %q", err, w)
		}
	}
}

// one does one request, and gives its error.
func (k *machine) one(o Op) error { return k.batch([]Op{o}, nil) }

func (i *image) must(err error) {
	i.Helper()
	if err != nil {
		i.Fatal(err)
	}
}

func TestBackingNameOutsideTheFirstCluster(t *testing.T) {
	i := newImage(t)
	i.must(os.WriteFile(i.path("base.raw"), make([]byte, 1<<20), 0o600))
	i.img("create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", imageName)
	sane := i.load().file
	for name, change := range map[string]func(){
		"far away":              func() { i.patchWord(8, 70000) },
		"across the end":        func() { i.patchWord(8, 65536-4) },
		"too long":              func() { i.patch(16, 0, 0, 4, 0) },
		"as long as can be":     func() { i.patch(16, 0xff, 0xff, 0xff, 0xff) },
		"inside the own header": func() { i.patchWord(8, 8) },
	} {
		t.Run(name, func(t *testing.T) {
			i := &image{t, i.bed}
			i.must(os.WriteFile(i.path(imageName), sane, 0o600))
			change()
			i.refused(nil, "backing")
			i.refused(readOnly, "backing")
		})
	}
}

func TestRefcountTableWithoutClusters(t *testing.T) {
	i := newImage(t, imageName, "4M")
	i.io("write -q -s ../s1 0 1M")
	i.patch(56, 0, 0, 0, 0)
	i.refused(nil, "refcount table")
	i.refused(readOnly, "refcount table")
}

// A table that is larger than it has to be is as the specification wants it.
func TestRefcountTableThatIsLargerThanNeeded(t *testing.T) {
	i := newImage(t, "-o", "cluster_size=4k", imageName, "4M")
	n := i.load()
	at := (int64(len(n.file)) + n.cluster - 1) &^ (n.cluster - 1)
	table := make([]byte, 4*n.cluster)
	copy(table, n.file[n.tableOffset:n.tableOffset+n.tableBytes])
	i.patch(at, table...)
	i.patchWord(48, uint64(at))
	i.patch(56, 0, 0, 0, 4)
	i.img("check", "-q", "-f", "qcow2", "-r", "all", imageName)
	k := i.opens(nil)
	i.must(k.one(Op{Kind: Write, Off: 1 << 20, Len: 100_000, Source: 2}))
	i.must(k.close())
	i.clean()
}

func TestUnknownIncompatibleFeature(t *testing.T) {
	for _, bit := range []uint{5, 31, 63} {
		i := newImage(t, imageName, "1M")
		n := i.load()
		i.patchWord(72, 1<<bit)
		i.refused(nil, fmt.Sprint(bit))
		i.refused(readOnly, fmt.Sprint(bit))
		// With a name in the table of names, the name is said. It takes the place of the first that stands there.
		at := bytes.Index(n.file[:4096], []byte("dirty bit"))
		if at < 0 {
			t.Fatal("the peer writes no table of names")
		}
		i.patch(int64(at-2), append([]byte{0, byte(bit)}, "flux capacitor"...)...)
		i.refused(nil, "flux capacitor")
		i.refused(readOnly, "flux capacitor")
	}
}

func TestImageKnownToBeCorrupt(t *testing.T) {
	i := newImage(t, imageName, "1M")
	i.io("write -q -s ../s1 0 64k")
	i.patchWord(72, 2)
	i.refused(nil, "corrupt")
	k := i.opens(readOnly)
	i.must(k.one(Op{Kind: Read, Len: 65536}))
}

// l2Entry is where the L2 entry of a cluster of the disk stands.
func (n *naive) l2Entry(cluster int64) int64 {
	perTable := n.cluster / n.entryBytes()
	return int64(n.word(n.l1Offset+8*(cluster/perTable))&offsetMask) + cluster%perTable*n.entryBytes()
}

// corruptNow tells whether the corrupt bit stands in the file.
func (i *image) corruptNow() bool {
	i.Helper()
	return i.load().incompatible&2 != 0
}

func TestEntryThatIsNotAligned(t *testing.T) {
	for _, kind := range []Kind{Read, Write, Discard, Zero} {
		t.Run(string(kind), func(t *testing.T) {
			i := newImage(t, imageName, "1M")
			i.io("write -q -s ../s1 0 128k")
			n := i.load()
			i.patchWord(n.l2Entry(1), n.word(n.l2Entry(1))+512)
			k := i.opens(nil)
			if err := k.one(Op{Kind: kind, Off: 65536, Len: 65536}); !errors.Is(err, syscall.EIO) {
				t.Errorf("%s: %v, want EIO", kind, err)
			}
			i.must(k.one(Op{Kind: Read, Off: 0, Len: 65536}))
			_ = k.close() // what it says depends on what was to be written
			if !i.corruptNow() {
				t.Error("the image is not marked as corrupt")
			}
			i.refused(nil, "corrupt")
		})
	}
}

// Each write that would go to what is metadata is an error and marks the image, and the metadata stay as they were.
func TestEntryThatPointsToMetadata(t *testing.T) {
	for name, find := range map[string]func(n *naive) int64{
		"L1 table":       func(n *naive) int64 { return n.l1Offset },
		"refcount block": func(n *naive) int64 { return int64(n.word(n.tableOffset) & offsetMask) },
		"refcount table": func(n *naive) int64 { return n.tableOffset },
		"L2 table":       func(n *naive) int64 { return int64(n.word(n.l1Offset) & offsetMask) },
		"other L2 table": func(n *naive) int64 { return int64(n.word(n.l1Offset+8) & offsetMask) },
		"snapshot's L1":  func(n *naive) int64 { return n.snapshots[0].l1Offset },
		"snapshot table": func(n *naive) int64 { return n.snapOffset },
	} {
		for _, o := range []Op{{Kind: Write, Off: 8192, Len: 512, Source: 9}, {Kind: Zero, Off: 8192 + 512, Len: 100}, {Kind: Write, Off: 8192, Len: 4096}} {
			t.Run(name+"/"+o.String(), func(t *testing.T) {
				i := newImage(t, "-o", "cluster_size=4k", imageName, "4M")
				i.io("write -q -s ../s1 3M 4k")
				i.img("snapshot", "-q", "-c", "a", imageName)
				i.io("write -q -s ../s1 0 64k", "write -q -s ../s1 3M 64k")
				n := i.load()
				at := find(n)
				i.patchWord(n.l2Entry(2), uint64(at)|copiedFlag)
				before := bytes.Clone(i.load().file[at : at+n.cluster])
				k := i.opens(nil)
				if err := k.one(o); !errors.Is(err, syscall.EIO) {
					t.Errorf("%v, want EIO", err)
				}
				if err := k.one(Op{Kind: Write, Off: 2 << 20, Len: 4096}); !errors.Is(err, syscall.EIO) {
					t.Errorf("a write elsewhere after that: %v, want EIO", err)
				}
				_ = k.close() // what it says depends on what was to be written
				if !bytes.Equal(before, i.load().file[at:at+n.cluster]) {
					t.Errorf("%s was changed", name)
				}
				if !i.corruptNow() {
					t.Error("the image is not marked as corrupt")
				}
			})
		}
	}
}

// No cluster of the disk is where the header is: an entry that says so names none.
func TestEntryThatPointsToTheHeader(t *testing.T) {
	i := newImage(t, "-o", "cluster_size=4k", imageName, "4M")
	i.io("write -q -s ../s1 0 64k")
	n := i.load()
	i.patchWord(n.l2Entry(2), copiedFlag)
	k := i.opens(nil)
	i.must(k.one(Op{Kind: Write, Off: 8192, Len: 512, Source: 9}))
	i.must(k.close())
	if string(i.load().file[:4]) != "QFI\xfb" || !bytes.Equal(n.file[4:72], i.load().file[4:72]) {
		t.Error("the header was changed")
	}
}

// What a header says is bounded before anything is made of it.
func TestHeadersThatLieAboutSizes(t *testing.T) {
	for name, change := range map[string]func(i *image){
		"header length":           func(i *image) { i.patch(100, 0xff, 0xff, 0xff, 0xff) },
		"cluster bits 0":          func(i *image) { i.patch(20, 0, 0, 0, 0) },
		"cluster bits 8":          func(i *image) { i.patch(20, 0, 0, 0, 8) },
		"cluster bits 22":         func(i *image) { i.patch(20, 0, 0, 0, 22) },
		"cluster bits 63":         func(i *image) { i.patch(20, 0, 0, 0, 63) },
		"L1 size":                 func(i *image) { i.patch(36, 0x7f, 0xff, 0xff, 0xff) },
		"L1 size of none":         func(i *image) { i.patch(36, 0, 0, 0, 0) },
		"L1 offset":               func(i *image) { i.patchWord(40, ^uint64(0)) },
		"L1 offset not aligned":   func(i *image) { i.patchWord(40, 512) },
		"refcount table":          func(i *image) { i.patch(56, 0x7f, 0xff, 0xff, 0xff) },
		"refcount table offset":   func(i *image) { i.patchWord(48, ^uint64(0)) },
		"snapshots":               func(i *image) { i.patch(60, 0xff, 0xff, 0xff, 0xff) },
		"snapshot table":          func(i *image) { i.patch(60, 0, 0, 0, 1); i.patchWord(64, ^uint64(511)) },
		"backing length":          func(i *image) { i.patchWord(8, 600); i.patch(16, 0xff, 0xff, 0xff, 0xff) },
		"extension length":        func(i *image) { i.patch(112, 1, 2, 3, 4, 0xff, 0xff, 0xff, 0xff) },
		"refcount order 7":        func(i *image) { i.patch(96, 0, 0, 0, 7) },
		"size of the disk":        func(i *image) { i.patchWord(24, 1<<63-1) },
		"negative size":           func(i *image) { i.patchWord(24, 1<<63) },
		"version 1":               func(i *image) { i.patch(4, 0, 0, 0, 1) },
		"version 4":               func(i *image) { i.patch(4, 0, 0, 0, 4) },
		"encrypted, old way":      func(i *image) { i.patch(32, 0, 0, 0, 1) },
		"encrypted, LUKS":         func(i *image) { i.patch(32, 0, 0, 0, 2) },
		"compression 2":           func(i *image) { i.patchWord(72, 8); i.patch(104, 2) },
		"compression 0 with bit":  func(i *image) { i.patchWord(72, 8); i.patch(104, 0) },
		"compression without bit": func(i *image) { i.patch(104, 1) },
	} {
		t.Run(name, func(t *testing.T) {
			i := newImage(t, imageName, "64M")
			change(i)
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			begin := time.Now()
			i.refused(nil)
			i.refused(readOnly)
			if took := time.Since(begin); took > 30*time.Second {
				t.Errorf("it took %v", took)
			}
			runtime.ReadMemStats(&after)
			if took := after.TotalAlloc - before.TotalAlloc; took > 128<<20 {
				t.Errorf("it took %d bytes", took)
			}
		})
	}
}

func TestHeaderIsKeptAsItWas(t *testing.T) {
	i := newImage(t, "-o", "lazy_refcounts=on", imageName, "1M")
	// An unknown compatible bit, an unknown autoclear bit, and an unknown extension in front of the others.
	i.patchWord(80, 1|1<<5)
	i.patchWord(88, 1<<7)
	n := i.load()
	unknown := append([]byte{0x12, 0x34, 0x56, 0x78, 0, 0, 0, 5}, "hello\x00\x00\x00"...)
	i.patch(112, append(bytes.Clone(unknown), n.file[112:1024]...)...)
	before := i.load().file[:4096]

	k := i.opens(readOnly)
	i.must(k.close())
	if !bytes.Equal(before, i.load().file[:4096]) {
		t.Error("the header was changed by one who only reads")
	}
	k = i.opens(nil)
	i.must(k.one(Op{Kind: Write, Off: 0, Len: 65536, Source: 1}))
	i.must(k.close())
	after := bytes.Clone(i.load().file[:4096])
	if v := binary.BigEndian.Uint64(after[88:]); v != 0 {
		t.Errorf("autoclear bits are %#x, want none", v)
	}
	if v := binary.BigEndian.Uint64(after[72:]); v != 0 {
		t.Errorf("incompatible bits are %#x after it was closed, want none", v)
	}
	copy(after[88:96], before[88:96])
	if !bytes.Equal(before[:104], after[:104]) {
		t.Errorf("fields changed:\n%x\n%x", before[:104], after[:104])
	}
	if !bytes.Contains(after, unknown) {
		t.Error("the unknown extension is gone")
	}
	i.clean()
}

func TestHeaderLengths(t *testing.T) {
	for _, length := range []int{104, 112, 120, 88, 108, 72} {
		t.Run(fmt.Sprint(length), func(t *testing.T) {
			i := newImage(t, imageName, "1M")
			i.io("write -q -s ../s1 0 64k")
			n := i.load()
			rest := bytes.Clone(n.file[112:1000])
			more := make([]byte, max(length-112, 0))
			i.patch(int64(length), append(rest, make([]byte, 100)...)...)
			if len(more) > 0 {
				i.patch(112, more...)
			}
			i.patch(100, binary.BigEndian.AppendUint32(nil, uint32(length))...)
			if length < 104 || length%8 != 0 {
				i.refused(nil)
				return
			}
			k := i.opens(nil)
			i.must(k.one(Op{Kind: Write, Off: 65536, Len: 65536, Source: 1}))
			i.must(k.close())
			if got := binary.BigEndian.Uint32(i.load().file[100:]); int(got) != length {
				t.Errorf("header length became %d", got)
			}
			i.clean()
		})
	}
}

func TestImageOfZeroClustersAlone(t *testing.T) {
	i := newImage(t, imageName, "1G")
	i.io("write -q -z -u 0 1G")
	k := i.opens(readOnly)
	got := &model{content: content{data: make([]byte, 32<<20), zero: make([]bool, 32<<20)}}
	for at := int64(0); at < 1<<30; at += 256 << 20 {
		i.must(k.batch([]Op{{Kind: Read, Off: 0, Len: 32 << 20}}, got))
	}
	var extents []block.Extent
	err := block.Map(context.Background(), k.h.Node(), 0, 1<<30, func(e block.Extent) error {
		if n := len(extents); n > 0 && extents[n-1].Zero == e.Zero && extents[n-1].Data == e.Data {
			extents[n-1].Length += e.Length
			return nil
		}
		extents = append(extents, e)
		return nil
	})
	if err != nil || len(extents) != 1 || !extents[0].Zero || extents[0].Data || extents[0].Length != 1<<30 {
		t.Errorf("map is %+v, %v, want one stretch of zeros", extents, err)
	}
}

func TestMagicDoesNotShowInTheDisk(t *testing.T) {
	i := newImage(t, imageName, "64M")
	var lines []string
	for at := int64(0); at < 64<<20; at += 33 * 65536 {
		lines = append(lines, fmt.Sprintf("write -q -s ../s1 %d 64k", at))
	}
	i.io(lines...)
	k := i.opens(readOnly)
	m := newModel(&List{Image: Image{Size: 64 << 20, Cluster: 65536}})
	for at := int64(0); at < 64<<20; at += 33 * 65536 {
		m.apply(&Op{Kind: Write, Off: at, Len: 65536, Source: 1})
	}
	i.must(k.batch([]Op{{Kind: Read, Len: 64 << 20}}, m))
}

// Each cluster is made of data that compress and data that do not, of every size of cluster and kind of compression.
func TestCompressedClustersOfEverySize(t *testing.T) {
	for _, cluster := range []int64{512, 4096, 65536, 2 << 20} {
		for _, kind := range []string{"zlib", "zstd"} {
			t.Run(fmt.Sprintf("%d/%s", cluster, kind), func(t *testing.T) {
				i := newImage(t)
				data := make([]byte, 4<<20)
				for at, s := int64(0), 0; at < int64(len(data)); at, s = at+100_000, s+3 {
					sourced(data[at:min(at+100_000, int64(len(data)))], s%sourceCount)
				}
				i.must(os.WriteFile(i.path("data.raw"), data, 0o600))
				i.img("convert", "-q", "-c", "-f", "raw", "-O", "qcow2", "-o", fmt.Sprintf("cluster_size=%d,compression_type=%s", cluster, kind), "data.raw", imageName)
				m := newModel(&List{Image: Image{Size: int64(len(data)), Cluster: cluster, Compat: "1.1"}})
				copy(m.data, data)
				k := i.opens(nil)
				whole := Op{Kind: Read, Len: int64(len(data))}
				i.must(k.batch([]Op{whole}, m))
				// A few bytes within a cluster: its other bytes stay, and the compressed ones are let go.
				for at := int64(700); at < int64(len(data)); at += 300_000 {
					o := Op{Kind: Write, Off: at, Len: 512, Source: 4}
					i.must(k.batch([]Op{o}, m))
					m.apply(&o)
				}
				i.must(k.batch([]Op{whole}, m))
				i.must(k.close())
				i.clean()
				i.must(i.holds(imageName, "qcow2", &m.content))
			})
		}
	}
}

// Version 2 has no clusters of zeros: what is discarded may not show what lies below.
func TestDiscardDoesNotShowTheFileBelow(t *testing.T) {
	i := newImage(t)
	i.img("create", "-q", "-f", "qcow2", "base.qcow2", "1M")
	i.must(i.qemuIO("base.qcow2", []string{"write -q -P 1 0 1M"}))
	i.img("create", "-q", "-f", "qcow2", "-o", "compat=0.10", "-b", "base.qcow2", "-F", "qcow2", imageName)
	i.io("write -q -s ../s2 0 1M")
	l := &List{Image: Image{Size: 1 << 20, Cluster: 65536, Compat: "0.10"}, Backing: []Base{{Format: "raw", Size: 1 << 20}}}
	m := newModel(l)
	m.apply(&Op{Kind: Write, Len: 1 << 20, Source: 2})
	k := i.opens(nil)
	for _, o := range []Op{{Kind: Discard, Off: 65536, Len: 65536}, {Kind: Zero, Off: 131072, Len: 65536}, {Kind: Zero, Off: 262144, Len: 65536, Unmap: true}} {
		i.must(k.batch([]Op{o}, m))
		m.apply(&o)
		i.must(k.batch([]Op{{Kind: Read, Len: 1 << 20}}, m))
	}
	i.must(k.close())
	i.clean()
	i.must(i.holds(imageName, "qcow2", &m.content))
}

// A cluster that is overwritten and flushed again and again needs no more room.
func TestFileDoesNotGrowByFlushing(t *testing.T) {
	for _, options := range []string{"cluster_size=64k", "cluster_size=512,refcount_bits=64", "cluster_size=4k,compat=0.10"} {
		t.Run(options, func(t *testing.T) {
			i := newImage(t, "-o", options, imageName, "64M")
			k := i.opens(nil)
			rounds := 1000
			if soaking() {
				rounds = 10_000
			}
			var early int64
			for r := range rounds {
				i.must(k.one(Op{Kind: Write, Off: 1 << 20, Len: 4096, Source: r % sourceCount}))
				if r%2 == 0 {
					i.must(k.one(Op{Kind: Discard, Off: 8 << 20, Len: 128 << 10}))
				} else {
					i.must(k.one(Op{Kind: Write, Off: 8 << 20, Len: 100_000, Source: 3}))
				}
				i.must(k.one(Op{Kind: Flush}))
				if r == 20 {
					early = i.length()
				}
			}
			n := i.load()
			if now := i.length(); now > early+2*n.cluster {
				t.Errorf("file has %d bytes after %d rounds, %d after 20", now, rounds, early)
			}
			i.must(k.close())
			i.clean()
		})
	}
}

func (i *image) length() int64 {
	i.Helper()
	st, err := os.Stat(i.path(imageName))
	if err != nil {
		i.Fatal(err)
	}
	return st.Size()
}

// Random trims and rewrites scatter an image, but do not make it much larger than the disk.
func TestDiscardAndRewriteKeepTheFileSmall(t *testing.T) {
	for _, keep := range []bool{false, true} {
		t.Run(fmt.Sprintf("keep %v", keep), func(t *testing.T) {
			const size = 32 << 20
			i := newImage(t, imageName, fmt.Sprint(size))
			k := i.opens(func(s *graph.Spec) { s.KeepOnDiscard = keep })
			i.must(k.one(Op{Kind: Write, Len: size, Source: 9}))
			i.must(k.one(Op{Kind: Flush}))
			full := i.length()
			rng := rand.New(rand.NewPCG(1, 1))
			for range 400 {
				off, n := rng.Int64N(size/65536-16)*65536, (1+rng.Int64N(16))*65536
				i.must(k.one(Op{Kind: Discard, Off: off, Len: n}))
				i.must(k.one(Op{Kind: Write, Off: off, Len: n / 2, Source: 4}))
				i.must(k.one(Op{Kind: Flush}))
			}
			end := i.length()
			i.must(k.close())
			i.clean()
			if keep && end != full || end > full+size/10 {
				t.Errorf("file has %d bytes, had %d when it was full", end, full)
			}
		})
	}
}

// Names in an image are looked up from where the image is.
func TestBackingNamesAreRelativeToTheImage(t *testing.T) {
	i := newImage(t)
	for _, d := range []string{"a", "a/b", "c"} {
		i.must(os.Mkdir(i.path(d), 0o700))
	}
	base := make([]byte, 1<<20)
	sourced(base, 9)
	i.must(os.WriteFile(i.path("a/base.raw"), base, 0o600))
	i.img("create", "-q", "-f", "qcow2", "-b", "../base.raw", "-F", "raw", "a/b/middle.qcow2", "1M")
	i.img("create", "-q", "-f", "qcow2", "-b", "../a/b/middle.qcow2", "-F", "qcow2", "c/top.qcow2", "1M")
	i.must(os.Symlink("c/top.qcow2", i.path("link.qcow2")))
	t.Chdir("/")
	for _, name := range []string{"c/top.qcow2", "a/b/middle.qcow2"} {
		k := i.opens(func(s *graph.Spec) { s.Path = i.path(name) })
		m := newModel(&List{Image: Image{Size: 1 << 20, Cluster: 65536}})
		copy(m.data, base)
		i.must(k.batch([]Op{{Kind: Read, Len: 1 << 20}}, m))
		i.must(k.stop())
	}
}

func TestBackingNamesInJSON(t *testing.T) {
	base := make([]byte, 1<<20)
	sourced(base, 9)
	for name, spelling := range map[string]string{
		"nested":  `json:{"driver":"raw","file":{"driver":"file","filename":"base.raw"}}`,
		"spaces":  `json: { "driver" : "raw" , "file" : { "driver" : "file" , "filename" : "base.raw" } }`,
		"order":   `json:{"file":{"filename":"base.raw","driver":"file"},"driver":"raw"}`,
		"dotted":  `json:{"driver":"raw","file.driver":"file","file.filename":"base.raw"}`,
		"unknown": `json:{"driver":"teapot","file":{"driver":"file","filename":"base.raw"}}`,
		"broken":  `json:{"driver":"raw","file":{`,
	} {
		t.Run(name, func(t *testing.T) {
			i := newImage(t, imageName, "1M")
			i.must(os.WriteFile(i.path("base.raw"), base, 0o600))
			t.Chdir(i.dir) // the peer looks such names up from where it runs
			i.img("rebase", "-u", "-f", "qcow2", "-b", spelling, "-F", "raw", imageName)
			if name == "unknown" || name == "broken" {
				i.refused(nil)
				return
			}
			k := i.opens(nil)
			m := newModel(&List{Image: Image{Size: 1 << 20, Cluster: 65536}})
			copy(m.data, base)
			i.must(k.batch([]Op{{Kind: Read, Len: 1 << 20}}, m))
			i.must(k.stop())
		})
	}
}

// Overlays of every size are whole, the smallest and the largest too.
func TestOverlaysOfEverySize(t *testing.T) {
	for _, size := range []int64{0, 512, 1 << 20, 16 << 30, 8 << 40} {
		for _, by := range []string{"ours", "theirs"} {
			t.Run(fmt.Sprintf("%d/%s", size, by), func(t *testing.T) {
				i := newImage(t)
				i.img("create", "-q", "-f", "qcow2", backingName(0), "1M")
				i.l = &List{Image: Image{Size: size, Cluster: 65536, Compat: "1.1", Refcount: 16, By: by}, Backing: []Base{{Format: "qcow2"}}}
				i.must(i.bed.make())
				i.clean()
				if v := i.load().check(); len(v.errors) > 0 || len(v.leaks) > 0 {
					t.Errorf("%s", &v)
				}
				k := i.opens(nil)
				if size > 0 {
					i.must(k.one(Op{Kind: Write, Off: size - 512, Len: 512, Source: 1}))
				}
				i.must(k.close())
				i.clean()
			})
		}
	}
}

// Refcount tables begin, end and grow where they should.
func TestTablesOfRefcountsGrow(t *testing.T) {
	for cluster, boundary := range map[int64]int64{512: 64 * 256 * 512, 4096: 2048 * 4096} {
		for _, more := range []int64{-1, 0, 1} {
			t.Run(fmt.Sprintf("%d/%+d", cluster, more), func(t *testing.T) {
				i := newImage(t)
				size := boundary + more*cluster
				i.l = &List{Image: Image{Size: size, Cluster: cluster, Compat: "1.1", Refcount: 16, Prealloc: "metadata", By: "ours"}}
				i.must(i.bed.make())
				i.clean()
				m := newModel(i.l)
				k := i.opens(nil)
				for at := int64(0); at < size; at += 1 << 20 {
					o := Op{Kind: Write, Off: at, Len: min(1<<20, size-at), Source: int(at>>20) % sourceCount}
					i.must(k.one(o))
					m.apply(&o)
				}
				i.must(k.close())
				i.clean()
				i.must(i.judge(m))
			})
		}
		t.Run(fmt.Sprintf("%d/growing", cluster), func(t *testing.T) {
			i := newImage(t, "-o", fmt.Sprintf("cluster_size=%d", cluster), imageName, fmt.Sprint(boundary+4*cluster))
			k := i.opens(nil)
			for at := int64(0); at < boundary; at += 1 << 20 {
				i.must(k.one(Op{Kind: Write, Off: at, Len: min(1<<20, boundary-at), Source: int(at>>20) % sourceCount}))
			}
			i.must(k.close())
			i.clean()
		})
	}
}

// Somebody else may not change the image while it is in use.
func TestOthersAreKeptAway(t *testing.T) {
	i := newImage(t, imageName, "16M")
	k := i.opens(nil)
	i.must(k.one(Op{Kind: Write, Len: 65536, Source: 1}))
	for _, args := range [][]string{{"resize", "-f", "qcow2", imageName, "32M"}, {"snapshot", "-c", "a", imageName}, {"check", "-r", "all", "-f", "qcow2", imageName}} {
		if err := qemuImg(i.dir, args...); status(err) != 1 || !strings.Contains(err.Error(), "lock") {
			t.Errorf("%v: %v, want it refused by the lock", args, err)
		}
	}
	i.must(k.close())
	i.clean()
}

// A small request in each of many places of one cluster, at the same time: none undoes another.
func TestManyWritersOfOneCluster(t *testing.T) {
	for _, options := range []string{"cluster_size=64k", "cluster_size=64k,extended_l2=on", "cluster_size=2M"} {
		t.Run(options, func(t *testing.T) {
			i := newImage(t, "-o", options, imageName, "8M")
			i.io("write -q -z 0 4M")
			k := i.opens(nil)
			m := newModel(&List{Image: Image{Size: 8 << 20, Cluster: 65536, Compat: "1.1"}})
			for round := range 20 {
				var ops []Op
				for s := range int64(64) {
					at := int64(round)*131072 + (s*37%128)*512 + s%2*65536
					ops = append(ops, Op{Kind: Write, Off: at, Len: 512, Source: int(s) % sourceCount})
				}
				ops = (&List{Ops: with(ops)}).batches()[0]
				i.must(k.batch(ops, m))
				for _, o := range ops {
					m.apply(&o)
				}
				i.must(k.one(Op{Kind: Flush}))
			}
			i.must(k.batch([]Op{{Kind: Read, Len: 8 << 20}}, m))
			i.must(k.close())
			i.clean()
			i.must(i.holds(imageName, "qcow2", &m.content))
		})
	}
}

func with(ops []Op) []Op {
	for k := range ops {
		ops[k].With = true
	}
	return ops
}

// A bitmap that nobody closed cannot be trusted, and stays so.
func TestBitmapsOfAnImageThatIsWritten(t *testing.T) {
	i := newImage(t, imageName, "16M")
	i.img("bitmap", "--add", imageName, "b")
	i.clean()
	k := i.opens(nil)
	i.must(k.one(Op{Kind: Write, Len: 1 << 20, Source: 1}))
	i.must(k.close())
	if err := i.check(imageName); status(err) != 0 {
		t.Errorf("check: %v", err)
	}
	out, err := command(i.dir, "qemu-img", "info", imageName)
	if err != nil {
		t.Fatal(err)
	}
	if n := i.load(); n.autoclear&1 != 0 && !strings.Contains(out, "in-use") {
		t.Errorf("the bitmap counts as complete, although nothing was noted in it:\n%s", out)
	}
}

func TestGuestsMayNotWriteHeadersIntoRawDisks(t *testing.T) {
	i := newImage(t)
	secret := filepath.Join(i.dir, "secret")
	i.must(os.WriteFile(secret, []byte(strings.Repeat("secret..", 4096)), 0o600))
	i.img("create", "-q", "-f", "qcow2", "-b", secret, "-F", "raw", imageName, "1M")
	n, err := graph.Build(context.Background(), graph.Spec{Path: i.path(imageName)}, graph.AnyPath)
	if err != nil {
		t.Fatal(err)
	}
	if size := n.Info().Size; size == 1<<20 {
		t.Error("a disk without a format is read as what its guest wrote")
	}
	i.must(n.Close())
}
