// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/bench"
)

func TestQueuesArePlacedAsAsked(t *testing.T) {
	one := 1
	for _, c := range []struct {
		disk   DiskConfig
		loops  int
		used   []int
		loopOf []int
		words  string
	}{
		{DiskConfig{}, 1, []int{0}, []int{0}, "0 on loop 0"},
		{DiskConfig{}, 3, []int{0, 1, 2}, []int{0, 1, 2}, "0-2 on loops 0-2"},
		{DiskConfig{Queues: 3}, 2, []int{0, 1}, []int{0, 1, 0}, "0-2 on loops 0-1"},
		{DiskConfig{Queues: 1}, 2, []int{0, 1}, []int{0}, "0 on loops 0-1"},
		{DiskConfig{Queues: 2, Loop: &one}, 3, []int{1}, []int{0, 0}, "0-1 on loop 1"},
		{DiskConfig{Loop: &one}, 3, []int{1}, []int{0}, "0 on loop 1"},
		{DiskConfig{Queues: 3, Groups: []QueueGroup{{3, 1, 2}}}, 4, []int{1, 2}, []int{0, 1, 0}, "0-2 on loops 1-2"},
		{DiskConfig{Queues: 5, Groups: []QueueGroup{{2, 3, 3}, {3, 0, 1}}}, 4, []int{0, 1, 3}, []int{2, 2, 0, 1, 0}, "0-1 on loop 3, 2-4 on loops 0-1"},
	} {
		used, loopOf := c.disk.place(c.loops)
		if !slices.Equal(used, c.used) || !slices.Equal(loopOf, c.loopOf) {
			t.Errorf("%+v on %d loops: %v, %v; want %v, %v", c.disk, c.loops, used, loopOf, c.used, c.loopOf)
		}
		if got := c.disk.placement(c.loops); got != c.words {
			t.Errorf("%+v on %d loops: %q, want %q", c.disk, c.loops, got, c.words)
		}
	}
}

func TestPlacesThatDoNotExist(t *testing.T) {
	one := 1
	for want, d := range map[string]DiskConfig{
		"loop 2 does not exist (there are 2": {Queues: 2, Groups: []QueueGroup{{2, 1, 2}}},
		"cannot use the 2 loops 0-1":         {Queues: 1, Groups: []QueueGroup{{1, 0, 1}}},
		"are no range":                       {Queues: 1, Groups: []QueueGroup{{1, 1, 0}}},
		"2 queues are given loops, there":    {Queues: 3, Groups: []QueueGroup{{2, 0, 0}}},
		"0 queues are given loops":           {Groups: []QueueGroup{{0, 0, 0}}},
		"leave one out":                      {Queues: 1, Loop: &one, Groups: []QueueGroup{{1, 0, 0}}},
	} {
		d.Path = "d"
		_, err := New(Config{Loops: make([]LoopConfig, 2), Disks: []DiskConfig{d}})
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v; want an error with %q", d, err, want)
		}
	}
}

// lockedBuffer is a log that several goroutines write.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Goal: four queues on two loops of three all work at the same time, and the third loop has nothing to do with them.
// Method: four jobs of the built-in driver that verify what they wrote, and the requests that each loop's engines carried.
func TestFourQueuesOnTwoLoops(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	log := &lockedBuffer{}
	d := start(t, Config{
		Logger: slog.New(slog.NewTextHandler(log, nil)),
		Loops:  make([]LoopConfig, 3),
		Disks: []DiskConfig{{Path: image(t, dir, "disk"), Queues: 4, Groups: []QueueGroup{{4, 1, 2}},
			Exports: []ExportConfig{{Socket: socket}}}},
	})
	res, err := bench.Run(t.Context(), socket, bench.Workload{RW: "randrw", NumJobs: 4, IODepth: 8, Verify: true, Runtime: 300 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if res.Read.IOs == 0 || res.Write.IOs == 0 {
		t.Errorf("%d reads, %d writes", res.Read.IOs, res.Write.IOs)
	}
	s, err := d.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i, l := range s.Loops {
		var carried uint64
		for _, e := range l.Engines {
			carried += e.Requests
		}
		if (carried > 0) != (i > 0) {
			t.Errorf("loop %d carried %d requests", i, carried)
		}
	}
	if want := fmt.Sprintf("%q", "0-3 on loops 1-2"); !strings.Contains(log.String(), "where="+want) {
		t.Errorf("the log does not tell where the queues run:\n%s", log)
	}
}
