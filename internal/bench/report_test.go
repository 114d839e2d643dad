// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var update = flag.Bool("update", false, "write the golden files anew")

// sampleRuns makes runs of a second with so many requests and so much processor time a request.
func sampleRuns(us float64, ios ...uint64) (runs []*Result) {
	for _, n := range ios {
		d := Direction{IOs: n, P50: 30 * time.Microsecond, P99: 100 * time.Microsecond, P999: 900 * time.Microsecond}
		runs = append(runs, &Result{Elapsed: time.Second, Read: d, Kicks: n / 10, Calls: n / 20,
			ServerCPU: time.Duration(us * 1e3 * float64(n)), Limits: Limits{Machine: 97, ServerThread: 99}})
	}
	return runs
}

// sampleReport is a report in which everything occurs, on a machine that does not exist.
func sampleReport() *Report {
	ours := Row{Subject: Subject{"sluice", Ours, []string{"sluice", "serve"}}, Runs: sampleRuns(1, 300_000, 310_000, 290_000, 305_000, 300_000)}
	ours.WarmUp = &Result{SysCalls: 5000, Read: Direction{IOs: 100_000}}
	ours.Runs[0].Server = &ServerCounters{Submitted: 64, Submissions: 2}
	c := &Comparison{
		Experiment: Experiment{ID: "shm-randread-64", Title: "/dev/shm, 4k randread, depth 64", Medium: Medium{Name: "shm", Path: "/dev/shm/x.raw"},
			Workload: Workload{RW: "randread", BS: 4096, IODepth: 64, NumJobs: 1, Runtime: time.Second}},
		Rounds: 5,
		Rows: []Row{
			ours,
			{Subject: Subject{"qemu-storage-daemon aio=native", Peer, nil}, Runs: sampleRuns(3, 150_000, 151_000, 149_000, 150_000, 152_000)},
			{Subject: Subject{"qemu-storage-daemon aio=<threads>", Peer, nil}, Dropped: "far behind qemu-storage-daemon aio=native in the warm-up"},
			{Subject: Subject{"fio libaio", Direct, nil}, Runs: sampleRuns(0.9, 299_000, 312_000, 295_000, 300_000, 301_000)},
		},
	}
	r := &Report{
		Title: "sample & golden",
		Environment: &Environment{Date: "2026-01-02 03:04 UTC", CPU: "Abacus", CPUs: 2, MemoryMiB: 4096, Machine: "Maker Model", Virtual: true,
			Kernel: "Linux 6.18 x86_64", Mitigations: []Mitigation{{"meltdown", "Not affected"}, {"spectre_v1", "Mitigation: barriers"}}, Load: "0.1 0.2 0.3",
			Media: []MediumFacts{{Name: "null"}, {Name: "disk", Path: "/x", FileSystem: "ext4", Source: "/dev/vda", Scheduler: "none", Direct: true}},
			// The versions come last.
			Versions: []string{"sluice devel", "peer 7"}},
		Comparisons: []*Comparison{c},
		Notes:       []string{"guest: shown elsewhere"},
	}
	for i := range Targets {
		if Targets[i].ID == "shm-64" || Targets[i].ID == "steady" {
			r.Outcomes = append(r.Outcomes, c.Judge(&Targets[i])...)
		}
	}
	return r
}

func TestReportsAreAsTheyWere(t *testing.T) {
	r := sampleReport()
	for _, f := range []struct {
		name  string
		write func(io.Writer) error
	}{
		{"report.txt", func(w io.Writer) error { return r.Write(w, "text") }},
		{"report.md", func(w io.Writer) error { return r.Write(w, "markdown") }},
		{"report.json", func(w io.Writer) error { return r.Write(w, "json") }},
		{"report.svg", r.WriteSVG},
	} {
		var b bytes.Buffer
		must(t, f.write(&b))
		path := filepath.Join("testdata", f.name)
		if *update {
			must(t, os.WriteFile(path, b.Bytes(), 0o666))
		}
		want, err := os.ReadFile(path)
		must(t, err)
		if !bytes.Equal(b.Bytes(), want) {
			t.Errorf("%s differs (go test -update, and look at the difference); it is now\n%s", f.name, b.Bytes())
		}
	}
	if r.Write(io.Discard, "carrier pigeon") == nil {
		t.Error("an unknown format was written")
	}
}

// What a program reads must be well formed whatever a name holds.
func TestReportsAreWellFormed(t *testing.T) {
	r := sampleReport()
	var svg, doc bytes.Buffer
	must(t, r.WriteSVG(&svg))
	d := xml.NewDecoder(&svg)
	for {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		must(t, err)
	}
	must(t, r.Write(&doc, "json"))
	var back Record
	must(t, json.Unmarshal(doc.Bytes(), &back))
	if len(back.Experiments) != 1 || len(back.Experiments[0].Rows) != 4 || back.Experiments[0].Rows[0].Figures[IOPS].Median != 300_000 {
		t.Errorf("got %+v", back)
	}
	must(t, (&Report{}).WriteSVG(io.Discard))
	must(t, (&Report{}).Write(io.Discard, "text"))
}

func TestAReportThatCannotBeWrittenIsAnError(t *testing.T) {
	for _, format := range Formats {
		if sampleReport().Write(brokenWriter{}, format) == nil {
			t.Errorf("%s: no error", format)
		}
	}
	if sampleReport().WriteSVG(brokenWriter{}) == nil {
		t.Error("SVG: no error")
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("full") }

func TestTargetsAreJudged(t *testing.T) {
	c := sampleReport().Comparisons[0]
	judge := func(b Bound) Outcome {
		list := c.Judge(&Target{ID: "t", Bounds: []Bound{b}})
		return list[0]
	}
	for _, x := range []struct {
		b             Bound
		reached, sure bool
	}{
		{Bound{IOPS, Peer, 1.5}, true, true},
		{Bound{IOPS, Peer, 2}, true, false}, // 1.93 to 2.05
		{Bound{IOPS, Peer, 2.02}, false, false},
		{Bound{IOPS, Peer, 2.5}, false, true},
		{Bound{CPU, Peer, 0.4}, true, true},
		{Bound{CPU, Direct, 1}, false, true},
		{Bound{IOPS, Direct, 0.95}, true, true},
		{Bound{P50, Peer, 1}, true, true},
		{Bound{SysCalls, "", 0.1}, true, true},
		{Bound{SysCalls, "", 0.01}, false, true},
	} {
		o := judge(x.b)
		if o.Reached != x.reached || o.Sure != x.sure || o.NotHere != "" || o.Lost() != (!x.reached && x.sure) {
			t.Errorf("%v: %+v", x.b, o)
		}
	}
	for _, b := range []Bound{{IOPS, Other, 1}, {Mallocs, "", 1}, {IOPS, Ours, 1}} {
		if o := judge(b); o.NotHere == "" || o.Reached || o.Lost() {
			t.Errorf("%v: %+v", b, o)
		}
	}
	either := c.Judge(&Target{Any: true, Bounds: []Bound{{IOPS, Peer, 9}, {CPU, Peer, 0.5}}})
	if either[0].Lost() || !strings.Contains(either[0].Word(), "made up for") || either[1].Word() != "reached" {
		t.Errorf("one of two: %+v", either)
	}
}

func TestTargetsOfOtherMeans(t *testing.T) {
	for _, x := range []struct {
		m       Measure
		v       float64
		reached bool
	}{{IdleCPU, 0.1, true}, {IdleCPU, 0.3, false}, {DiskMiB, 1, true}, {AttachMsg, 51, false}} {
		found := false
		for i := range Targets {
			if o, ok := Targets[i].JudgeValue(x.m, x.v, "somewhere"); ok {
				found = true
				if o.Reached != x.reached || o.Lost() == x.reached {
					t.Errorf("%v of %s: %+v", x.v, x.m, o)
				}
			}
		}
		if !found {
			t.Errorf("no target bounds %s", x.m)
		}
	}
}

// Every target names what shows it, and every setup makes an experiment with somebody to compare with.
func TestListsAreWhole(t *testing.T) {
	l := &Lab{Program: "sluice", Peer: "qsd", PeerAIO: []string{"native", "io_uring"}, PeerLoops: []string{"main", "iothread"}, Fio: "fio",
		Media: map[string]Medium{"null": {Name: "null"}, "shm": {Name: "shm", Path: "/s"}, "disk": {Name: "disk", Path: "/d"}}}
	seen := make(map[string]bool)
	for _, target := range append(append([]Target{}, Targets...), Checks...) {
		if len(target.Bounds) == 0 && target.Elsewhere == "" {
			t.Errorf("%s asks for nothing", target.ID)
		}
		for _, s := range target.Setups {
			e, err := l.Experiment(s, target.Bounds)
			must(t, err)
			c := &Comparison{Experiment: e, Rows: make([]Row, len(e.Subjects))}
			for i := range c.Rows {
				c.Rows[i] = Row{Subject: e.Subjects[i], Runs: sampleRuns(1, 1000)}
			}
			for _, b := range target.Bounds {
				if b.Against != "" && c.against(&b) < 0 {
					t.Errorf("%s in %s: nobody to compare with for %v", target.ID, e.ID, b)
				}
			}
		}
	}
	rows := 0
	for _, series := range Seeds {
		for _, s := range series.Setups {
			s.Series = series.ID
			if seen[s.ID()] {
				t.Errorf("%s occurs twice", s.ID())
			}
			seen[s.ID()] = true
			e, err := l.Experiment(s, nil)
			must(t, err)
			for _, subject := range e.Subjects {
				if series.ID == "3" && subject.Role == Ours {
					rows++
				}
			}
		}
	}
	if rows != 16 {
		t.Errorf("the third series has %d rows of ours, want 16", rows)
	}
	if _, err := l.Experiment(Setup{Medium: "cloud"}, nil); err == nil {
		t.Error("an experiment on a medium that is not there")
	}
}
