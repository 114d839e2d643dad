// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
)

// The goal: wherever the power fails, the image has leaked clusters at worst, everything that was flushed is there, and
// of what was not flushed each sector is what it was or what somebody wrote to it, never anything else.
//
// The method: a store logs each write, discard (as rubbish) and flush of a run of random operations. A crash is a place in
// the log; what was written before the last flush before it is on the disk, and of what was written since any sectors
// may be. Such disks are made and looked at: at every flush with nothing, with everything, and with many random choices.

// story is what a run did, by places in the log.
type story struct {
	sh    shape
	s     *memStore
	start []byte // the file when the log began
	log   *diary
	ops   []string
}

func newStory(t testing.TB, sh shape) *story {
	st := &story{sh: sh, s: newImage(t, &sh)}
	st.s.logged = true
	st.start = append([]byte(nil), st.s.data...)
	st.log = &diary{place: func() int { return len(st.s.log) }}
	return st
}

// record is the story of one user after the other.
func record(t testing.TB, sh shape, seed uint64, steps int) *story {
	r := rand.New(rand.NewPCG(seed, 2))
	st := newStory(t, sh)
	m := mustOpen(t, st.s, &sh.open)
	g := newGuest(m, st.s)
	g.log = st.log
	var names []string
	for i := range steps {
		var op string
		var err error
		if k := r.IntN(100); k < 4 && sh.o.Version != 2 && sh.o.RefcountBits != 1 {
			op, err = st.snapshotStep(g, r, i, &names)
		} else {
			op, err = g.step(r)
		}
		st.ops = append(st.ops, op)
		if err != nil {
			t.Fatalf("seed %d: %s: %v\n%s", seed, op, err, tail(st.ops))
		}
		if i%97 == 96 {
			if err := m.Close(); err != nil {
				t.Fatal(err)
			}
			st.flushed()
			m = mustOpen(t, st.s, &sh.open)
			g.m = m
		}
	}
	g.verify(t)
	return st
}

// flushed notes that everything is durable.
func (st *story) flushed() { st.log.add(&deed{}) }

// snapshotStep makes, applies or deletes a snapshot.
func (st *story) snapshotStep(g *guest, r *rand.Rand, i int, names *[]string) (op string, err error) {
	defer func() {
		if err == nil {
			st.flushed()
		}
	}()
	switch k := r.IntN(3); {
	case k == 0 || len(*names) == 0:
		name := fmt.Sprintf("s%d", i)
		op, err := st.makeSnapshot(g, name)
		if err == nil {
			*names = append(*names, name)
		}
		return op, err
	case k == 1:
		name := (*names)[r.IntN(len(*names))]
		var p []byte
		for _, d := range st.log.told {
			if d.snap == name {
				p = d.p
			}
		}
		d := st.log.add(&deed{p: p})
		copy(g.disk, p)
		if err := g.m.ApplySnapshot(name); err != nil {
			return "snapshot apply " + name, err
		}
		st.log.end(d)
		return "snapshot apply " + name, nil
	default:
		i := r.IntN(len(*names))
		name := (*names)[i]
		*names = slices.Delete(*names, i, i+1)
		st.log.add(&deed{gone: name})
		return "snapshot delete " + name, g.m.DeleteSnapshot(name)
	}
}

func (st *story) makeSnapshot(g *guest, name string) (string, error) {
	st.log.add(&deed{snap: name, p: g.disk})
	if _, err := g.m.CreateSnapshot(SnapshotInfo{Name: name}); err != nil {
		return "snapshot " + name, err
	}
	st.log.add(&deed{snap: name, p: g.disk, done: 1})
	return "snapshot " + name, nil
}

// tail is the last operations of a list: those before can be made again from the seed.
func tail(ops []string) string { return strings.Join(ops[max(0, len(ops)-40):], "\n") }

// knowledge is what a disk may and must hold after a crash.
type knowledge struct {
	allowed [][]value // of each sector, in the order of beginning
	snaps   map[string][]byte
	sure    map[string]bool
}

type value struct {
	p []byte
	d *deed // that wrote it; nil was there from the beginning
}

func newKnowledge(disk []byte) *knowledge {
	k := &knowledge{snaps: make(map[string][]byte), sure: make(map[string]bool)}
	for at := 0; at < len(disk); at += 512 {
		k.allowed = append(k.allowed, []value{{p: disk[at : at+512]}})
	}
	return k
}

func (k *knowledge) learn(d *deed) {
	switch {
	case d.snap != "":
		k.snaps[d.snap] = d.p
		k.sure[d.snap] = d.done != 0
	case d.gone != "":
		k.sure[d.gone] = false
	case d.p == nil:
		for i, a := range k.allowed {
			last := len(a) - 1
			for last > 0 && (a[last].d.done == 0 || a[last].d.done > d.since) {
				last--
			}
			k.allowed[i] = a[last:]
		}
	default:
		for at := int64(0); at < int64(len(d.p)); at += 512 {
			i := (d.off + at) / 512
			k.allowed[i] = append(k.allowed[i], value{d.p[at : at+512], d})
		}
	}
}

// crashes makes disks for one log, and looks at them. It tells how many they were.
func (st *story) crashes(t *testing.T, seed uint64, perFlush int) int {
	r := rand.New(rand.NewPCG(seed, 3))
	disk, err := readAll(&memStore{data: st.start})
	if err != nil {
		t.Fatal(err)
	}
	k := newKnowledge(disk)
	base := append([]byte(nil), st.start...)
	n, told, since := 0, 0, 0
	for at := 0; at <= len(st.s.log); at++ {
		flush := at == len(st.s.log) || st.s.log[at].data == nil
		if !flush {
			continue
		}
		// A crash at any place from the last flush on to this one.
		for v := range perFlush {
			to := at
			if v > 1 && at > since {
				to = since + r.IntN(at-since+1)
			}
			for told < len(st.log.told) && st.log.told[told].at <= to && v == 0 {
				k.learn(st.log.told[told])
				told++
			}
			disk := st.disk(base, st.s.log[since:to], v, r)
			n++
			if !st.look(t, disk, k, n, fmt.Sprintf("crash %d of seed %d, before event %d, choice %d", n, seed, to, v)) {
				return n
			}
		}
		for _, e := range st.s.log[since:at] {
			base = putAt(base, e.data, e.off)
		}
		since = at + 1
	}
	return n
}

// disk is what a crash leaves: choice 0 has all that was written since the last flush, 1 nothing, others some sectors.
func (st *story) disk(base []byte, since []event, choice int, r *rand.Rand) *memStore {
	data := append(make([]byte, 0, len(base)+4096), base...)
	survive := []int{100, 0, 50, 10, 90}[choice%5]
	for _, e := range since {
		whole := r.IntN(2) == 0
		if whole && r.IntN(100) >= survive {
			continue
		}
		for at := 0; at < len(e.data); {
			n := min(512-int(e.off+int64(at))&511, len(e.data)-at)
			if whole || r.IntN(100) < survive {
				data = putAt(data, e.data[at:at+n], e.off+int64(at))
			}
			at += n
		}
	}
	return &memStore{data: data}
}

// look is what must hold of a disk after a crash. It reports what does not, and tells whether to go on.
func (st *story) look(t *testing.T, s *memStore, k *knowledge, n int, where string) bool {
	t.Helper()
	fail := func(format string, args ...any) bool {
		t.Errorf("%s: %s\nimage: %s\n%s", where, fmt.Sprintf(format, args...), s.save(t), tail(st.ops))
		return false
	}
	m, err := Open(s, &Options{ReadOnly: true})
	if err != nil {
		return fail("open: %v", err)
	}
	var found []string
	c, err := check.Run(s, &check.Options{Report: func(f check.Finding) { found = append(found, f.Text) }})
	if err != nil {
		return fail("check: %v", err)
	}
	if (c.Corruptions > 0 || c.CheckErrors > 0) && !m.Header().IsDirty() {
		return fail("check: %+v\n%s", c, strings.Join(found, "\n"))
	}
	if err := k.compare(s, m); err != nil {
		return fail("%v", err)
	}
	if n%8 == 0 || m.Header().IsDirty() {
		if err := st.goOn(s, k); err != nil {
			return fail("go on: %v", err)
		}
	}
	if n%1000 == 0 && havePeer() {
		wantClean(t, s, true, true)
	}
	return true
}

// compare reads the disk and the snapshots.
func (k *knowledge) compare(s *memStore, m *Image) error {
	g := &guest{m: m, s: s}
	p := make([]byte, m.Size())
	if err := g.read(p, 0); err != nil {
		return err
	}
	for i, allowed := range k.allowed {
		sector := p[i*512 : i*512+512]
		if !slices.ContainsFunc(allowed, func(v value) bool { return bytes.Equal(v.p, sector) }) {
			return fmt.Errorf("sector %#x is % x, none of %d that it may be (last % x)", i*512, sector[:16], len(allowed), allowed[len(allowed)-1].p[:16])
		}
	}
	listed := make(map[string]bool)
	for _, sn := range m.Snapshots() {
		listed[sn.Name] = true
		v, err := m.OpenSnapshot(sn.ID)
		if err != nil {
			return err
		}
		if err := (&guest{m: v, s: s}).read(p, 0); err != nil {
			return err
		}
		if i := firstDifference(p, k.snaps[sn.Name]); i >= 0 {
			return fmt.Errorf("snapshot %s differs at %#x", sn.Name, i)
		}
	}
	for name, sure := range k.sure {
		if sure && !listed[name] {
			return fmt.Errorf("snapshot %s is gone", name)
		}
	}
	return nil
}

// goOn opens the image for writing, as one would after a crash, writes, closes, and repairs what leaked.
func (st *story) goOn(s *memStore, k *knowledge) error {
	o := st.sh.open
	m, err := Open(s, &o)
	if err != nil {
		return err
	}
	if err := k.compare(s, m); err != nil {
		return fmt.Errorf("opened for writing: %w", err)
	}
	g := &guest{m: m, s: s, disk: make([]byte, m.Size())}
	if err := g.read(g.disk, 0); err != nil {
		return err
	}
	r := rand.New(rand.NewPCG(uint64(len(s.data)), 4))
	for range 4 {
		if op, err := g.step(r); err != nil {
			return fmt.Errorf("%s: %w", op, err)
		}
	}
	if err := m.Close(); err != nil {
		return err
	}
	if c, err := check.Run(s, &check.Options{Repair: check.Leaks}); err != nil || c.Corruptions+c.CheckErrors+c.Leaks > 0 {
		return fmt.Errorf("check after writing: %+v %v", c, err)
	}
	p, err := readAll(s)
	if i := firstDifference(p, g.disk); err != nil || i >= 0 {
		return fmt.Errorf("disk differs at %#x after writing: %v", i, err)
	}
	return nil
}

func TestACrashLeavesLeaksAtWorst(t *testing.T) {
	total := 0
	for _, sh := range shapes() {
		t.Run(sh.name, func(t *testing.T) {
			for seed := range uint64(soak(2)) {
				st := record(t, sh, seed, 120)
				total += st.crashes(t, seed, 9)
				if t.Failed() {
					return
				}
			}
		})
	}
	t.Logf("%d crash points", total)
	if total < 10000 && !t.Failed() && !testing.Short() && !raced {
		t.Errorf("%d crash points, want at least 10000", total)
	}
}
