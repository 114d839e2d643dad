// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
)

// The goal: whichever operation of the store fails, once or for ever, the guest gets an error, the image has leaks at
// worst, what was flushed is there, and when the store works again so does the image.
//
// The method: the same operations again and again, and each time another call of the store fails.

// failing runs operations of which the n-th call of the store fails, and looks. It is false when there were not so many calls.
func failing(t *testing.T, sh shape, seed uint64, n, steps int, forEver bool, with error) bool {
	r := rand.New(rand.NewPCG(seed, 7))
	st := newStory(t, sh)
	st.s.logged = false
	s := st.s
	m := mustOpen(t, s, &sh.open)
	g := newGuest(m, s)
	g.log = st.log
	first := newKnowledge(append([]byte(nil), g.disk...))
	s.calls, s.failAt, s.failOn, s.failWith, s.tear = 0, n, forEver, with, r
	where := fmt.Sprintf("%s, seed %d, call %d fails, for ever %v", sh.name, seed, n, forEver)
	fatal := func(format string, args ...any) {
		t.Helper()
		t.Fatalf("%s: %s\n%s", where, fmt.Sprintf(format, args...), tail(st.ops))
	}
	var names []string
	unsure := false
	for i := range steps {
		var op string
		var err error
		if r.IntN(100) < 6 && sh.o.Version != 2 && sh.o.RefcountBits != 1 && !unsure {
			op, err = st.snapshotStep(g, r, i, &names)
		} else {
			op, err = g.step(r)
		}
		if err != nil { // how much was done is not told: a snapshot keeps what there is
			names = nil
			unsure = g.read(g.disk, 0) != nil
		}
		st.ops = append(st.ops, fmt.Sprintf("%s: %v", op, err))
		if err != nil && !errors.Is(err, syscall.EIO) && !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.ENOENT) {
			fatal("%s: %v", op, err)
		}
	}
	reached := s.calls >= n
	s.failAt = 0
	if err := surveys(st, s.clone(), first); err != nil {
		fatal("as by a crash: %v", err)
	}
	if m.broken != nil {
		fatal("image was marked corrupt: %v", m.broken)
	}
	// The store works again: so does the image.
	g.disk = make([]byte, m.Size())
	if err := g.read(g.disk, 0); err != nil {
		fatal("read: %v", err)
	}
	for range 10 {
		if op, err := g.step(r); err != nil {
			fatal("afterwards %s: %v", op, err)
		}
	}
	g.verify(t)
	if err := m.Close(); err != nil {
		fatal("close: %v", err)
	}
	c, err := check.Run(s, &check.Options{})
	if err != nil || c.Corruptions+c.CheckErrors > 0 && !m.on.h.IsDirty() {
		fatal("check after closing: %+v %v", c, err)
	}
	if p, err := readAll(s); err != nil || firstDifference(p, g.disk) >= 0 {
		fatal("disk differs at %#x after closing: %v", firstDifference(p, g.disk), err)
	}
	return reached
}

// surveys opens a copy of the image as after a crash, and compares it with what is known.
func surveys(st *story, s *memStore, k *knowledge) error {
	for _, d := range st.log.told {
		if d.snap == "" && d.gone == "" {
			k.learn(d)
		}
	}
	c, err := check.Run(s, &check.Options{})
	if err != nil {
		return err
	}
	m, err := Open(s, &Options{ReadOnly: true})
	if err != nil {
		return err
	}
	if c.Corruptions+c.CheckErrors > 0 && !m.Header().IsDirty() {
		return fmt.Errorf("check: %+v", c)
	}
	m.snapshots = nil
	return k.compare(s, m)
}

func TestAnErrorOfTheStoreIsSurvived(t *testing.T) {
	for _, sh := range shapes() {
		t.Run(sh.name, func(t *testing.T) {
			for seed := range uint64(soak(1)) {
				for n := 1; ; n += 1 + n/10 {
					more := failing(t, sh, seed, n, 60, false, nil)
					failing(t, sh, seed, n, 60, true, nil)
					failing(t, sh, seed, n, 60, true, syscall.ENOSPC)
					if !more || t.Failed() {
						break
					}
				}
			}
		})
	}
}

// forgetful is a file as systems have them: when a flush fails, what it was to make durable is lost, although it can still
// be read, and the next flush says that all is well.
type forgetful struct {
	*memStore
	disk    []byte
	pending []event
	r       *rand.Rand
	fails   int // percent of flushes
}

func (f *forgetful) Write(p []byte, off int64) error {
	f.pending = append(f.pending, event{off, append([]byte{}, p...)})
	return f.memStore.Write(p, off)
}

func (f *forgetful) Flush() error {
	pending := f.pending
	f.pending = nil
	if f.r.IntN(100) < f.fails {
		return errInjected
	}
	for _, e := range pending {
		f.disk = putAt(f.disk, e.data, e.off)
	}
	return f.memStore.Flush()
}

// whole is what the disk has, as long as the file is: its length is not forgotten.
func (f *forgetful) whole() []byte {
	b := make([]byte, len(f.data))
	copy(b, f.disk)
	return b
}

// TestTablesAreWholeAfterFlushesThatForget: guest data of a flush that failed may be lost, as the guest was told; tables are
// not, once a later flush has succeeded.
func TestTablesAreWholeAfterFlushesThatForget(t *testing.T) {
	for _, sh := range shapes() {
		t.Run(sh.name, func(t *testing.T) {
			for seed := range uint64(soak(8)) {
				s := newImage(t, &sh)
				r := rand.New(rand.NewPCG(seed, 13))
				f := &forgetful{memStore: s, disk: append([]byte(nil), s.data...), r: r}
				o := sh.open
				o.NoDiscard = true
				m := mustOpen(t, f, &o)
				g := newGuest(m, f)
				for range 6 {
					f.fails = 40
					for range 12 {
						_, _ = g.step(r)
					}
					f.fails = 0
					must(t, m.Commit())
					var found []string
					c, err := check.Run(&memStore{data: f.whole()}, &check.Options{Report: func(x check.Finding) { found = append(found, x.Text) }})
					if err != nil || c.Corruptions+c.CheckErrors > 0 && !m.h.IsLazy() {
						t.Fatalf("seed %d: %v\n%s", seed, err, tail(found))
					}
				}
			}
		})
	}
}

// TestCopiesOfTablesAreWholeAfterFlushesThatForget: an L2 table that a snapshot shared was copied, and the copy forgotten.
func TestCopiesOfTablesAreWholeAfterFlushesThatForget(t *testing.T) {
	for _, sh := range shapes() {
		if sh.o.RefcountBits == 1 || sh.o.LazyRefcounts {
			continue
		}
		t.Run(sh.name, func(t *testing.T) {
			s := newImage(t, &sh)
			f := &forgetful{memStore: s, disk: append([]byte(nil), s.data...), r: rand.New(rand.NewPCG(1, 14))}
			o := sh.open
			o.NoDiscard = true
			m := mustOpen(t, f, &o)
			g := newGuest(m, f)
			g.mustWrite(t, 0, m.Size())
			_, err := m.CreateSnapshot(SnapshotInfo{})
			must(t, err)
			f.fails = 100
			g.mustWrite(t, 0, 512)
			if m.Commit() == nil {
				t.Fatal("commit succeeded although its flush failed")
			}
			f.fails = 0
			must(t, m.Commit())
			got, err := readAll(&memStore{data: f.whole()})
			must(t, err)
			cluster := m.g.ClusterSize // its data were lost, as the guest was told
			if i := firstDifference(got[cluster:], g.disk[cluster:]); i >= 0 {
				t.Errorf("disk differs at %#x", int64(i)+cluster)
			}
		})
	}
}
