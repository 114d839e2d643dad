// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-blk/sluice/internal/daemon"
)

// Goal: every verb of ctl against a server that has done some work, as text and as JSON.
func TestCtlAsksARunningServer(t *testing.T) {
	dir := t.TempDir()
	ctl, socket := filepath.Join(dir, "ctl"), filepath.Join(dir, "s")
	p := spawn(t, nil, "serve", "--disk", "driver=mem,size=16M", "--vhost-user", socket, "--control", ctl)
	p.ready()
	if status, _, errs := runMain("bench", "--connect", socket, "--rw=randrw", "--iodepth=8", "--runtime=200ms"); status != 0 {
		t.Fatalf("bench: %s", errs)
	}
	for _, c := range []struct {
		args []string
		want []string
	}{
		{[]string{"status"}, []string{"process ", "loop 0: waits in", "disk mem: 16777216 bytes, read-write", "1 sessions so far"}},
		{[]string{"stats"}, []string{"queue 0 on loop 0, stopped", "requests a look at the ring", "stage", "ring", "graph", "publish", "total"}},
		{[]string{"stats", "--disk", "mem"}, []string{"disk mem"}},
	} {
		status, out, errs := runMain(append([]string{"ctl", ctl}, c.args...)...)
		if status != 0 {
			t.Errorf("%v: %s", c.args, errs)
		}
		for _, want := range c.want {
			if !strings.Contains(out, want) {
				t.Errorf("%v does not say %q:\n%s", c.args, want, out)
			}
		}
	}
	file := filepath.Join(dir, "trace.json")
	if status, _, errs := runMain("ctl", ctl, "trace", "start", file); status != 0 {
		t.Error(errs)
	}
	if status, _, errs := runMain("bench", "--connect", socket, "--iodepth=8", "--runtime=100ms"); status != 0 {
		t.Error(errs)
	}
	if status, out, errs := runMain("ctl", ctl, "trace", "stop"); status != 0 || !strings.Contains(out, file+": the last ") {
		t.Errorf("%s%s", out, errs)
	}
	if b, err := os.ReadFile(file); err != nil || !json.Valid(b) {
		t.Errorf("the trace is no JSON: %v", err)
	}
	_, out, _ := runMain("ctl", ctl, "stats", "--json")
	var r daemon.Report
	d := json.NewDecoder(strings.NewReader(out))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		t.Fatalf("%v in\n%s", err, out)
	}
	q := &r.Disks[0].Exports[0].Queues[0]
	if q.Reads == 0 || q.Writes == 0 || q.Reads+q.Writes != q.Requests || q.Stages["total"].Count != q.Requests {
		t.Errorf("queue %+v", q)
	}
	var interval strings.Builder
	if err := writeInterval(&interval, (&r).Since(&daemon.Report{})); err != nil || strings.Count(interval.String(), "\n") != 2 {
		t.Errorf("error %v, interval\n%s", err, interval.String())
	}
}

func TestCtlRefuses(t *testing.T) {
	for _, c := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"ctl"}, exitUsage, "a socket and a verb are wanted"},
		{[]string{"ctl", "s", "frobnicate"}, exitUsage, `unknown verb "frobnicate"`},
		{[]string{"ctl", "s", "stats", "more"}, exitUsage, "stats wants no arguments"},
		{[]string{"ctl", "s", "trace"}, exitUsage, "trace wants start FILE | stop"},
		{[]string{"ctl", "s", "status", "--watch", "1s"}, exitUsage, "--watch and --disk are for stats"},
		{[]string{"ctl", "s", "stats", "--watch", "-1s"}, exitUsage, "cannot be negative"},
		{[]string{"ctl", filepath.Join(t.TempDir(), "none"), "stats"}, exitFailure, "is it the --control socket"},
	} {
		status, _, errs := runMain(c.args...)
		if status != c.status || !strings.Contains(errs, c.want) {
			t.Errorf("%v ends with %d: %s", c.args, status, errs)
		}
	}
}
