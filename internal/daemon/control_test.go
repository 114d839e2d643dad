// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/control"
)

// ask connects to a control socket for one command.
func ask(t *testing.T, socket, command string, args, result any) error {
	t.Helper()
	c, err := control.Dial(t.Context(), socket)
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Do(t.Context(), command, args, result)
}

// Goal: what a guest did can be read while it runs, for each stage, in total and as a difference.
func TestStatsTellWhatAGuestDid(t *testing.T) {
	dir := t.TempDir()
	ctl, socket := filepath.Join(dir, "ctl"), filepath.Join(dir, "s")
	start(t, Config{Control: ctl, Disks: []DiskConfig{
		{Path: image(t, dir, "one"), Exports: []ExportConfig{{Socket: socket}}},
		{Driver: "null", Size: 1 << 20},
	}})
	if fi, err := os.Stat(ctl); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("control socket %v, error %v; want mode 0600", fi, err)
	}
	g, err := boot(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = g.off() }()
	work := func() {
		for range 5 {
			if err := g.write(8, 'x'); err != nil {
				t.Fatal(err)
			}
			if _, err := g.read(8); err != nil {
				t.Fatal(err)
			}
		}
	}
	var status Status
	var first, second Report
	work()
	if err := errors.Join(ask(t, ctl, "status", nil, &status), ask(t, ctl, "stats", nil, &first)); err != nil {
		t.Fatal(err)
	}
	work()
	if err := ask(t, ctl, "stats", &StatsArgs{Disk: filepath.Join(dir, "one")}, &second); err != nil {
		t.Fatal(err)
	}
	if len(status.Loops) != 1 || len(status.Disks) != 2 || status.Disks[0].Exports[0].Running != 1 || status.PID != os.Getpid() {
		t.Errorf("status is %+v", status)
	}
	if len(first.Disks) != 2 || len(second.Disks) != 1 {
		t.Fatalf("%d disks without a name, %d with one", len(first.Disks), len(second.Disks))
	}
	between := second.Since(&first)
	for i, r := range []*Report{&first, between} {
		q := &r.Disks[0].Exports[0].Queues[0]
		if q.Reads != 5 || q.Writes != 5 || q.Requests != 10 || q.Errors != 0 || q.ReadBytes != 5*guestData || !q.Running || q.PerBatch.Sum != 10 {
			t.Errorf("report %d: queue %+v", i, q)
		}
		for _, stage := range []string{"ring", "graph", "queued", "kernel", "publish", "total"} {
			l := q.Stages[stage]
			if l.Count != 10 || l.P50 > l.P999 || l.P999 > l.Max || l.Sum < l.Max {
				t.Errorf("report %d: stage %s is %+v", i, stage, l)
			}
		}
		if r.Loops[0].Turns == 0 || len(r.Loops[0].Engines) != 1 || r.Loops[0].Engines[0].PerSubmission.Sum < 10 {
			t.Errorf("report %d: loop %+v", i, r.Loops[0])
		}
	}
	if between.UptimeNanos <= 0 || between.UptimeNanos >= second.UptimeNanos {
		t.Errorf("the time between is %d ns of %d", between.UptimeNanos, second.UptimeNanos)
	}
	if err := ask(t, ctl, "stats", &StatsArgs{Disk: "other"}, nil); err == nil || !strings.Contains(err.Error(), `no disk "other"`) {
		t.Errorf("a disk that does not exist: %v", err)
	}
	if err := ask(t, ctl, "status", map[string]int{"x": 1}, nil); err == nil || !strings.Contains(err.Error(), "unknown field") {
		t.Errorf("an argument that does not exist: %v", err)
	}
}

// The control socket is taken over from a dead server, refused to a second living one, and gone at the end.
func TestControlSocketIsTreatedAsAnExports(t *testing.T) {
	dir := t.TempDir()
	ctl := filepath.Join(dir, "ctl")
	stale, err := ListenPrivate(ctl)
	if err != nil {
		t.Fatal(err)
	}
	if err := stale.UnixListener.Close(); err != nil {
		t.Fatal(err)
	}
	d := start(t, Config{Control: ctl})
	second, err := New(Config{Control: ctl})
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Start(t.Context()); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a second server on a living socket: %v", err)
	}
	if err := ask(t, ctl, "status", nil, nil); err != nil {
		t.Errorf("the first one: %v", err)
	}
	if err := d.Stop(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(ctl); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after the stop: %v", err)
	}
	if _, err := New(Config{Control: ctl, Disks: []DiskConfig{{Driver: "null", Size: 512, Exports: []ExportConfig{{Socket: ctl}}}}}); err == nil {
		t.Error("a control socket that is an export's, too, was taken")
	}
}
