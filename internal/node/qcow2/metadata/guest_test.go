// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"os/exec"
	"strings"
	"testing"

	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

// shape is a kind of image that tests are made with.
type shape struct {
	name string
	o    create.Options
	open Options
}

const kib = 1 << 10

// shapes are small disks with many tables: what is rare in a large image happens all the time in them.
//
// Under the race detector, which takes ten times as long for each and has one thread to look at, they are few.
func shapes() []shape {
	all := allShapes()
	if raced {
		return []shape{all[0], all[11], all[13]}
	}
	return all
}

func allShapes() []shape {
	return []shape{
		{"512", create.Options{Size: 96 * kib, ClusterSize: 512}, Options{}},
		{"512-1bit", create.Options{Size: 96 * kib, ClusterSize: 512, RefcountBits: 1}, Options{}},
		{"512-64bit", create.Options{Size: 160 * kib, ClusterSize: 512, RefcountBits: 64}, Options{}},
		{"v2", create.Options{Size: 96*kib + 512, ClusterSize: 1024, Version: 2}, Options{}},
		{"v2-backing", create.Options{Size: 64 * kib, ClusterSize: 512, Version: 2, BackingFile: "base", BackingFormat: "raw"}, Options{}},
		{"backing", create.Options{Size: 96*kib + 512, ClusterSize: 2048, BackingFile: "base", BackingFormat: "raw"}, Options{}},
		{"4k-8bit", create.Options{Size: 300 * kib, ClusterSize: 4096, RefcountBits: 8}, Options{}},
		{"4k-keep", create.Options{Size: 300 * kib, ClusterSize: 4096}, Options{KeepOnDiscard: true}},
		{"64k", create.Options{Size: 1024 * kib, ClusterSize: 64 * kib}, Options{}},
		{"lazy", create.Options{Size: 96 * kib, ClusterSize: 512, LazyRefcounts: true}, Options{}},
		{"extended", create.Options{Size: 512 * kib, ClusterSize: 16 * kib, ExtendedL2: true}, Options{}},
		{"extended-backing", create.Options{Size: 512*kib - 1024, ClusterSize: 16 * kib, ExtendedL2: true, BackingFile: "base", BackingFormat: "raw"}, Options{}},
		{"extended-32k", create.Options{Size: 256 * kib, ClusterSize: 32 * kib, ExtendedL2: true}, Options{}},
		{"small-cache", create.Options{Size: 256 * kib, ClusterSize: 512}, Options{L2CacheBytes: 1, RefcountCacheBytes: 1}},
	}
}

func newImage(t testing.TB, sh *shape) *memStore {
	t.Helper()
	s := &memStore{}
	if _, err := create.Create(s, &sh.o); err != nil {
		t.Fatal(err)
	}
	return s
}

func mustOpen(t testing.TB, s Store, o *Options) *Image {
	t.Helper()
	m, err := Open(s, o)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// guest does to an image what a node does, and knows what the disk ought to hold.
type guest struct {
	m    *Image
	s    Store
	disk []byte
	op   uint64
	log  *diary // nil keeps none
}

// diary is what a guest did, in order.
type diary struct {
	place func() int // in the log of the store
	told  []*deed
	tick  int
}

// deed is a write or zeroing of p, or a flush where p is nil, or something about a snapshot.
type deed struct {
	at    int // place in the log when it began; of a flush, and of a snapshot that is made, when it ended
	off   int64
	p     []byte
	since int    // of a flush: tick when it began
	done  int    // tick when it ended, 0 when it did not, or failed
	snap  string // a snapshot is being made, with the content p
	gone  string // a snapshot is about to be deleted
}

func (d *diary) add(e *deed) *deed {
	if d == nil {
		return e
	}
	d.tick++
	e.since = d.tick
	e.at = d.place()
	if e.p != nil {
		e.p = append([]byte{}, e.p...)
	}
	d.told = append(d.told, e)
	return e
}

// end says that a deed is done.
func (d *diary) end(e *deed) {
	if d != nil {
		d.tick++
		e.done = d.tick
	}
}

// flush commits, and notes that when it has happened.
func (g *guest) flush() error {
	e := &deed{}
	if g.log != nil {
		g.log.tick++
		e.since = g.log.tick
	}
	err := g.m.Commit()
	if err == nil && g.log != nil {
		e.at = g.log.place()
		g.log.told = append(g.log.told, e)
	}
	return err
}

// backingByte is what the backing file holds where an image has one.
func backingByte(off int64) byte { return byte(off>>9)*7 + 1 }

func newGuest(m *Image, s Store) *guest {
	g := &guest{m: m, s: s, disk: make([]byte, m.Size())}
	if m.Header().BackingFile != "" {
		for i := range g.disk {
			g.disk[i] = backingByte(int64(i))
		}
	}
	return g
}

// fill makes n bytes that no other write makes.
func (g *guest) fill(off, n int64) []byte {
	g.op++
	p := make([]byte, n)
	for i := int64(0); i+8 <= n; i += 8 {
		binary.LittleEndian.PutUint64(p[i:], g.op<<24|uint64(off+i)>>3)
	}
	return p
}

// read is what the image says.
func (g *guest) read(p []byte, off int64) error {
	t := g.m.Enter()
	defer g.m.Exit(t)
	for len(p) > 0 {
		if off >= g.m.Size() {
			clear(p)
			return nil
		}
		n := min(int64(len(p)), g.m.Size()-off)
		x, ok := g.m.Lookup(off, n)
		if !ok {
			var err error
			if x, err = g.m.Map(off, n); err != nil {
				return err
			}
		}
		if x.Length <= 0 || x.Length > n {
			return fmt.Errorf("extent of %d bytes for %d", x.Length, n)
		}
		if err := g.readExtent(p[:x.Length], off, x); err != nil {
			return err
		}
		p, off = p[x.Length:], off+x.Length
	}
	return nil
}

func (g *guest) readExtent(p []byte, off int64, x Extent) error {
	switch x.Kind {
	case Data:
		return g.s.Read(p, x.Host)
	case Unallocated:
		clear(p)
		if g.m.Header().BackingFile != "" {
			for i := range p {
				p[i] = backingByte(off + int64(i))
			}
		}
	case Zero, ZeroAllocated:
		clear(p)
	case Compressed:
		packed := make([]byte, x.CompressedLen)
		if err := g.s.Read(packed, x.Host); err != nil {
			return err
		}
		size := g.m.Geometry().ClusterSize
		plain := make([]byte, size)
		if _, err := io.ReadFull(flate.NewReader(bytes.NewReader(packed)), plain); err != nil {
			return fmt.Errorf("inflate the cluster at %#x: %w", off, err)
		}
		copy(p, plain[off&(size-1):])
	}
	return nil
}

// write writes p and, when it is done, knows that.
func (g *guest) write(p []byte, off int64) error {
	deed := g.log.add(&deed{off: off, p: p})
	t := g.m.Enter()
	defer g.m.Exit(t)
	for done := int64(0); done < int64(len(p)); {
		n, err := g.writePart(p[done:], off+done)
		if err != nil {
			return err
		}
		copy(g.disk[off+done:], p[done:done+n])
		done += n
	}
	g.log.end(deed)
	return nil
}

func (g *guest) writePart(p []byte, off int64) (int64, error) {
	if x, ok := g.m.Lookup(off, int64(len(p))); ok && x.Kind == Data && x.InPlace {
		return x.Length, g.s.Write(p[:x.Length], x.Host)
	}
	var a Allocation
	if err := g.m.BeginWrite(&a, off, int64(len(p))); err != nil {
		return 0, err
	}
	if a.InPlace {
		return a.Length, g.s.Write(p[:a.Length], a.Host)
	}
	err := g.transfer(&a, p[:a.Length])
	if err != nil {
		g.m.Abort(&a)
		return 0, err
	}
	g.m.Link(&a)
	return a.Length, nil
}

// transfer writes the data of an allocation, and what it must be surrounded with.
func (g *guest) transfer(a *Allocation, p []byte) error {
	head, tail := make([]byte, a.Head), make([]byte, a.Tail)
	if err := g.read(head, a.Offset-a.Head); err != nil {
		return err
	}
	if err := g.read(tail, a.Offset+a.Length); err != nil {
		return err
	}
	for _, w := range []struct {
		p  []byte
		at int64
	}{{head, a.Host - a.Head}, {p, a.Host}, {tail, a.Host + a.Length}} {
		if len(w.p) == 0 || a.Fresh && &w.p[0] != &p[0] && len(bytes.Trim(w.p, "\x00")) == 0 {
			continue
		}
		if err := g.s.Write(w.p, w.at); err != nil {
			return err
		}
	}
	return nil
}

// zero makes zeros, by the tables where they can.
func (g *guest) zero(off, n int64, unmap bool) error {
	deed := g.log.add(&deed{off: off, p: make([]byte, n)})
	for n > 0 {
		k, err := g.m.Zero(off, n, unmap)
		if err != nil {
			return err
		}
		if k == 0 {
			unit := g.m.ZeroUnit()
			k = min(n, unit-off&(unit-1))
			if err := g.write(make([]byte, k), off); err != nil {
				return err
			}
		}
		clear(g.disk[off : off+k])
		off, n = off+k, n-k
	}
	g.log.end(deed)
	return nil
}

// discard lets go of clusters; the disk reads as zeros there, or as before where the format cannot say zeros.
func (g *guest) discard(off, n int64) error {
	size := g.m.Geometry().ClusterSize
	first, last := (off+size-1)&^(size-1), off+n
	if last != g.m.Size() {
		last &^= size - 1
	}
	stays := g.m.Header().Version < 3 && g.m.Header().BackingFile != "" || first >= last
	if stays {
		return g.m.Discard(off, n)
	}
	deed := g.log.add(&deed{off: first, p: make([]byte, last-first)})
	if err := g.m.Discard(off, n); err != nil {
		return err
	}
	clear(g.disk[first:last])
	g.log.end(deed)
	return nil
}

// compress writes a whole cluster compressed, or as it is where that does not make it smaller.
func (g *guest) compress(off int64) error {
	size := g.m.Geometry().ClusterSize
	n := min(size, g.m.Size()-off)
	p := make([]byte, size)
	copy(p[:min(n, size/4)], g.fill(off, min(n, size/4)))
	var b bytes.Buffer
	w, _ := flate.NewWriter(&b, 6)
	_, _ = w.Write(p)
	_ = w.Close()
	if int64(b.Len()) >= size {
		return g.write(p[:n], off)
	}
	deed := g.log.add(&deed{off: off, p: p[:n]})
	var a Allocation
	if err := g.m.BeginCompressed(&a, off, b.Len()); err != nil {
		return err
	}
	if err := g.s.Write(b.Bytes(), a.Host); err != nil {
		g.m.Abort(&a)
		return err
	}
	g.m.Link(&a)
	copy(g.disk[off:], p[:n])
	g.log.end(deed)
	return nil
}

// verify compares the whole disk.
func (g *guest) verify(t testing.TB) {
	t.Helper()
	p := make([]byte, len(g.disk))
	if err := g.read(p, 0); err != nil {
		t.Fatalf("read the disk: %v", err)
	}
	if i := firstDifference(p, g.disk); i >= 0 {
		x, err := g.m.Map(int64(i), int64(len(p)-i))
		t.Fatalf("disk differs at %#x: % x, want % x (%v %v %v)", i, p[i:min(len(p), i+16)], g.disk[i:min(len(p), i+16)], x.Kind, x, err)
	}
}

// sane tells whether bytes of the disk from off on are zeros, the backing file's, or what fill made for this place. Nothing else
// is ever written, so that anything else is of another place, or rubbish.
func (g *guest) sane(p []byte, off int64) error {
	for i := 0; i+8 <= len(p); i += 8 {
		at := off + int64(i)
		v := binary.LittleEndian.Uint64(p[i:])
		if v != 0 && int64(v&(1<<24-1)) != at>>3 && (g.m.Header().BackingFile == "" || p[i] != backingByte(at)) {
			return fmt.Errorf("at %#x the guest reads %#x, which is not of this place", at, v)
		}
	}
	return nil
}

func firstDifference(a, b []byte) int {
	if bytes.Equal(a, b) {
		return -1
	}
	for i := range a {
		if i >= len(b) || a[i] != b[i] {
			return i
		}
	}
	return len(a)
}

// wantClean fails where a check of the image finds anything: ours always, and qemu-img with peer.
func wantClean(t testing.TB, s *memStore, leaks, peer bool) {
	t.Helper()
	var found []string
	r, err := check.Run(s.clone(), &check.Options{Report: func(f check.Finding) { found = append(found, f.Text) }})
	if err != nil {
		t.Fatalf("check: %v", err)
	}
	if r.Corruptions > 0 || r.CheckErrors > 0 || !leaks && r.Leaks > 0 {
		t.Fatalf("check: %d corruptions, %d errors, %d leaks:\n%s", r.Corruptions, r.CheckErrors, r.Leaks, strings.Join(found, "\n"))
	}
	if !peer {
		return
	}
	out, err := exec.Command("qemu-img", "check", "-f", "qcow2", s.save(t)).CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !(leaks && asExit(err, &exit) && exit.ExitCode() == 3) {
		t.Fatalf("qemu-img check: %v\n%s", err, out)
	}
}

func asExit(err error, to **exec.ExitError) bool {
	e, ok := err.(*exec.ExitError)
	*to = e
	return ok
}

func havePeer() bool {
	_, err := exec.LookPath("qemu-img")
	return err == nil
}

// step does something at random, and tells what.
func (g *guest) step(r *rand.Rand) (string, error) {
	size := g.m.Size()
	off := r.Int64N(size/512) * 512
	n := min(size-off, (1+r.Int64N(1+r.Int64N(64)))*512)
	cluster := g.m.Geometry().ClusterSize
	switch k := r.IntN(100); {
	case k < 45:
		return fmt.Sprintf("write %#x %#x", off, n), g.write(g.fill(off, n), off)
	case k < 58:
		return fmt.Sprintf("zero %#x %#x", off, n), g.zero(off, n, k&1 == 0)
	case k < 72:
		return fmt.Sprintf("discard %#x %#x", off, n), g.discard(off, n)
	case k < 80:
		off &^= cluster - 1
		return fmt.Sprintf("compress %#x", off), g.compress(off)
	default:
		return "flush", g.flush()
	}
}

// readAll reads a whole disk through a fresh, read-only open.
func readAll(s Store) ([]byte, error) {
	m, err := Open(s, &Options{ReadOnly: true})
	if err != nil {
		return nil, err
	}
	g := &guest{m: m, s: s}
	p := make([]byte, m.Size())
	return p, g.read(p, 0)
}
