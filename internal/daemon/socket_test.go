// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/sys"
)

// stale leaves a socket file behind, as a server that was killed does.
func stale(t *testing.T, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestStaleSocketIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	stale(t, path)
	s, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(c.Close(), s.Close(), s.Close()); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket file is still there: %v", err)
	}
}

func TestLiveSocketIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	s, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if _, err := ListenUnix(path); !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), "a server is running on this socket") {
		t.Errorf("a second server: %v", err)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the first server no longer listens: %v", err)
	}
	c.Close()
}

func TestWhatIsNoSocketIsLeftAlone(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "f")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(dir, "l")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{file, link, dir} {
		if _, err := ListenUnix(path); err == nil || !strings.Contains(err.Error(), "is not a socket") {
			t.Errorf("listen on %s: %v", path, err)
		}
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "precious" {
		t.Errorf("the file holds %q, %v", b, err)
	}
	long := filepath.Join(dir, strings.Repeat("x", socketPathMax))
	if _, err := ListenUnix(long); err == nil || !strings.Contains(err.Error(), "use a shorter directory") {
		t.Errorf("listen on a long path: %v", err)
	}
}

// A server that ends late does not take away the socket of the one that replaced it.
func TestAnotherServersSocketStays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	old, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path, path+".gone"); err != nil {
		t.Fatal(err)
	}
	s, err := ListenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := old.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the new server's socket is gone: %v", err)
	}
}

func TestDescriptorsThatAreNoListeners(t *testing.T) {
	file, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	a, b, err := sys.Socketpair()
	if err != nil {
		t.Fatal(err)
	}
	defer sys.Close(a)
	defer sys.Close(b)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	tcpFile, err := tcp.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer tcpFile.Close()
	handed, err := sys.Dup(int(tcpFile.Fd())) // ListenerFromFD closes it
	if err != nil {
		t.Fatal(err)
	}
	for fd, want := range map[int]string{
		int(file.Fd()): "is not a socket", a: "does not listen", handed: "is not a UNIX socket", 1 << 20: "was not handed in",
	} {
		if _, err := ListenerFromFD(fd); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("descriptor %d: %v; want %q", fd, err, want)
		}
	}
}
