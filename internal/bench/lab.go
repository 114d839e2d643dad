// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"runtime"
	"time"
)

// Setup is the work and the medium of an experiment, before it is known what is installed where.
type Setup struct {
	Medium  string // null, shm or disk
	RW      string
	Depth   int
	Queues  int      // each with a driver's thread; 0: 1
	Batch   bool     // ours twice: with batching and without
	Alone   bool     // ours only
	Series  string   // what it belongs to, for its title; empty: nothing
	Engines []string // ours with each of these, on one loop and on as many loops as queues; none: as it chooses itself
}

func (s *Setup) queues() int { return max(s.Queues, 1) }

// Title is the setup for people.
func (s *Setup) Title() string {
	title := fmt.Sprintf("%s, 4k %s, depth %d", mediumTitle(s.Medium), s.RW, s.Depth)
	if s.queues() > 1 {
		title += fmt.Sprintf(", %d queues", s.Queues)
	}
	if s.Batch && s.Alone {
		title += ", batching on and off"
	}
	if s.Series != "" {
		title = "Series " + s.Series + ": " + title
	}
	return title
}

func mediumTitle(medium string) string {
	if medium == "shm" {
		return "/dev/shm"
	}
	return medium
}

// ID is the setup in one word.
func (s *Setup) ID() string {
	id := fmt.Sprintf("%s-%s-%d", s.Medium, s.RW, s.Depth)
	if s.queues() > 1 {
		id += fmt.Sprintf("-q%d", s.Queues)
	}
	if s.Batch && s.Alone {
		id += "-batch"
	}
	if s.Series != "" {
		id = "series" + s.Series + "-" + id
	}
	return id
}

// Lab is what is installed where: it makes experiments of setups.
type Lab struct {
	Program   string   // ours
	More      []string // further arguments of serve
	Keys      []string // further keys of its disk
	Peer      string   // the program; empty: none
	PeerAIO   []string
	PeerLoops []string          // main, iothread
	Fio       string            // empty: none
	Media     map[string]Medium // by the names in setups
	Runtime   time.Duration
	RampTime  time.Duration
}

// Experiment is a setup with all its subjects.
func (l *Lab) Experiment(s Setup, bounds []Bound) (Experiment, error) {
	m, ok := l.Media[s.Medium]
	if !ok {
		return Experiment{}, fmt.Errorf("no medium %q is at hand", s.Medium)
	}
	e := Experiment{ID: s.ID(), Title: s.Title(), Medium: m, Bounds: bounds, Workload: Workload{
		RW: s.RW, IODepth: s.Depth, NumJobs: s.queues(), Runtime: l.Runtime, RampTime: l.RampTime}}
	e.Workload.Defaults()
	for _, o := range l.ours(&s) {
		e.Subjects = append(e.Subjects, o.Subject(m, s.queues()))
	}
	if s.Alone {
		return e, nil
	}
	if l.Peer != "" {
		for _, p := range Configurations(l.Peer, m, l.PeerAIO, l.PeerLoops) {
			e.Subjects = append(e.Subjects, p.Subject(m, s.queues()))
		}
	}
	if l.Fio != "" && m.Path != "" {
		for _, f := range Fios(l.Fio, &e.Workload) {
			e.Subjects = append(e.Subjects, f.Subject(m, &e.Workload))
		}
	}
	return e, nil
}

// ours are the servers of ours in a setup; the first is the one that verdicts are on.
func (l *Lab) ours(s *Setup) (list []Sluice) {
	one := Sluice{Program: l.Program, More: l.More, Keys: l.Keys}
	own := min(s.queues(), max(runtime.NumCPU(), 2))
	switch {
	case len(s.Engines) > 0:
		for _, engine := range s.Engines {
			for _, loops := range []int{1, own} {
				one.Engine, one.Loops = engine, loops
				list = append(list, one)
			}
		}
	case s.Batch:
		for _, batch := range []string{"on", "off"} {
			one.Batch = batch
			list = append(list, one)
		}
	case s.queues() > 1:
		for _, loops := range []int{own, 1} {
			one.Loops = loops
			list = append(list, one)
		}
	default:
		list = append(list, one)
	}
	return list
}
