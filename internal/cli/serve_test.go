// SPDX-License-Identifier: Apache-2.0

// Goal: sluice serve behaves as a service and as a neighbour. Method: this test binary is run as the program, with real
// signals, sockets, descriptors and image locks.

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/vhosttest"
	"github.com/sluice-blk/sluice/internal/vhostuser"
)

// image makes a raw file.
func image(t *testing.T, dir string, size int64) string {
	t.Helper()
	path := filepath.Join(dir, "disk.raw")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
	return path
}

// sectors asks the server at a socket for the size of its disk.
func sectors(t *testing.T, socket string) uint64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	f, err := vhosttest.Dial(ctx, socket)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Negotiate(vhostuser.FeatureVersion1|vhostuser.FeatureProtocolFeatures, vhostuser.ProtocolConfig); err != nil {
		t.Fatal(err)
	}
	b, err := f.GetConfig(0, virtioblk.ConfigSize)
	if err != nil {
		t.Fatal(err)
	}
	return virtioblk.DecodeConfig(b).Capacity
}

func gone(t *testing.T, paths ...string) {
	t.Helper()
	for _, path := range paths {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is still there: %v", path, err)
		}
	}
}

func TestServeUntilASignal(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP} {
		dir := t.TempDir()
		disk, s1, s2, pid := image(t, dir, 1<<20), filepath.Join(dir, "s1"), filepath.Join(dir, "s2"), filepath.Join(dir, "pid")
		p := spawn(t, nil, "serve", "--loops", "2", "--disk", disk+",serial=A", "--vhost-user", s1,
			"--disk", "driver=mem,size=2M", "--vhost-user", s2, "--pidfile", pid)
		p.ready()
		if a, b := sectors(t, s1), sectors(t, s2); a != 2048 || b != 4096 {
			t.Errorf("the disks have %d and %d sectors", a, b)
		}
		if b, err := os.ReadFile(pid); err != nil || string(b) != fmt.Sprintln(p.cmd.Process.Pid) {
			t.Errorf("the pid file holds %q, %v", b, err)
		}
		p.signal(sig)
		p.ends(exitOK, "stopping")
		gone(t, s1, s2, pid)
		for _, want := range []string{"loop=1", "poller=", "why=", "engine=", "durability=", "align="} {
			if !strings.Contains(p.log.String(), want) {
				t.Errorf("the log does not say %s", want)
			}
		}
	}
}

// A signal that is sent twice at once, as timeout(1) does, is one signal.
func TestAnEchoOfTheSignalIsNoSecondOne(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	p := spawn(t, nil, "serve", "--disk", "driver=mem,size=1M", "--vhost-user", socket)
	p.ready()
	p.signal(syscall.SIGTERM)
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended already
	p.ends(exitOK, "stopping")
}

// A disk that does not answer keeps the first signal waiting; the second one ends all the same, and leaves no socket.
func TestASecondSignalEndsAtOnce(t *testing.T) {
	dir := t.TempDir()
	socket, pid := filepath.Join(dir, "s"), filepath.Join(dir, "pid")
	p := spawn(t, nil, "serve", "--disk", "driver=null,size=1M,latency=1h", "--vhost-user", socket, "--pidfile", pid)
	p.ready()
	g, err := newGuest(socket)
	if err != nil {
		t.Fatal(err)
	}
	defer g.close()
	if err := g.readAndForget(); err != nil {
		t.Fatal(err)
	}
	if err := g.taken(patience); err != nil {
		t.Fatal(err)
	}
	p.signal(syscall.SIGTERM)
	p.logged("stopping")
	time.Sleep(2 * echoMax) // what comes sooner is an echo
	p.signal(syscall.SIGTERM)
	p.ends(exitFailure, "ended by a second signal")
	gone(t, socket, pid)
}

func TestSocketsOfTheDeadAndTheLiving(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	args := []string{"serve", "--disk", "driver=mem,size=1M", "--vhost-user", socket}
	first := spawn(t, nil, args...)
	first.ready()
	spawn(t, nil, args...).ends(exitFailure, "a server is running on this socket")
	if n := sectors(t, socket); n != 2048 {
		t.Errorf("the first server's disk has %d sectors", n)
	}
	first.signal(syscall.SIGKILL)
	first.status()
	if _, err := os.Lstat(socket); err != nil {
		t.Fatalf("the killed server left no socket behind: %v", err)
	}
	second := spawn(t, nil, args...)
	second.ready()
	if n := sectors(t, socket); n != 2048 {
		t.Errorf("the second server's disk has %d sectors", n)
	}
	second.signal(syscall.SIGTERM)
	second.ends(exitOK, "")
}

func TestAFailedStartSaysWhyAndIsNotReady(t *testing.T) {
	dir := t.TempDir()
	pid := filepath.Join(dir, "pid")
	p := spawn(t, nil, "serve", "--disk", dir+"/none", "--vhost-user", dir+"/s", "--pidfile", pid)
	p.ends(exitFailure, "no such file or directory")
	if b, err := io.ReadAll(p.out); err != nil || len(b) != 0 {
		t.Errorf("standard output: %q, %v", b, err)
	}
	gone(t, dir+"/s", pid)
}

func TestOneImageHasOneWriter(t *testing.T) {
	dir := t.TempDir()
	disk := image(t, dir, 1<<20)
	serve := func(options, socket string) *process {
		return spawn(t, nil, "serve", "--disk", disk+options, "--vhost-user", filepath.Join(dir, socket))
	}
	first := serve("", "s1")
	first.ready()
	serve("", "s2").ends(exitFailure, "another process")
	serve(",readonly", "s2").ends(exitFailure, "another process")
	onlooker := serve(",readonly,lock=shared", "s3")
	onlooker.ready()
	first.signal(syscall.SIGTERM)
	first.ends(exitOK, "")
	readers := []*process{serve(",readonly", "s4"), serve(",readonly", "s5")}
	for _, r := range readers {
		r.ready()
	}
	serve("", "s6").ends(exitFailure, "another process")
	for _, p := range append(readers, onlooker) {
		p.signal(syscall.SIGTERM)
		p.ends(exitOK, "")
	}
}

// QEMU and we refuse each other, and let each other look on.
func TestImageLocksAreQEMUs(t *testing.T) {
	for _, tool := range []string{"qemu-img", "qemu-io"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("needs %s (apt-get install qemu-utils)", tool)
		}
	}
	dir := t.TempDir()
	disk, socket := image(t, dir, 1<<20), filepath.Join(dir, "s")
	args := []string{"serve", "--disk", disk, "--vhost-user", socket}

	p := spawn(t, nil, args...)
	p.ready()
	for _, c := range []struct {
		refused bool
		command []string
	}{
		{true, []string{"qemu-img", "convert", "-f", "raw", "-O", "raw", disk, disk + ".copy"}},
		{false, []string{"qemu-img", "convert", "-U", "-f", "raw", "-O", "raw", disk, disk + ".copy"}},
		{true, []string{"qemu-io", "-f", "raw", "-c", "write 0 512", disk}},
	} {
		out, err := exec.Command(c.command[0], c.command[1:]...).CombinedOutput()
		if c.refused != (err != nil) || c.refused && !strings.Contains(string(out), "lock") {
			t.Errorf("%v while sluice writes: %v\n%s", c.command, err, out)
		}
	}
	p.signal(syscall.SIGTERM)
	p.ends(exitOK, "")

	// The other way round: qemu-io holds the image until its standard input ends.
	qemu := exec.Command("qemu-io", "-f", "raw", disk)
	in, err := qemu.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := qemu.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := qemu.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(in, "write -P 1 0 512\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 4096)); err != nil { // it has answered, so it has the image
		t.Fatal(err)
	}
	spawn(t, nil, args...).ends(exitFailure, "another process")
	in.Close()
	if _, err := io.Copy(io.Discard, out); err != nil {
		t.Error(err)
	}
	if err := qemu.Wait(); err != nil {
		t.Error(err)
	}
	p = spawn(t, nil, args...)
	p.ready()
	p.signal(syscall.SIGTERM)
	p.ends(exitOK, "")
}

// listeners makes listening UNIX sockets as systemd would hand them over.
func listeners(t *testing.T, dir string, names ...string) []*os.File {
	t.Helper()
	var files []*os.File
	for _, name := range names {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, name), Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		f, err := l.File()
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		t.Cleanup(func() { f.Close() })
		files = append(files, f)
	}
	return files
}

// activated hands files over, with LISTEN_PID right and the other variables as given.
func activated(files []*os.File, env ...string) func(*exec.Cmd) {
	return func(cmd *exec.Cmd) {
		cmd.ExtraFiles = files
		cmd.Env = append(append(cmd.Env, asActivated+"=1"), env...)
	}
}

func TestSocketActivation(t *testing.T) {
	dir := t.TempDir()
	files := listeners(t, dir, "a", "b")
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer notify.Close()
	p := spawn(t, activated(files, "LISTEN_FDS=2", "LISTEN_FDNAMES=first:second", "NOTIFY_SOCKET="+filepath.Join(dir, "notify")),
		"serve", "--disk", "driver=mem,size=1M", "--vhost-user", "systemd:second", "--disk", "driver=mem,size=2M", "--vhost-user", "systemd:0")
	p.ready()
	if a, b := sectors(t, filepath.Join(dir, "a")), sectors(t, filepath.Join(dir, "b")); a != 4096 || b != 2048 {
		t.Errorf("socket a has a disk of %d sectors and b one of %d", a, b)
	}
	p.signal(syscall.SIGTERM)
	p.ends(exitOK, "")
	for _, want := range []string{"READY=1", "STOPPING=1"} {
		var b [64]byte
		if err := notify.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		if n, err := notify.Read(b[:]); err != nil || string(b[:n]) != want {
			t.Errorf("the service manager heard %q, %v; want %s", b[:n], err, want)
		}
	}
	for _, name := range []string{"a", "b"} { // they are systemd's
		if _, err := os.Lstat(filepath.Join(dir, name)); err != nil {
			t.Errorf("the socket file that was handed in is gone: %v", err)
		}
	}
}

func TestSocketActivationThatMakesNoSense(t *testing.T) {
	dir := t.TempDir()
	files := listeners(t, dir, "a", "b")
	disk := []string{"serve", "--disk", "driver=mem,size=1M", "--vhost-user"}
	wrongPID := func(cmd *exec.Cmd) {
		cmd.ExtraFiles = files
		cmd.Env = append(cmd.Env, "LISTEN_PID=1", "LISTEN_FDS=2")
	}
	for name, c := range map[string]struct {
		change func(*exec.Cmd)
		export string
		want   string
	}{
		"zero":           {activated(files, "LISTEN_FDS=0"), "systemd:0", "LISTEN_FDS is 0"},
		"garbage":        {activated(files, "LISTEN_FDS=two"), "systemd:0", `LISTEN_FDS is "two"`},
		"too many":       {activated(files, "LISTEN_FDS=2"), "systemd:0", `socket 1 (named "") belongs to no export`},
		"more than are":  {activated(files[:1], "LISTEN_FDS=2"), "systemd:1", "file descriptor 4"},
		"wrong name":     {activated(files, "LISTEN_FDS=2", "LISTEN_FDNAMES=a:b"), "systemd:c", `["a" "b"]`},
		"wrong pid":      {wrongPID, "systemd:0", `none was handed in (LISTEN_PID is "1"`},
		"none":           {nil, "systemd:0", "none was handed in (LISTEN_PID is not set)"},
		"not a socket":   {func(cmd *exec.Cmd) { cmd.ExtraFiles = []*os.File{os.Stderr} }, "fd:3", "file descriptor 3 is not a socket"},
		"none inherited": {nil, "fd:77", "file descriptor 77 was not handed in"},
	} {
		t.Run(name, func(t *testing.T) {
			spawn(t, c.change, append(disk, c.export)...).ends(exitFailure, c.want)
		})
	}
	// Variables for another process are no reason to refuse what does not need them.
	p := spawn(t, wrongPID, append(disk, filepath.Join(dir, "own"))...)
	p.ready()
	p.signal(syscall.SIGTERM)
	p.ends(exitOK, "")
}

func TestDescriptorsAreInherited(t *testing.T) {
	dir := t.TempDir()
	files := listeners(t, dir, "a")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	p := spawn(t, func(cmd *exec.Cmd) { cmd.ExtraFiles = []*os.File{files[0], w} },
		"serve", "--disk", "driver=mem,size=1M", "--vhost-user", "fd:3", "--ready-fd", "4", "--log-format", "json")
	w.Close()
	if b, err := io.ReadAll(r); err != nil || string(b) != "ready\n" { // it is closed after that
		t.Errorf("the descriptor says %q, %v", b, err)
	}
	if n := sectors(t, filepath.Join(dir, "a")); n != 2048 {
		t.Errorf("the disk has %d sectors", n)
	}
	p.signal(syscall.SIGTERM)
	p.ends(exitOK, "")
	for _, line := range strings.Split(strings.TrimSpace(p.log.String()), "\n") {
		if !json.Valid([]byte(line)) {
			t.Errorf("not JSON: %s", line)
		}
	}
}

// Whoever reads the log and the ready line may go away; the disk stays.
func TestReadersMayGoAway(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	broken, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	broken.Close()
	r, ready, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	p := spawn(t, func(cmd *exec.Cmd) { cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = w, w, []*os.File{ready} },
		"serve", "--disk", "driver=mem,size=1M", "--vhost-user", socket, "--ready-fd", "3")
	w.Close()
	ready.Close()
	if b, err := io.ReadAll(r); err != nil || string(b) != "ready\n" {
		t.Errorf("the descriptor says %q, %v", b, err)
	}
	if n := sectors(t, socket); n != 2048 {
		t.Errorf("the disk has %d sectors", n)
	}
	p.signal(syscall.SIGTERM)
	if status := p.status(); status != exitOK {
		t.Errorf("status %d", status)
	}
}

func TestDoctorExaminesFiles(t *testing.T) {
	dir := t.TempDir()
	disk := image(t, dir, 1<<20)
	writer := spawn(t, nil, "serve", "--disk", disk, "--vhost-user", filepath.Join(dir, "s"))
	writer.ready() // doctor looks on all the same
	cmd := program(t.Context(), "doctor", "--json", disk)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var r report
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatal(err)
	}
	if len(r.Findings) == 0 || len(r.Files) != 1 || r.Files[0].Size != 1<<20 || r.Files[0].Engine == "" || r.Files[0].Error != "" {
		t.Errorf("%s", out)
	}
	writer.signal(syscall.SIGTERM)
	writer.ends(exitOK, "")
	qcow2 := filepath.Join(dir, "disk.qcow2")
	if out, err := program(t.Context(), "img", "create", "-q", "-f", "qcow2", qcow2, "3M").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	out, err = program(t.Context(), "doctor", qcow2).CombinedOutput()
	if err != nil || !strings.Contains(string(out), "format      qcow2") || !strings.Contains(string(out), "(3145728 bytes)") {
		t.Errorf("an image: %v\n%s", err, out)
	}
	out, err = program(t.Context(), "doctor", disk, dir+"/none").CombinedOutput()
	if exit := new(exec.ExitError); !errors.As(err, &exit) || exit.ExitCode() != exitFailure || !strings.Contains(string(out), "1 of 2 paths could not be looked at") {
		t.Errorf("a path that is not there: %v\n%s", err, out)
	}
}
