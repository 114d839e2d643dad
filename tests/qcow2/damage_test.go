// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// damage changes a word or a few of an image's tables, as software with a fault would.
func damage(rng *rand.Rand, n *naive) string {
	entry, ok := n.someEntry(rng)
	word := func(at int64) uint64 { return n.word(at) }
	put := func(at int64, v uint64) string {
		old := word(at)
		if at+8 > int64(len(n.file)) {
			return ""
		}
		binary.BigEndian.PutUint64(n.file[at:], v)
		return fmt.Sprintf("word at %#x from %#x to %#x", at, old, v)
	}
	switch k := rng.IntN(8); {
	case k < 3 || !ok:
		return n.recount(rng)
	case k == 3:
		return put(entry, word(entry)^copiedFlag)
	case k == 4:
		return put(entry, 0)
	case k == 5:
		other, _ := n.someEntry(rng)
		return put(entry, word(other))
	case k == 6 && word(entry)&packedFlag == 0:
		return put(entry, word(entry)+uint64(n.cluster))
	default:
		l1 := n.l1Offset + 8*rng.Int64N(n.l1Size)
		if word(l1) == 0 {
			return n.recount(rng)
		}
		return put(l1, word(l1)^copiedFlag)
	}
}

// someEntry finds the place of an L2 entry of the disk that names a cluster.
func (n *naive) someEntry(rng *rand.Rand) (int64, bool) {
	for range 200 {
		table := int64(n.word(n.l1Offset+8*rng.Int64N(max(n.l1Size, 1))) & offsetMask)
		at := table + n.entryBytes()*rng.Int64N(n.cluster/n.entryBytes())
		if table != 0 && n.word(at)&(offsetMask|packedFlag) != 0 {
			return at, true
		}
	}
	return 0, false
}

// recount gives some cluster another refcount.
func (n *naive) recount(rng *rand.Rand) string {
	cluster := rng.Int64N((int64(len(n.file)) + n.cluster - 1) / n.cluster) // the peer does not look further
	perBlock := n.cluster * 8 / n.refcountBits
	block := int64(n.word(n.tableOffset+cluster/perBlock*8) & offsetMask)
	if cluster/perBlock*8 >= n.tableBytes || block == 0 {
		return ""
	}
	old := n.refcount(cluster)
	count := old ^ 1<<rng.Int64N(min(n.refcountBits, 3))
	at, bit := block+cluster%perBlock*n.refcountBits/8, cluster%perBlock*n.refcountBits%8
	if at+8 > int64(len(n.file)) {
		return ""
	}
	if n.refcountBits < 8 {
		mask := byte(1<<n.refcountBits-1) << bit
		n.file[at] = n.file[at]&^mask | byte(count)<<bit
	} else {
		n.file[at+n.refcountBits/8-1] = byte(count)
	}
	return fmt.Sprintf("refcount of cluster %d from %d to %d", cluster, old, count)
}

// damaged makes images by lists, damages them, and calls judge with what was done.
func damaged(t *testing.T, n int, judge func(b *bed, what []string) error) {
	root := room(t)
	first := number(t, "SLUICE_SEED", 1)
	for seed := first; seed < first+n; seed++ {
		l := GenerateSmall(uint64(seed))
		b := newBed(root, l)
		rng := rand.New(rand.NewPCG(uint64(seed), 5))
		if err := errors.Join(b.theirs(), b.damagedOften(rng, judge), b.remove()); err != nil {
			t.Fatalf("seed %d: %v\n%s", seed, err, l)
		}
	}
}

func (b *bed) damagedOften(rng *rand.Rand, judge func(b *bed, what []string) error) error {
	sane, err := os.ReadFile(b.path(imageName))
	if err != nil {
		return err
	}
	for range 8 {
		n, err := openNaive(append([]byte(nil), sane...), nil, nil)
		if err != nil {
			return err
		}
		var what []string
		for range rng.IntN(4) {
			what = append(what, damage(rng, n))
		}
		if err := os.WriteFile(b.path(imageName), n.file, 0o600); err != nil {
			return err
		}
		if err := judge(b, what); err != nil {
			return fmt.Errorf("%q: %w", what, err)
		}
	}
	return nil
}

// The plain reader is what crashes are judged by: it must see what the peer sees.
func TestThePeerAgreesWithThePlainCheck(t *testing.T) {
	seen := map[int]int{}
	damaged(t, lists(t, 20), func(b *bed, what []string) error {
		file, err := os.ReadFile(b.path(imageName))
		if err != nil {
			return err
		}
		n, err := openNaive(file, nil, nil)
		if err != nil {
			return err
		}
		v := n.check()
		want := 0
		switch {
		case len(v.errors)+len(v.copied) > 0:
			want = 2
		case len(v.leaks) > 0:
			want = 3
		}
		out, err := command(b.dir, "qemu-img", "check", "-f", "qcow2", imageName)
		if status(err) != want {
			return fmt.Errorf("the peer says %d, we find\n%s\n%v\n%s", status(err), &v, err, out)
		}
		seen[want]++
		return nil
	})
	if seen[0] == 0 || seen[2] == 0 || seen[3] == 0 {
		t.Errorf("statuses seen: %v, want all three", seen)
	}
}

// scramble overwrites a few bytes of the tables, of the header or of anything, with anything.
func scramble(rng *rand.Rand, n *naive) {
	spots := []int64{0, n.l1Offset, n.tableOffset, int64(n.word(n.tableOffset) & offsetMask), n.snapOffset}
	for range 3 {
		if at, ok := n.someEntry(rng); ok {
			spots = append(spots, at)
		}
	}
	for range 1 + rng.IntN(3) {
		at := spots[rng.IntN(len(spots))]
		if rng.IntN(2) == 0 {
			at += rng.Int64N(128)
		}
		if at == 0 && rng.IntN(4) > 0 || at >= int64(len(n.file)) {
			continue
		}
		switch rng.IntN(4) {
		case 0:
			n.file[at] ^= 1 << rng.IntN(8)
		case 1:
			n.file[at] = byte(rng.Uint32())
		case 2:
			binary.BigEndian.PutUint64(n.file[min(at, int64(len(n.file))-8):], rng.Uint64())
		case 3:
			binary.BigEndian.PutUint64(n.file[min(at, int64(len(n.file))-8):], uint64(rng.Int64N(64))<<n.clusterBits|uint64(rng.IntN(4))<<62)
		}
	}
}

// Whatever stands in an image, nothing panics and nothing goes on for ever: a request is done, or it fails with an errno.
func TestScrambledImagesDoNoHarm(t *testing.T) {
	root := room(t)
	first := number(t, "SLUICE_SEED", 1)
	for seed := first; seed < first+lists(t, 150); seed++ {
		l := GenerateSmall(uint64(seed))
		l.Image.By, l.Data = "ours", ""
		if err := scrambledRun(newBed(root, l), uint64(seed)); err != nil {
			t.Fatalf("seed %d: %v\n%s", seed, err, l)
		}
	}
}

func scrambledRun(b *bed, seed uint64) error {
	l, ok := forTables(b.l)
	if !ok {
		return nil
	}
	b.l = l
	b.inMemory()
	m := newModel(l)
	if err := b.make(); err != nil {
		return err
	}
	d, err := newDisk(b, m, seed)
	if err != nil {
		return err
	}
	if err := d.all(l, m); err != nil {
		return err
	}
	file, _ := d.inMemory()
	for round := range 10 {
		rng := rand.New(rand.NewPCG(seed, uint64(100+round)))
		n, err := openNaive(append([]byte(nil), file.file...), nil, d.backing)
		if err != nil {
			return err
		}
		scramble(rng, n)
		if err := useScrambled(n, rng, l); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
	}
	return nil
}

// useScrambled checks, repairs and uses an image of which nothing is to be believed.
func useScrambled(n *naive, rng *rand.Rand, l *List) error {
	s := &scheduler{Rand: rng, log: new(log)}
	const limit = 64 << 20 // of a file of less than a megabyte
	before := append([]byte(nil), n.file...)
	for _, repair := range []check.Repair{check.Nothing, check.Everything} {
		f := &device{s: s, file: append([]byte(nil), before...), limit: limit}
		if _, err := check.Run(f, &check.Options{Repair: repair}); err != nil && block.Errno(err) == 0 {
			return fmt.Errorf("check: %w", err)
		}
		if repair == check.Nothing && !bytes.Equal(f.file, before) {
			return errors.New("a check changed the image")
		}
		n.file = f.file
	}
	if rng.IntN(2) == 0 {
		n.file = before
	}
	d := &disk{scheduler: s, file: &device{s: s, file: n.file, limit: limit}, backing: n.backing, packing: n.compression, o: metadata.Options{Waiter: s}}
	if err := d.open(); err != nil {
		if block.Errno(err) == 0 {
			return fmt.Errorf("open: %w", err)
		}
		return nil
	}
	size := d.m.Size()
	for _, ops := range l.batches() {
		if o := ops[0]; o.ranged() && o.Off+o.Len > size || o.Kind == Compressed || o.Kind == Reopen {
			continue
		}
		var fit []Op
		for _, o := range ops {
			if !o.ranged() || o.Off+o.Len <= size {
				fit = append(fit, o)
			}
		}
		if err := d.do(fit, nil); err != nil && block.Errno(err) == 0 && !errors.Is(err, errCorruptData) {
			return err
		}
		if size = d.m.Size(); size > 1<<40 {
			return nil
		}
	}
	if err := d.m.Close(); err != nil && block.Errno(err) == 0 {
		return fmt.Errorf("close: %w", err)
	}
	return nil
}
