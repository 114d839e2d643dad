// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"fmt"
	"iter"
	"math/rand/v2"
	"testing"
)

// world runs coroutines, one at a time, in an order that a seed decides: at each operation of the store, and where one
// waits for another, any that can go on may be next.
type world struct {
	r     *rand.Rand
	tasks []*task
	cur   *task
	now   int // turns so far
}

type task struct {
	next  func() (struct{}, bool)
	yield func(struct{}) bool
	ready func() bool
	until int // asleep until this turn: some operations take long
	done  bool
}

func newWorld(seed uint64) *world { return &world{r: rand.New(rand.NewPCG(seed, 5))} }

func (w *world) spawn(fn func()) {
	t := &task{}
	next, stop := iter.Pull(func(yield func(struct{}) bool) {
		t.yield = yield
		fn()
	})
	t.next = next
	_ = stop // every task is run to its end
	w.tasks = append(w.tasks, t)
}

// turn gives way, now and then for long.
func (w *world) turn() {
	if w.cur != nil {
		if w.r.IntN(12) == 0 {
			w.cur.until = w.now + w.r.IntN(200)
		}
		w.cur.yield(struct{}{})
	}
}

// Wait implements Waiter.
func (w *world) Wait(ready func() bool) {
	w.cur.ready = ready
	w.cur.yield(struct{}{})
}

// run goes on until all tasks are done. It is false when all that are left wait.
func (w *world) run() bool {
	for {
		var can, awake []*task
		left := false
		for _, t := range w.tasks {
			if !t.done {
				left = true
				if t.ready == nil || t.ready() {
					can = append(can, t)
					if t.until <= w.now {
						awake = append(awake, t)
					}
				}
			}
		}
		w.now++
		if len(awake) > 0 {
			can = awake
		}
		if !left {
			w.tasks = nil
			return true
		}
		if len(can) == 0 {
			return false
		}
		t := can[w.r.IntN(len(can))]
		t.ready, w.cur = nil, t
		if _, more := t.next(); !more {
			t.done = true
		}
		w.cur = nil
	}
}

// reserved keeps the deeds of different users apart by sectors, so that the outcome is known; clusters they share.
type reserved struct{ sectors map[int64]bool }

func (v *reserved) take(off, n int64) bool {
	for s := off / 512; s < (off+n+511)/512; s++ {
		if v.sectors[s] {
			return false
		}
	}
	for s := off / 512; s < (off+n+511)/512; s++ {
		v.sectors[s] = true
	}
	return true
}

func (v *reserved) give(off, n int64) {
	for s := off / 512; s < (off+n+511)/512; s++ {
		delete(v.sectors, s)
	}
}

// user is one of several that use an image at the same time.
func user(g *guest, r *rand.Rand, v *reserved, steps int, note func(string), fail func(error)) {
	size, cluster := g.m.Size(), g.m.Geometry().ClusterSize
	for range steps {
		off := r.Int64N(size/512) * 512
		if r.IntN(2) == 0 {
			off %= min(size, 4*cluster) // so that they meet
		}
		n := min(size-off, (1+r.Int64N(1+r.Int64N(16)))*512)
		kind := r.IntN(100)
		if kind >= 70 && kind < 90 { // whole clusters
			off &^= cluster - 1
			n = min(size-off, (1+r.Int64N(3))*cluster)
		}
		if kind < 90 && !v.take(off, n) {
			continue
		}
		var err error
		switch {
		case kind < 60:
			note(fmt.Sprintf("write %#x %#x", off, n))
			err = g.write(g.fill(off, n), off)
		case kind < 70:
			note(fmt.Sprintf("zero %#x %#x", off, n))
			err = g.zero(off, n, kind&1 == 0)
		case kind < 85:
			note(fmt.Sprintf("discard %#x %#x", off, n))
			err = g.discard(off, n)
		case kind < 90:
			note(fmt.Sprintf("compress %#x", off))
			v.give(off, n)
			n = min(size-off, cluster)
			if v.take(off, n) {
				err = g.compress(off)
			}
		default:
			note("flush")
			err = g.flush()
		}
		if kind < 90 {
			v.give(off, n)
		}
		if err != nil {
			fail(err)
			return
		}
	}
}

// recordTogether is the story of several users at the same time.
func recordTogether(t testing.TB, sh shape, seed uint64, users, rounds, steps int) *story {
	w := newWorld(seed)
	st := newStory(t, sh)
	o := sh.open
	o.Waiter = w
	m := mustOpen(t, st.s, &o)
	st.s.turn = w.turn
	g := newGuest(m, st.s)
	g.log = st.log
	fatal := func(format string, args ...any) {
		t.Fatalf("seed %d: %s\n%s", seed, fmt.Sprintf(format, args...), tail(st.ops))
	}
	for round := range rounds {
		if round > 0 && sh.o.Version != 2 && sh.o.RefcountBits != 1 {
			w.spawn(func() { // what is written from here on moves
				if op, err := st.makeSnapshot(g, fmt.Sprintf("r%d", round)); err != nil {
					t.Errorf("%s: %v", op, err)
				}
				st.flushed()
			})
			if !w.run() {
				fatal("a snapshot waits")
			}
		}
		v := &reserved{make(map[int64]bool)}
		for i := range users {
			r := rand.New(rand.NewPCG(seed, uint64(i)+10))
			w.spawn(func() {
				user(g, r, v, steps, func(op string) { st.ops = append(st.ops, fmt.Sprintf("%d: %s", i, op)) },
					func(err error) { t.Errorf("user %d: %v", i, err) })
			})
		}
		if !w.run() {
			fatal("all wait")
		}
		if t.Failed() {
			fatal("failed")
		}
		g.verify(t)
		if t.Failed() {
			fatal("failed")
		}
	}
	if err := m.Close(); err != nil {
		fatal("%v", err)
	}
	st.flushed()
	wantClean(t, st.s, false, false)
	if m.pending != 0 {
		fatal("%d clusters are still to be freed", m.pending)
	}
	return st
}

// TestUsersTogetherGiveTheDiskThatTheyOught lets coroutines write, zero, discard and flush the same clusters (not the
// same sectors) in many orders.
func TestUsersTogetherGiveTheDiskThatTheyOught(t *testing.T) {
	for _, sh := range shapes() {
		t.Run(sh.name, func(t *testing.T) {
			for seed := range uint64(soak(12)) {
				recordTogether(t, sh, seed, 2+int(seed)%7, 3, 25)
			}
		})
	}
}

// TestUsersWhoRaceSpoilNothingElse lets users write, zero, discard, compress and read the same sectors at the same time. What
// they find there is up to the order, but it is always something of this place; and the image stays without a fault.
func TestUsersWhoRaceSpoilNothingElse(t *testing.T) {
	for _, sh := range shapes() {
		t.Run(sh.name, func(t *testing.T) {
			for seed := range uint64(soak(12)) {
				race(t, sh, seed+1000)
			}
		})
	}
}

func race(t *testing.T, sh shape, seed uint64) {
	w := newWorld(seed)
	sh.o.Size = min(sh.o.Size, 12*max(sh.o.ClusterSize, 64*kib/12))
	s := newImage(t, &sh)
	o := sh.open
	o.Waiter = w
	m := mustOpen(t, s, &o)
	s.turn = w.turn
	g := newGuest(m, s)
	writers := 4
	for i := range 2 * writers {
		r := rand.New(rand.NewPCG(seed, uint64(i)+10))
		reads := i >= 4
		w.spawn(func() {
			if !reads {
				defer func() { writers-- }()
			}
			for k := 0; k < 40 || reads && writers > 0; k++ {
				w.turn()
				if err := g.stepOrRead(r, reads); err != nil {
					t.Errorf("seed %d: user %d: %v", seed, i, err)
					return
				}
			}
		})
	}
	if !w.run() {
		t.Fatalf("seed %d: all wait", seed)
	}
	p := make([]byte, m.Size())
	if err := g.read(p, 0); err != nil {
		t.Fatal(err)
	}
	if err := g.sane(p, 0); err != nil {
		t.Fatalf("seed %d: %v", seed, err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	wantClean(t, s, false, false)
}

// stepOrRead is a step, or a read.
func (g *guest) stepOrRead(r *rand.Rand, reads bool) error {
	if reads {
		off := r.Int64N(g.m.Size()/512) * 512
		p := make([]byte, min(g.m.Size()-off, 8192))
		if err := g.read(p, off); err != nil {
			return err
		}
		return g.sane(p, off)
	}
	op, err := g.step(r)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// TestACrashAmongUsersLeavesLeaksAtWorst looks at the disks that a crash leaves in the middle of that.
func TestACrashAmongUsersLeavesLeaksAtWorst(t *testing.T) {
	total := 0
	for _, sh := range shapes() {
		t.Run(sh.name, func(t *testing.T) {
			for seed := range uint64(soak(2)) {
				st := recordTogether(t, sh, seed+100, 4, 2, 30)
				total += st.crashes(t, seed, 4)
				if t.Failed() {
					return
				}
			}
		})
	}
	t.Logf("%d crash points", total)
}
