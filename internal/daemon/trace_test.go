// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// slicesOf reads a trace and answers how many slices of each name there are. A slice that overlaps the end of the one that
// it began in is an error: no reader could show it.
func slicesOf(t *testing.T, path string) map[string]int {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var f struct {
		Events []struct {
			Phase string `json:"ph"`
			Name  string
			Pid   int
			Tid   int
			TS    float64
			Dur   float64
		} `json:"traceEvents"`
	}
	if err := json.Unmarshal(b, &f); err != nil {
		t.Fatalf("%v in\n%s", err, b)
	}
	count := make(map[string]int)
	ends := make(map[[2]int][]float64)
	const tick = 0.0005
	for _, e := range f.Events {
		if e.Phase != "X" {
			continue
		}
		count[strings.TrimRight(e.Name, " 0123456789")]++
		at := [2]int{e.Pid, e.Tid}
		for n := len(ends[at]); n > 0 && ends[at][n-1] <= e.TS+tick; n-- {
			ends[at] = ends[at][:n-1]
		}
		if n := len(ends[at]); n > 0 && ends[at][n-1] < e.TS+e.Dur-tick || e.Dur < 0 {
			t.Fatalf("slice %s at %v for %v us overlaps the end of another", e.Name, e.TS, e.Dur)
		}
		ends[at] = append(ends[at], e.TS+e.Dur)
	}
	return count
}

// Goal: a trace holds what happened while it ran, for a guest that was there before and for one that came meanwhile.
func TestTraceHoldsWhatHappened(t *testing.T) {
	dir := t.TempDir()
	ctl, socket, file := filepath.Join(dir, "ctl"), filepath.Join(dir, "s"), filepath.Join(dir, "trace.json")
	start(t, Config{Control: ctl, Disks: []DiskConfig{{Path: image(t, dir, "one"), Exports: []ExportConfig{{Socket: socket}}}}})
	work := func(g *guest) {
		t.Helper()
		for range 3 {
			_, err := g.read(0)
			if err = errors.Join(err, g.write(8, 'x')); err != nil {
				t.Fatal(err)
			}
		}
	}
	boots := func() *guest {
		g, err := boot(socket)
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	g := boots()
	work(g) // before the trace
	if err := ask(t, ctl, "trace-start", &TraceArgs{File: file}, nil); err != nil {
		t.Fatal(err)
	}
	if err := ask(t, ctl, "trace-start", &TraceArgs{File: file + "2"}, nil); err == nil || !strings.Contains(err.Error(), "one runs already") {
		t.Errorf("a second trace: %v", err)
	}
	work(g)
	if err := g.off(); err != nil {
		t.Error(err)
	}
	g = boots()
	work(g)
	var r TraceResult
	if err := ask(t, ctl, "trace-stop", nil, &r); err != nil || r.Requests != 12 || r.Kept != 12 || r.File != file {
		t.Errorf("result %+v, error %v", r, err)
	}
	work(g) // behind it
	if err := g.off(); err != nil {
		t.Error(err)
	}
	got := slicesOf(t, file)
	for name, want := range map[string]int{"read": 6, "write": 6, "ring": 12, "graph": 12, "queued": 12, "kernel": 12, "take": 12} {
		if got[name] != want {
			t.Errorf("%d slices %q, want %d", got[name], name, want)
		}
	}
	if err := ask(t, ctl, "trace-stop", nil, nil); err == nil || !strings.Contains(err.Error(), "none runs") {
		t.Errorf("a second stop: %v", err)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, dir, "/dev/null", filepath.Join(dir, "no", "such")} {
		if err := ask(t, ctl, "trace-start", &TraceArgs{File: path}, nil); err == nil {
			t.Errorf("a trace to %s was started", path)
		}
	}
}

func TestTraceOfAWholeLifeIsWrittenAtTheStop(t *testing.T) {
	dir := t.TempDir()
	socket, file := filepath.Join(dir, "s"), filepath.Join(dir, "trace.json")
	d := start(t, Config{Trace: file, Disks: []DiskConfig{{Driver: "mem", Size: 1 << 20, Exports: []ExportConfig{{Socket: socket}}}}})
	g, err := boot(socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.write(0, 'x'); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(g.off(), d.Stop(t.Context())); err != nil {
		t.Fatal(err)
	}
	if got := slicesOf(t, file); got["write"] != 1 || got["kernel"] != 0 {
		t.Errorf("slices %v", got)
	}
}
