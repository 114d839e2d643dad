// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/bench"
	"github.com/sluice-blk/sluice/internal/control"
)

// storm makes the control plane as busy as a hundred impatient operators would: another guest of the same loop comes, reads
// and goes again and again, and the figures are asked for every ten milliseconds, rounds times.
func storm(t *testing.T, rounds int, socket, ctl string) {
	t.Helper()
	c, err := control.Dial(t.Context(), ctl)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for range rounds {
		g, err := boot(socket)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := g.read(0); err != nil {
			t.Error(err)
		}
		if err := g.off(); err != nil {
			t.Error(err)
		}
		var r Report
		if err := c.Do(t.Context(), "stats", nil, &r); err != nil {
			t.Fatal(err)
		}
		time.Sleep(10 * time.Millisecond) // the pace of the storm
	}
}

// Goal: a storm on the control plane costs the data path time at most, no memory: its requests allocate nothing, and all
// are answered. Method: the same storm without and with a queue of depth 64 on the same loop, which may differ in
// allocations by what it takes to set the load up, and not by its requests. The latencies are told and not judged, since
// the machine is not ours alone.
func TestAStormOnTheControlPlane(t *testing.T) {
	dir := t.TempDir()
	busy, other, ctl := filepath.Join(dir, "busy"), filepath.Join(dir, "other"), filepath.Join(dir, "ctl")
	start(t, Config{Control: ctl, Disks: []DiskConfig{
		{Path: image(t, dir, "one"), Exports: []ExportConfig{{Socket: busy}}},
		{Driver: "null", Size: 1 << 20, Exports: []ExportConfig{{Socket: other}}},
	}})
	const rounds = 60
	load := bench.Workload{IODepth: 64, Runtime: time.Second}
	calm, err := bench.Run(t.Context(), busy, load)
	if err != nil {
		t.Fatal(err)
	}
	mallocs := func(work func()) uint64 {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		work()
		runtime.ReadMemStats(&after)
		return after.Mallocs - before.Mallocs
	}
	alone := mallocs(func() { storm(t, rounds, other, ctl) })
	var shaken *bench.Result
	loaded := mallocs(func() {
		done := make(chan error, 1)
		go func() {
			var err error
			shaken, err = bench.Run(t.Context(), busy, load)
			done <- err
		}()
		storm(t, rounds, other, ctl)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
	t.Logf("%d requests: p50 %v, p99 %v, p99.9 %v", calm.IOs(), calm.Read.P50, calm.Read.P99, calm.Read.P999)
	t.Logf("%d in a storm: p50 %v, p99 %v, p99.9 %v; %d allocations without and %d with them", shaken.IOs(), shaken.Read.P50,
		shaken.Read.P99, shaken.Read.P999, alone, loaded)
	if requests := shaken.IOs(); loaded > alone+alone/4+requests/10 {
		t.Errorf("a storm allocates %d times alone and %d times beside %d requests: some of those allocate", alone, loaded, requests)
	}
	var r Report
	if err := ask(t, ctl, "stats", nil, &r); err != nil {
		t.Fatal(err)
	}
	if q := &r.Disks[0].Exports[0].Queues[0]; q.Requests != q.Stages["total"].Count || q.Errors != 0 || q.Requests < calm.IOs()+shaken.IOs() {
		t.Errorf("%d requests of at least %d were taken, %d answered, %d with an error", q.Requests, calm.IOs()+shaken.IOs(),
			q.Stages["total"].Count, q.Errors)
	}
	if e := &r.Disks[1].Exports[0]; e.Sessions != 2*rounds {
		t.Errorf("%d sessions of the other disk, want %d", e.Sessions, 2*rounds)
	}
}
