// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/node/null"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/virtqtest"
)

// stepRig is a loop that the test turns by hand, and plays every guest between two turns, so that turns can be counted.
type stepRig struct {
	t     *testing.T
	loop  *aio.Loop
	mem   *virtqtest.Memory
	table *guestmem.Map
	turns int
}

func newStepRig(t *testing.T, kind aio.PollerKind) *stepRig {
	t.Helper()
	l, err := aio.NewLoop(&aio.LoopOptions{Poller: kind})
	if errors.Is(err, aio.ErrNotSupported) {
		t.Skipf("no such loop on this kernel: %v", err)
	}
	must(t, err)
	t.Cleanup(func() { must(t, l.Close()) })
	_, err = l.Fd()
	must(t, err)
	runtime.LockOSThread() // a ring's polls are the thread's that armed them
	t.Cleanup(runtime.UnlockOSThread)
	s := &stepRig{t: t, loop: l}
	s.mem, err = virtqtest.NewMemory(1<<30, 64<<20)
	must(t, err)
	t.Cleanup(func() { must(t, s.mem.Close()) })
	s.table, err = guestmem.NewMap([]guestmem.Region{s.mem.Region()})
	must(t, err)
	t.Cleanup(s.table.Release)
	return s
}

// turn is one turn of the loop.
func (s *stepRig) turn() {
	s.t.Helper()
	_, err := s.loop.Prepare()
	must(s.t, err)
	must(s.t, s.loop.Dispatch())
	s.turns++
}

// call does what waits for the loop, while it turns.
func (s *stepRig) call(f func() error) {
	s.t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	for {
		select {
		case err := <-done:
			must(s.t, err)
			return
		default:
			s.turn()
		}
	}
}

// disk is a disk on the loop with a queue for each size, and their drivers.
func (s *stepRig) disk(n block.Node, sizes ...uint16) (queues []*rigQueue) {
	s.t.Helper()
	h := block.NewHandle(n, nil)
	s.t.Cleanup(func() { must(s.t, h.Close()) })
	r := &rig{t: s.t, loop: s.loop, mem: s.mem, table: s.table}
	s.call(func() (err error) {
		r.dev, err = New(h, &Options{Queues: len(sizes), Loops: []*aio.Loop{s.loop}})
		return err
	})
	s.t.Cleanup(func() { s.call(r.dev.Close) })
	s.call(func() error { return r.dev.SetFeatures(r.dev.Features()) })
	for i, size := range sizes {
		d, err := virtqtest.NewDriver(s.mem, virtqtest.DriverConfig{Size: size, EventIdx: true, Indirect: true, TableSize: 4})
		must(s.t, err)
		q := &rigQueue{rig: r, index: i, d: d}
		q.kick, err = sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
		must(s.t, err)
		q.call, err = sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
		must(s.t, err)
		s.call(func() error { return r.dev.StartQueue(q.vring(0, true)) })
		s.t.Cleanup(func() {
			s.call(func() error { _, err := r.dev.StopQueue(i); return err })
			must(s.t, errors.Join(sys.Close(q.kick), sys.Close(q.call)))
		})
		queues = append(queues, q)
	}
	return queues
}

// fill puts reads into the ring until depth are out, by the same request again and again.
func (q *rigQueue) fill(req *request, depth int) {
	q.rig.t.Helper()
	for q.d.Out() < depth {
		q.add(req)
	}
	q.ring()
}

// taken empties the used ring and tells how many were in it.
func (q *rigQueue) taken() (n int) {
	q.rig.t.Helper()
	for {
		if _, _, ok := q.d.Used(); !ok {
			must(q.rig.t, q.d.Err())
			return n
		}
		n++
	}
}

// Goal: a guest that always keeps its ring full takes no more than its share from one that sends a request at a time, on
// another disk of the same loop or on another queue of the same disk. Method: the loop is turned by hand, both rings are filled between the turns, and what the
// greedy one is served between a request of the modest one and its answer is counted.
//
// The bound: a loop with work at hand asks its poller each ninth time at the latest (one that is turned by hand does each
// time), so a kick is seen after 9 turns and answered within the next. In each turn the greedy one gets one share.
func TestModestGuestIsServedBesideAGreedyOne(t *testing.T) {
	nodes := map[string]func() block.Node{
		"null":   func() block.Node { return null.New(null.Options{Size: diskSize}) },
		"memory": func() block.Node { return memDisk(t, mem.Options{}) },
	}
	for _, kind := range []aio.PollerKind{aio.PollerIOUring, aio.PollerEpoll} {
		for name, node := range nodes {
			t.Run(fmt.Sprintf("%v/%s/two disks", kind, name), func(t *testing.T) {
				s := newStepRig(t, kind)
				s.compete(s.disk(node(), 1024)[0], s.disk(node(), 256)[0])
			})
			t.Run(fmt.Sprintf("%v/%s/two queues", kind, name), func(t *testing.T) {
				s := newStepRig(t, kind)
				queues := s.disk(node(), 1024, 256)
				s.compete(queues[0], queues[1])
			})
		}
	}
}

// compete is the method of TestModestGuestIsServedBesideAGreedyOne.
func (s *stepRig) compete(greedy, modest *rigQueue) {
	const turnsMax, rounds = 10, 200
	t := s.t
	big, small := greedy.rig.standard(virtioblk.TypeIn, 0, 4096), modest.rig.standard(virtioblk.TypeIn, 8, 4096)
	served, turnsWorst, servedWorst := 0, 0, 0
	for range rounds {
		greedy.fill(big, 1024)
		modest.fill(small, 1)
		began, before := s.turns, served
		for modest.taken() == 0 {
			if s.turns-began > 10*turnsMax {
				t.Fatalf("no answer in %d turns", s.turns-began)
			}
			s.turn()
			served += greedy.taken()
			greedy.fill(big, 1024)
		}
		turnsWorst = max(turnsWorst, s.turns-began)
		servedWorst = max(servedWorst, served-before)
	}
	t.Logf("at most %d turns and %d requests of the other guest for one request; %d in all", turnsWorst, servedWorst, served)
	if turnsWorst > turnsMax {
		t.Errorf("an answer took %d turns, want at most %d", turnsWorst, turnsMax)
	}
	if most := turnsMax * turnShare; servedWorst > most {
		t.Errorf("%d requests of the greedy guest were served meanwhile, want at most %d", servedWorst, most)
	}
	if served < rounds*firstShare {
		t.Errorf("the greedy guest got only %d requests: it was held up", served)
	}
}

// Goal: a ring that holds more than a turn's share costs no kick and no sleep. Method: one kick for a ring of 1024, and the
// turns until all are answered.
func TestMoreThanAShareIsTakenInTheNextTurns(t *testing.T) {
	s := newStepRig(t, aio.PollerAuto)
	q := s.disk(null.New(null.Options{Size: diskSize}), 1024)[0]
	q.fill(q.rig.standard(virtioblk.TypeIn, 0, 4096), 1000)
	began, served, most := s.turns, 0, 0
	for served < 1000 {
		if s.turns-began > 20 {
			t.Fatalf("%d of 1000 were answered in %d turns", served, s.turns-began)
		}
		s.turn()
		n := q.taken()
		served, most = served+n, max(most, n)
	}
	if most > turnShare {
		t.Errorf("%d requests were answered in one turn, want at most %d", most, turnShare)
	}
	// What comes after it needs a kick again, and is served.
	q.fill(q.rig.standard(virtioblk.TypeIn, 0, 4096), 1)
	for began = s.turns; q.taken() == 0; s.turn() {
		if s.turns-began > 20 {
			t.Fatal("the next request was not answered")
		}
	}
}
