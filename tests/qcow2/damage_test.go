// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
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
		b, err := newBed(root, l)
		if err != nil {
			t.Fatal(err)
		}
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
