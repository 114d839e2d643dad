// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-blk/sluice/internal/bench"
)

// stand-ins for the peer and fio: programs that can be found and, when started, end at once with a failure.
func standIn(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "stand-in")
	if err := os.WriteFile(path, []byte("#!/bin/sh\nexit 7\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

// playProgram makes this test binary, when it is started, be sluice.
func playProgram(t *testing.T) {
	t.Helper()
	t.Setenv(asProgram, "1")
	t.Setenv("GORACE", "atexit_sleep_ms=0") // the race detector's reports come at once all the same
}

func runMain(args ...string) (status int, out, errOut string) {
	var o, e bytes.Buffer
	status = Main(args, Streams{In: strings.NewReader(""), Out: &o, Err: &e})
	return status, o.String(), e.String()
}

// The servers that these tests compare are this test binary, as sluice.
func TestCompareMeasuresUsAlone(t *testing.T) {
	playProgram(t)
	out := t.TempDir()
	chart := filepath.Join(t.TempDir(), "c.svg")
	status, report, log := runMain("bench", "compare", "--null", "--peer", "none", "--rounds", "1", "--runtime", "50ms", "--iodepth", "8",
		"--server", "again="+os.Args[0]+" serve --disk driver=null,size=1G --vhost-user %S", "--format", "json", "--out", out, "--chart", chart)
	if status != exitOK {
		t.Fatalf("status %d: %s", status, log)
	}
	var r bench.Record
	if err := json.Unmarshal([]byte(report), &r); err != nil {
		t.Fatal(err)
	}
	rows := r.Experiments[0].Rows
	if len(rows) != 3 || rows[0].Figures[bench.IOPS].Median <= 0 || rows[2].Name != "again" {
		t.Errorf("got %+v", rows)
	}
	if !strings.Contains(log, "round 1") {
		t.Errorf("no progress is told:\n%s", log)
	}
	for _, path := range []string{chart, out + "/compare.svg", out + "/compare.md", out + "/compare.txt", out + "/compare.json"} {
		if info, err := os.Stat(path); err != nil || info.Size() == 0 {
			t.Errorf("%s was not written: %v", path, err)
		}
	}
}

func TestSeedsAndTargetsWork(t *testing.T) {
	playProgram(t)
	dir := t.TempDir()
	common := []string{"--quick", "--runtime", "40ms", "--rounds", "1", "--image-size", "4M", "--dir", dir, "--shm", dir, "--peer", "none", "--format", "markdown"}
	status, report, log := runMain(append([]string{"bench", "seeds", "--series", "2"}, common...)...)
	if status != exitOK || strings.Count(report, "### Series 2") != 4 || !strings.Contains(report, "batch=off") {
		t.Errorf("seeds: status %d\n%s\n%s", status, report, log)
	}
	status, report, log = runMain(append([]string{"bench", "targets", "--only", "batching,mallocs,guest"}, common...)...)
	if status != exitOK || !strings.Contains(report, "| batching") || !strings.Contains(report, "| mallocs") || !strings.Contains(report, "- guest: ") {
		t.Errorf("targets: status %d\n%s\n%s", status, report, log)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("images are left: %v, %v", left, err)
	}
	// Without a peer nothing can be shown to be kept.
	status, _, log = runMain(append([]string{"bench", "targets", "--check", "--only", "null-64"}, common...)...)
	if status != exitFailure || !strings.Contains(log, "what was won is lost") {
		t.Errorf("check without a peer: status %d: %s", status, log)
	}
}

func TestTargetsAreListed(t *testing.T) {
	status, out, _ := runMain("bench", "targets", "--list")
	if status != exitOK {
		t.Fatalf("status %d", status)
	}
	for i := range bench.Targets {
		if !strings.Contains(out, bench.Targets[i].ID) {
			t.Errorf("%s is missing in\n%s", bench.Targets[i].ID, out)
		}
	}
}

func TestComparisonsThatCannotBe(t *testing.T) {
	broken := standIn(t)
	for _, c := range []struct {
		args   string
		status int
		says   string
	}{
		{"compare --null --rounds 0", exitUsage, "--rounds"},
		{"compare --null --rounds auto:3", exitUsage, "auto:MAX"},
		{"compare --null --rounds many", exitUsage, "--rounds"},
		{"compare --null --format pdf", exitUsage, "--format"},
		{"compare", exitUsage, "--file or --null"},
		{"compare --null --file x", exitUsage, "--file or --null"},
		{"compare --null --bs 17", exitUsage, "--bs"},
		{"compare --null --peer somebody", exitUsage, "--server"},
		{"compare --null --peer none --server nothing", exitUsage, "NAME=COMMAND"},
		{"compare --null --peer-loop orbit", exitUsage, "main or iothread"},
		{"compare --null --peer qemu-storage-daemon=/nonexistent/q", exitFailure, "find the peer"},
		{"compare --null --peer none --fio=/nonexistent/fio", exitFailure, "find fio"},
		{"compare --null --batch on --rounds 1 --runtime 20ms --peer qemu-storage-daemon=" + broken, exitFailure, "exit status 7"},
		{"compare --null --batch on --rounds 1 --runtime 20ms --peer none --chart /nonexistent/c.svg", exitFailure, "/nonexistent/c.svg"},
		{"seeds --series 9", exitUsage, "--series"},
		{"seeds --image-size tiny", exitUsage, "--image-size"},
		{"seeds --runtime 0s --peer none", exitUsage, "--runtime"},
		{"seeds --peer none --image-size 1M --dir /nonexistent", exitFailure, "make an image"},
		{"targets --only nothing", exitUsage, "no target"},
	} {
		playProgram(t)
		status, _, log := runMain(append([]string{"bench"}, strings.Fields(c.args)...)...)
		if status != c.status || !strings.Contains(log, c.says) {
			t.Errorf("%s: status %d, want %d and %q in\n%s", c.args, status, c.status, c.says, log)
		}
	}
}
