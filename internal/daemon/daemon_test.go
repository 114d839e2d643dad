// SPDX-License-Identifier: Apache-2.0

// Goal: a daemon opens everything or nothing, serves guests that come and go, and leaves nothing behind. Method: real
// loops, files and sockets in a temporary directory; a step of the start is made to fail for each step there is.

package daemon

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
)

// patience bounds every wait of these tests; nothing is expected to take a hundredth of it.
const patience = 30 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// image makes a raw file of 1 MiB.
func image(t *testing.T, dir, name string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 1<<20); err != nil {
		t.Fatal(err)
	}
	return path
}

// start makes a daemon that the test stops at its end.
func start(t *testing.T, c Config) *Daemon {
	t.Helper()
	d, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Stop(context.Background()); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	return d
}

func TestGuestReadsWhatItWrote(t *testing.T) {
	for _, poller := range []aio.PollerKind{aio.PollerAuto, aio.PollerEpoll, aio.PollerPoll} {
		for name, disk := range map[string]DiskConfig{
			"default":      {},
			"threads":      {Engine: aio.EngineThreads, Cache: block.CacheWriteback},
			"writethrough": {Cache: block.CacheWritethrough},
			"window":       {Offset: 64 << 10, Size: 512 << 10},
		} {
			t.Run(poller.String()+"/"+name, func(t *testing.T) {
				dir := t.TempDir()
				disk.Path = image(t, dir, "disk")
				disk.Exports = []ExportConfig{{Socket: filepath.Join(dir, "s")}}
				start(t, Config{Loops: []LoopConfig{{Poller: poller}}, Disks: []DiskConfig{disk}})
				g, err := boot(disk.Exports[0].Socket)
				if err != nil {
					t.Fatal(err)
				}
				defer g.off()
				if err := errors.Join(g.write(8, 0xa5), g.do(virtioblk.TypeFlush, 0)); err != nil {
					t.Fatal(err)
				}
				if b, err := g.read(8); err != nil || b != 0xa5 {
					t.Errorf("read %#x, %v", b, err)
				}
				image, err := os.ReadFile(disk.Path)
				if err != nil || image[disk.Offset+8*512] != 0xa5 {
					t.Errorf("the file does not hold what the guest flushed: %v", err)
				}
			})
		}
	}
}

// A guest may be switched off, also with a request in flight, and the next one finds the disk as it was.
func TestGuestsComeAndGo(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	d := start(t, Config{Disks: []DiskConfig{{Path: image(t, dir, "disk"), Exports: []ExportConfig{{Socket: socket}}}}})
	const guests = 20
	for i := range guests {
		g, err := boot(socket)
		if err != nil {
			t.Fatalf("guest %d: %v", i, err)
		}
		if i > 0 {
			if b, err := g.read(0); err != nil || b != byte(i) {
				t.Errorf("guest %d reads %d, %v", i, b, err)
			}
		}
		if err := errors.Join(g.write(0, byte(i+1)), g.submit(virtioblk.TypeIn, 16), g.off()); err != nil {
			t.Errorf("guest %d: %v", i, err)
		}
	}
	g, err := boot(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer g.off()
	s, err := d.Stats(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	e := s.Disks[0].Exports[0]
	if e.Sessions != guests+1 && e.Sessions != guests { // the last one may not have been counted yet
		t.Errorf("%d sessions, want %d", e.Sessions, guests+1)
	}
	if e.Device.Writes < guests || len(s.Loops) != 1 || s.Loops[0].Turns == 0 {
		t.Errorf("counters do not tell what happened: %+v", s)
	}
}

// Several disks on several loops, two sockets on one of them; what one guest writes the other reads.
func TestDisksStandSideBySide(t *testing.T) {
	dir := t.TempDir()
	sock := func(name string) string { return filepath.Join(dir, name) }
	second := 1
	start(t, Config{
		Loops: []LoopConfig{{}, {Unbatched: true}},
		Disks: []DiskConfig{
			{Path: image(t, dir, "a"), Exports: []ExportConfig{{Socket: sock("a1")}, {Socket: sock("a2")}}},
			{Driver: "mem", Size: 1 << 20, Loop: &second, Queues: 3, Exports: []ExportConfig{{Socket: sock("b")}}},
		},
	})
	guests := make(map[string]*guest)
	for _, name := range []string{"a1", "a2", "b"} {
		g, err := boot(sock(name))
		if err != nil {
			t.Fatal(err)
		}
		defer g.off()
		guests[name] = g
	}
	if err := errors.Join(guests["a1"].write(0, 1), guests["b"].write(0, 2)); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]byte{"a1": 1, "a2": 1, "b": 2} {
		if b, err := guests[name].read(0); err != nil || b != want {
			t.Errorf("%s reads %d, %v; want %d", name, b, err, want)
		}
	}
}

// everything is a configuration whose start takes every kind of step.
func everything(t *testing.T, dir string) Config {
	l, err := ListenUnix(filepath.Join(dir, "handed"))
	if err != nil {
		t.Fatal(err)
	}
	return Config{
		Control: filepath.Join(dir, "ctl"),
		Loops:   []LoopConfig{{}, {Poller: aio.PollerEpoll}},
		Disks: []DiskConfig{
			{Path: filepath.Join(dir, "disk"), Exports: []ExportConfig{{Socket: filepath.Join(dir, "s1")}, {Listener: l}}},
			{Driver: "null", Size: 1 << 20, Exports: []ExportConfig{{Socket: filepath.Join(dir, "s2")}}},
		},
	}
}

// Whatever step fails, the error tells, and nothing stays: no socket, no lock, no descriptor, no goroutine.
func TestStartThatFailsLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	image(t, dir, "disk")
	steps := 0
	for n := 0; ; n++ {
		before := openFiles(t)
		d, err := New(everything(t, dir))
		if err != nil {
			t.Fatal(err)
		}
		steps = 0
		d.before = func(step string) error {
			if steps++; steps > n {
				return fmt.Errorf("%s: refused by the test", step)
			}
			return nil
		}
		err = d.Start(t.Context())
		if err == nil {
			if err := d.Stop(t.Context()); err != nil {
				t.Errorf("stop: %v", err)
			}
			nothingLeft(t, dir, before, "after a stop")
			break
		}
		if !strings.Contains(err.Error(), "refused by the test") {
			t.Errorf("step %d: %v", n, err)
		}
		nothingLeft(t, dir, before, err.Error())
	}
	const least = 1 + 2 + 3*2 + 1 + 1 // loops, disks, exports with their devices, control socket, servers
	if steps < least {
		t.Errorf("the start took %d steps, want %d at least", steps, least)
	}
}

func nothingLeft(t *testing.T, dir string, files int, when string) {
	t.Helper()
	for _, name := range []string{"s1", "s2", "handed", "ctl"} {
		if _, err := os.Lstat(filepath.Join(dir, name)); err == nil {
			t.Errorf("%s: socket %s is still there", when, name)
		}
	}
	if n := openFiles(t); n != files {
		t.Errorf("%s: %d descriptors are open, were %d", when, n, files)
	}
	if err := goleak.Find(); err != nil {
		t.Errorf("%s: %v", when, err)
	}
}

// openFiles counts this process's descriptors once the runtime's own are there.
func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skipf("needs /proc: %v", err)
	}
	return len(entries)
}

// What the machine refuses is an error of the start that names the thing and the cause.
func TestStartNamesWhatIsWrong(t *testing.T) {
	dir := t.TempDir()
	path := image(t, dir, "disk")
	empty := filepath.Join(dir, "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	export := []ExportConfig{{Socket: filepath.Join(dir, "s")}}
	for name, c := range map[string]struct {
		config Config
		want   []string
	}{
		"missing image": {Config{Disks: []DiskConfig{{Path: dir + "/none", Exports: export}}}, []string{"/none", "no such file"}},
		"directory":     {Config{Disks: []DiskConfig{{Path: dir, Exports: export}}}, []string{dir, "is a directory"}},
		"empty image":   {Config{Disks: []DiskConfig{{Path: empty, Exports: export}}}, []string{empty, "0 bytes"}},
		"window":        {Config{Disks: []DiskConfig{{Path: path, Offset: 2 << 20, Exports: export}}}, []string{path}},
		"socket":        {Config{Disks: []DiskConfig{{Path: path, Exports: []ExportConfig{{Socket: path}}}}}, []string{"listen on " + path, "is not a socket"}},
		"no directory":  {Config{Disks: []DiskConfig{{Path: path, Exports: []ExportConfig{{Socket: dir + "/none/s"}}}}}, []string{"/none/s", "no such file"}},
		"CPU":           {Config{Loops: []LoopConfig{{}, {Pin: true, CPU: 1023}}, Disks: []DiskConfig{{Path: path, Exports: export}}}, []string{"loop 1", "1023"}},
		"same image":    {Config{Disks: []DiskConfig{{Path: path, Exports: export}, {Path: path, Exports: []ExportConfig{{Socket: dir + "/t"}}}}}, []string{path, "another process"}},
		"fault text":    {Config{Disks: []DiskConfig{{Path: path, Fault: "nonsense", Exports: export}}}, []string{path, "nonsense"}},
	} {
		t.Run(name, func(t *testing.T) {
			d, err := New(c.config)
			if err != nil {
				t.Fatal(err)
			}
			err = d.Start(t.Context())
			if err == nil {
				t.Fatal(errors.Join(errors.New("it started"), d.Stop(t.Context())))
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%v; want %q in it", err, want)
				}
			}
		})
	}
}

func TestConfigurationsThatMakeNoSense(t *testing.T) {
	two := 2
	for want, c := range map[string]Config{
		"at most 256":              {Loops: make([]LoopConfig, LoopsMax+1)},
		"no path is given":         {Disks: []DiskConfig{{}}},
		"an export has no socket":  {Disks: []DiskConfig{{Path: "d", Exports: []ExportConfig{{}}}}},
		"loop 2 does not exist":    {Disks: []DiskConfig{{Path: "d", Loop: &two}}},
		"already the export of":    {Disks: []DiskConfig{{Path: "d", Exports: []ExportConfig{{Socket: "s"}, {Socket: "s"}}}}},
		"queues is -1":             {Disks: []DiskConfig{{Path: "d", Queues: -1}}},
		"logical block size is 3":  {Disks: []DiskConfig{{Path: "d", LogicalBlock: 3}}},
		"a guest can read 20":      {Disks: []DiskConfig{{Path: "d", Serial: strings.Repeat("x", 21)}}},
		"needs readonly":           {Disks: []DiskConfig{{Path: "d", Lock: "shared"}}},
		"unknown driver":           {Disks: []DiskConfig{{Driver: "tape"}}},
		"negative":                 {Disks: []DiskConfig{{Path: "d", Size: -1}}},
		"driver=mem needs a size":  {Disks: []DiskConfig{{Driver: "mem"}}},
		"at most 1024 are possibl": {Disks: make([]DiskConfig, DisksMax+1)},
	} {
		if _, err := New(c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q in it", err, want)
		}
	}
}

func TestStartIsCutShortByItsContext(t *testing.T) {
	dir := t.TempDir()
	image(t, dir, "disk")
	d, err := New(everything(t, dir))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("changed my mind")
	d.before = func(step string) error {
		if step == "serve" {
			return nil
		}
		if strings.HasPrefix(step, "make device") {
			cancel(why)
		}
		return nil
	}
	if err := d.Start(ctx); !errors.Is(err, why) {
		t.Errorf("start: %v, want %v", err, why)
	}
	if err := d.Stop(t.Context()); err != nil {
		t.Errorf("stop after a start that failed: %v", err)
	}
}

func TestDaemonStartsOnce(t *testing.T) {
	d, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Stats(t.Context()); err == nil {
		t.Error("a daemon that was not started has counters")
	}
	if err := d.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context()); err == nil {
		t.Error("a second start did no harm")
	}
	for range 2 {
		if err := d.Stop(t.Context()); err != nil {
			t.Errorf("stop: %v", err)
		}
	}
	if err := d.Start(t.Context()); err == nil {
		t.Error("it started again")
	}
}

// A stop finishes what the guest has in flight: here a write that takes its time.
func TestStopWaitsForRequestsInFlight(t *testing.T) {
	dir := t.TempDir()
	path, socket := image(t, dir, "disk"), filepath.Join(dir, "s")
	d, err := New(Config{Disks: []DiskConfig{{Path: path, Fault: "write delay=300ms", Exports: []ExportConfig{{Socket: socket}}}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	g, err := boot(socket)
	if err != nil {
		t.Fatal(errors.Join(err, d.Stop(t.Context())))
	}
	defer g.off()
	for i := range g.data() {
		g.data()[i] = 7
	}
	if err := g.submit(virtioblk.TypeOut, 0); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		s, err := d.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if s.Disks[0].Exports[0].Device.Requests == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the request was not taken")
		}
	}
	if err := d.Stop(t.Context()); err != nil {
		t.Errorf("stop: %v", err)
	}
	if status, err := g.wait(); err != nil || status != virtioblk.StatusOK {
		t.Errorf("the write in flight: status %d, %v", status, err)
	}
	if b, err := os.ReadFile(path); err != nil || b[0] != 7 {
		t.Errorf("the write in flight is not in the file: %v", err)
	}
}

// An export whose socket breaks ends alone. When the last one has ended, Failed says so.
func TestExportsBreakAlone(t *testing.T) {
	dir := t.TempDir()
	c := Config{Disks: []DiskConfig{{Driver: "mem", Size: 1 << 20}}}
	var broken [2]net.Listener
	for i := range broken {
		l, err := ListenUnix(filepath.Join(dir, fmt.Sprint("s", i)))
		if err != nil {
			t.Fatal(err)
		}
		broken[i] = l
		c.Disks[0].Exports = append(c.Disks[0].Exports, ExportConfig{Listener: l})
	}
	d := start(t, c)
	if err := broken[0].Close(); err != nil {
		t.Fatal(err)
	}
	g, err := boot(filepath.Join(dir, "s1"))
	if err != nil {
		t.Fatalf("the other export: %v", err)
	}
	if err := errors.Join(g.write(0, 1), g.off()); err != nil {
		t.Errorf("the other export: %v", err)
	}
	select {
	case err := <-d.Failed():
		t.Fatalf("failed with one export alive: %v", err)
	default:
	}
	if err := broken[1].Close(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-d.Failed():
		if !strings.Contains(err.Error(), "every export has ended") {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Error("nobody heard that every export has ended")
	}
}

// Bytes that the guest sees otherwise than the file has them are told.
func TestOddSizesAreTold(t *testing.T) {
	for _, c := range []struct {
		size  int64
		block int
		want  string
	}{
		{513, 0, "ends inside a sector"},
		{10240, 4096, "no whole number of logical blocks"},
		{8192, 4096, ""},
	} {
		path := filepath.Join(t.TempDir(), "disk")
		if err := os.WriteFile(path, make([]byte, c.size), 0o600); err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		d, err := New(Config{Disks: []DiskConfig{{Path: path, LogicalBlock: c.block}}, Logger: slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelWarn}))})
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(d.Start(t.Context()), d.Stop(t.Context())); err != nil {
			t.Fatal(err)
		}
		if got := out.String(); c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%d bytes in blocks of %d: %q, want %q", c.size, c.block, got, c.want)
		}
	}
	if _, err := New(Config{Disks: []DiskConfig{{Driver: "mem", Size: 1000}}}); err == nil {
		t.Error("a disk of 1000 bytes was taken")
	}
}
