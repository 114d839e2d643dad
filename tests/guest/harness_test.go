// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/guestvm"
	"github.com/sluice-blk/sluice/internal/vhosttest"
	"github.com/sluice-blk/sluice/internal/vhostuser"
)

// server is a sluice serve of its own process.
type server struct {
	t     *testing.T
	cmd   *exec.Cmd
	pid   int // sluice's, also when something else started it
	log   *lines
	ended chan error
}

// lines collects what a process says.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// serve starts sluice serve with these arguments and waits until it is ready. It is ended with the test, at the latest.
func serve(t *testing.T, args ...string) *server { return serveUnder(t, nil, args...) }

// serveUnder has another program start it, such as strace with its own arguments.
func serveUnder(t *testing.T, starter []string, args ...string) *server {
	t.Helper()
	pidFile := filepath.Join(t.TempDir(), "pid")
	argv := append(append(starter, built.sluice, "serve", "--pidfile", pidFile), args...)
	s := &server{t: t, cmd: exec.Command(argv[0], argv[1:]...), log: &lines{}, ended: make(chan error, 1)}
	s.cmd.Stderr = s.log
	stdout, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.kill()
		if t.Failed() {
			t.Logf("the server's log:\n%s", s.log)
		}
	})
	ready := make(chan error, 1)
	go func() {
		word := make([]byte, len("ready\n"))
		_, err := io.ReadFull(stdout, word)
		ready <- err
		_, _ = io.Copy(io.Discard, stdout) // ends with the process
		s.ended <- s.cmd.Wait()
	}()
	select {
	case err = <-ready:
	case <-time.After(patience):
		err = errors.New("no word of it")
	}
	if err != nil {
		t.Fatalf("server is not ready: %v", err)
	}
	text, err := os.ReadFile(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	if s.pid, err = strconv.Atoi(strings.TrimSpace(string(text))); err != nil {
		t.Fatal(err)
	}
	return s
}

// stop asks the server to end and checks that it does so with status 0.
func (s *server) stop() {
	s.t.Helper()
	if err := syscall.Kill(s.pid, syscall.SIGTERM); err != nil {
		s.t.Fatalf("the server is not there any more: %v", err)
	}
	if err := s.wait(); err != nil {
		s.t.Errorf("the server ended with %v", err)
	}
}

// kill ends it as a crash would. A second call does no harm.
func (s *server) kill() {
	if s.pid != 0 && s.alive() {
		_ = syscall.Kill(s.pid, syscall.SIGKILL)
		_ = s.wait()
	}
	if s.cmd.ProcessState == nil {
		_ = s.cmd.Process.Kill()
	}
}

func (s *server) wait() error {
	select {
	case err := <-s.ended:
		s.ended <- err // for whoever asks again
		return err
	case <-time.After(patience):
		return fmt.Errorf("not ended after %v", patience)
	}
}

func (s *server) alive() bool {
	select {
	case err := <-s.ended:
		s.ended <- err
		return false
	default:
		return true
	}
}

// idle returns when the session before has ended, with all that the guest had in flight: only then the server answers
// the next front-end, which is this one.
func idle(t *testing.T, socket string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	f, err := vhosttest.Dial(ctx, socket)
	if err != nil {
		t.Fatal(err)
	}
	f.Timeout = patience
	defer f.Close()
	if err := f.Negotiate(vhostuser.FeatureVersion1|vhostuser.FeatureProtocolFeatures, vhostuser.ProtocolReplyAck); err != nil {
		t.Fatalf("a fresh front-end is not served: %v", err)
	}
}

// image makes a sparse file for a disk.
func image(t *testing.T, name string, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	return path
}

// socketPath is short, as the kernel wants it, which t.TempDir's need not be.
func socketPath(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sluice-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return filepath.Join(dir, "disk.sock")
}

// machine is the smallest guest that does the job; tests change what they need.
func machine(script string, disks ...guestvm.Disk) guestvm.Config {
	return guestvm.Config{
		Kernel: built.kernel, Initrd: []string{built.minimal}, Script: script, MemMiB: 256, Disks: disks, Timeout: 2 * patience,
	}
}

// boot starts a guest, which is ended with the test.
func boot(t *testing.T, cfg guestvm.Config) *guestvm.Guest {
	t.Helper()
	g, err := guestvm.Boot(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(g.Kill)
	return g
}

// wait waits for the script and checks that it succeeded.
func wait(t *testing.T, g *guestvm.Guest) string {
	t.Helper()
	r, err := g.Wait()
	if err != nil {
		t.Fatalf("%v\noutput: %s", err, r.Output)
	}
	if r.Status != 0 {
		t.Fatalf("the guest's script ended with status %d:\n%s", r.Status, r.Output)
	}
	t.Logf("guest: boot %v, script %v (%s)", r.Boot.Round(time.Millisecond), r.Script.Round(time.Millisecond), r.Accel)
	return string(r.Output)
}

// run boots a guest and answers what its script said, by the key at the beginning of each line.
func run(t *testing.T, cfg guestvm.Config) map[string]string {
	t.Helper()
	return said(wait(t, boot(t, cfg)))
}

func said(output string) map[string]string {
	m := make(map[string]string)
	for _, line := range strings.Split(output, "\n") {
		if key, value, ok := strings.Cut(line, ": "); ok {
			m[key] = value
		}
	}
	return m
}

func expect(t *testing.T, got map[string]string, want map[string]string) {
	t.Helper()
	for key, value := range want {
		if got[key] != value {
			t.Errorf("the guest says %q of %s, want %q", got[key], key, value)
		}
	}
}

// waitFor waits until the guest's script has printed text.
func waitFor(t *testing.T, g *guestvm.Guest, text string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := g.WaitOutput(ctx, text); err != nil {
		r := "" // the result is there only when the guest has ended
		select {
		case <-g.Done():
			result, _ := g.Wait()
			r = string(result.Output)
		default:
		}
		t.Fatalf("%v\n%s", err, r)
	}
}

func sha256File(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}
