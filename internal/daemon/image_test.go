// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/bench"
	"github.com/sluice-blk/sluice/internal/img"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

// qcow2Image makes an empty image.
func qcow2Image(t *testing.T, dir, name string, o create.Options) string {
	t.Helper()
	path := filepath.Join(dir, name)
	s, err := img.CreateStore(path, img.StoreOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := create.Create(s, &o); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return path
}

// Goal: images whose queues are many are each on one loop, disks in turn, and what eight queues write at the same time is
// there. Method: eight jobs of the built-in driver on each of two images, that verify what they wrote, sizes of requests that
// share clusters; qemu-img check; and the same disk read once more by a daemon that is started anew.
func TestManyQueuesOnImages(t *testing.T) {
	dir := t.TempDir()
	log := &lockedBuffer{}
	cfg := Config{Logger: slog.New(slog.NewTextHandler(log, nil)), Loops: make([]LoopConfig, 2)}
	var sockets []string
	for _, name := range []string{"a", "b"} {
		path := qcow2Image(t, dir, name+".qcow2", create.Options{Size: 256 << 20})
		sockets = append(sockets, filepath.Join(dir, name))
		cfg.Disks = append(cfg.Disks, DiskConfig{Path: path, Format: "qcow2", Queues: 8, L2CacheSize: 64 << 10, Exports: []ExportConfig{{Socket: filepath.Join(dir, name)}}})
	}
	d := start(t, cfg)
	results := make(chan error, 2)
	for i, socket := range sockets {
		go func() {
			_, err := bench.Run(t.Context(), socket, bench.Workload{RW: "randrw", BS: []int{512, 20480}[i], NumJobs: 8, IODepth: 16, Fsync: 5, Verify: true, Runtime: 500 * time.Millisecond})
			results <- err
		}()
	}
	if err := errors.Join(<-results, <-results); err != nil {
		t.Fatal(err)
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
		if carried == 0 {
			t.Errorf("loop %d carried nothing", i)
		}
	}
	for _, want := range []string{"0-7 on loop 0", "0-7 on loop 1"} {
		if !strings.Contains(log.String(), `where="`+want+`"`) {
			t.Errorf("the log does not say %q:\n%s", want, log)
		}
	}
	r, err := d.Report(t.Context(), &StatsArgs{})
	if err != nil {
		t.Fatal(err)
	}
	for _, disk := range r.Disks {
		i := disk.Image
		if i == nil || i.Direct == 0 || i.Indirect == 0 || i.L2Hits == 0 || i.Allocated == 0 || i.Commits == 0 || i.L2CacheCovers == 0 {
			t.Errorf("disk %s: image %+v", disk.Name, i)
		}
	}
	if again := r.Since(r); again.Disks[0].Image.Direct != 0 || r.Disks[0].Image.Direct == 0 {
		t.Error("a report since itself counts something, or takes it from the other")
	}
	if err := d.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := exec.LookPath("qemu-img"); err != nil {
		return
	}
	for _, disk := range cfg.Disks {
		if out, err := exec.Command("qemu-img", "check", "-f", "qcow2", disk.Path).CombinedOutput(); err != nil {
			t.Errorf("qemu-img check: %v: %.2000s", err, out)
		}
	}
}

// A disk whose queues are given to several loops by name is on one all the same, and faults before it hide nothing.
func TestImageIsOnOneOfTheLoopsThatAreNamed(t *testing.T) {
	dir := t.TempDir()
	path := qcow2Image(t, dir, "a.qcow2", create.Options{Size: 1 << 20})
	d := start(t, Config{Loops: make([]LoopConfig, 3), Disks: []DiskConfig{{
		Path: path, Format: "qcow2", Queues: 4, Groups: []QueueGroup{{4, 1, 2}}, Fault: "discard error=EIO", Exports: []ExportConfig{{Socket: filepath.Join(dir, "s")}},
	}}})
	disk := d.Disks()[0]
	if len(disk.Loops()) != 1 || disk.Loops()[0] != d.Loops()[1] || disk.image() == nil {
		t.Errorf("it is on %d loops, image %v", len(disk.Loops()), disk.image())
	}
}

// An image that nobody said to be one is served as it is, with a warning.
func TestImageAsRawIsToldOf(t *testing.T) {
	dir := t.TempDir()
	path := qcow2Image(t, dir, "a.qcow2", create.Options{Size: 1 << 20})
	for format, told := range map[string]bool{"": true, "raw": false, "qcow2": false} {
		log := &lockedBuffer{}
		d := start(t, Config{Logger: slog.New(slog.NewTextHandler(log, nil)), Disks: []DiskConfig{{Path: path, Format: format}}})
		if got := strings.Contains(log.String(), "begins as an image"); got != told {
			t.Errorf("format %q: told %v:\n%s", format, got, log)
		}
		if err := d.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

func TestImageSettingsThatMakeNoSense(t *testing.T) {
	for want, c := range map[string]DiskConfig{
		"vdi or probe":               {Format: "qed"},
		"format vmdk is only read":   {Format: "vmdk"},
		"backing is for":             {Backing: "off"},
		"data-file is for":           {DataFile: "x"},
		"snapshot is for":            {Snapshot: "x", ReadOnly: true},
		"add readonly":               {Format: "qcow2", Snapshot: "x"},
		"caches of tables are for":   {L2CacheSize: 1 << 20},
		"a cache of tables has 1 by": {Format: "qcow2", L2CacheSize: 1},
		"discard=keep is for":        {KeepOnDiscard: true},
		"of backing":                 {Format: "qcow2", Backing: "maybe"},
		"file-fault is for":          {FileFault: "any error=EIO"},
	} {
		c.Path = "d"
		if err := c.validateSource(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", c, err, want)
		}
	}
}

// Images that are only read are served to guests, compressed ones too, and nothing is said of the length of their files.
func TestForeignImages(t *testing.T) {
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Skip("needs qemu-img to make images (apt-get install qemu-utils)")
	}
	dir := t.TempDir()
	raw := filepath.Join(dir, "raw")
	if err := os.WriteFile(raw, bytes.Repeat([]byte("a disk "), 1<<19), 0o600); err != nil {
		t.Fatal(err)
	}
	for format, options := range map[string]string{"vmdk": "subformat=streamOptimized", "vhdx": "subformat=dynamic", "vpc": "force_size=on", "vdi": "static=on"} {
		t.Run(format, func(t *testing.T) {
			path := filepath.Join(dir, format)
			if out, err := exec.Command("qemu-img", "convert", "-f", "raw", "-O", format, "-o", options, raw, path).CombinedOutput(); err != nil {
				t.Fatalf("qemu-img: %v: %s", err, out)
			}
			log := &lockedBuffer{}
			start(t, Config{
				Logger: slog.New(slog.NewTextHandler(log, nil)),
				Disks:  []DiskConfig{{Path: path, Format: format, ReadOnly: true, Exports: []ExportConfig{{Socket: path + ".sock"}}}},
			})
			r, err := bench.Run(t.Context(), path+".sock", bench.Workload{RW: "randread", BS: 20480, IODepth: 16, Runtime: 100 * time.Millisecond})
			if err != nil || r.Read.IOs == 0 {
				t.Errorf("%d requests, %v", r.Read.IOs, err)
			}
			if strings.Contains(log.String(), "WARN") {
				t.Errorf("warned:\n%s", log.String())
			}
		})
	}
}

// Goal: damage that a write meets is in the log while the disk is served, not first when it is closed. Method: an image whose
// one L1 entry leads to the refcount table, and one write.
func TestDamageIsLoggedWhenItIsMet(t *testing.T) {
	dir := t.TempDir()
	path := qcow2Image(t, dir, "a.qcow2", create.Options{Size: 1 << 20})
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	head := make([]byte, 56)
	if _, err := f.ReadAt(head, 0); err != nil {
		t.Fatal(err)
	}
	entry := binary.BigEndian.Uint64(head[48:]) | 1<<63
	if _, err := f.WriteAt(binary.BigEndian.AppendUint64(nil, entry), int64(binary.BigEndian.Uint64(head[40:]))); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	log := &lockedBuffer{}
	socket := filepath.Join(dir, "s")
	d, err := New(Config{Logger: slog.New(slog.NewTextHandler(log, nil)), Disks: []DiskConfig{{Path: path, Format: "qcow2", Exports: []ExportConfig{{Socket: socket}}}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, _ = bench.Run(t.Context(), socket, bench.Workload{RW: "write", BS: 4096, NumJobs: 1, IODepth: 1, Runtime: 50 * time.Millisecond}) // its writes fail
	for end := time.Now().Add(30 * time.Second); !strings.Contains(log.String(), "level=ERROR") && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	if n := strings.Count(log.String(), `msg="the image is damaged and takes no more writes" disk=`+path); n != 1 {
		t.Errorf("the log tells it %d times:\n%s", n, log)
	}
	if err := d.Stop(context.Background()); err == nil {
		t.Error("a damaged image is closed without a word")
	}
}
