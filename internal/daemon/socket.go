// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-blk/sluice/internal/sys"
)

// socketPathMax is what sun_path of struct sockaddr_un holds besides its final zero byte (unix(7)).
const socketPathMax = 107

// Socket is a listening UNIX socket that this process made. Safe for concurrent use.
type Socket struct {
	*net.UnixListener
	path string
	made fs.FileInfo // the file at path as it was made, to tell it from one that replaced it

	once sync.Once
	err  error
}

// ListenUnix makes a listening UNIX socket at path. A socket file that a dead server left behind is replaced; one that a
// server still answers on, and a file that is no socket, are refused.
func ListenUnix(path string) (*Socket, error) { return listenUnix(path, &net.ListenConfig{}) }

// ListenPrivate is ListenUnix for a socket that only this process's user may connect to: its mode is 0600 from the start.
func ListenPrivate(path string) (*Socket, error) {
	return listenUnix(path, &net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		const mode = 0o600
		var failed error
		err := c.Control(func(fd uintptr) { failed = sys.Fchmod(int(fd), mode) })
		return errors.Join(err, failed)
	}})
}

func listenUnix(path string, how *net.ListenConfig) (*Socket, error) {
	if len(path) > socketPathMax {
		return nil, fmt.Errorf("listen on %s: the path has %d bytes, the kernel takes %d (use a shorter directory)", path, len(path), socketPathMax)
	}
	if err := removeStale(path); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, err)
	}
	made, err := how.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("listen on %s: %w", path, errnoOf(err))
	}
	l := made.(*net.UnixListener) // which the network "unix" gives
	l.SetUnlinkOnClose(false)     // Close looks first whether the file is still this socket's
	file, err := os.Lstat(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen on %s: %w", path, errnoOf(err)), l.Close())
	}
	return &Socket{UnixListener: l, path: path, made: file}, nil
}

// removeStale removes a socket file on which nobody listens. The kernel tells by refusing the connection.
func removeStale(path string) error {
	fi, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return errnoOf(err)
	case fi.Mode().Type() != fs.ModeSocket:
		return errors.New("the file exists and is not a socket (remove it, or choose another path)")
	}
	const answerMax = 5 * time.Second // connecting is at once or not at all; this bounds a full backlog
	c, err := net.DialTimeout("unix", path, answerMax)
	switch {
	case err == nil, errors.Is(err, syscall.EAGAIN): // somebody listens, the latter with a full backlog
		if err == nil {
			_ = c.Close() // nothing was said, so there is nothing to lose
		}
		return fmt.Errorf("a server is running on this socket (stop it, or choose another path): %w", syscall.EADDRINUSE)
	case errors.Is(err, syscall.ECONNREFUSED):
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove the stale socket: %w", errnoOf(err))
		}
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return nil
	}
	return fmt.Errorf("find out whether a server is running on this socket: %w", errnoOf(err))
}

// Unlink removes the socket file, unless somebody has put another file in its place.
func (s *Socket) Unlink() {
	if now, err := os.Lstat(s.path); err == nil && os.SameFile(now, s.made) {
		_ = os.Remove(s.path) // a file that cannot be removed is replaced by the next server
	}
}

// Close stops listening and removes the socket file as Unlink does. A second call does no harm.
func (s *Socket) Close() error {
	s.once.Do(func() {
		s.Unlink()
		s.err = s.UnixListener.Close()
	})
	return s.err
}

// ListenerFromFD makes a listener of a listening UNIX socket that another process opened. It takes ownership of fd, also
// when it fails after the descriptor turned out to be such a socket. The socket file is the other process's.
func ListenerFromFD(fd int) (net.Listener, error) {
	switch listens, err := sys.SocketListens(fd); {
	case errors.Is(err, syscall.ENOTSOCK):
		return nil, fmt.Errorf("file descriptor %d is not a socket", fd)
	case err != nil:
		return nil, fmt.Errorf("file descriptor %d was not handed in: %w", fd, err)
	case !listens:
		return nil, fmt.Errorf("file descriptor %d is a socket that does not listen", fd)
	}
	if err := sys.SetCloexec(fd); err != nil {
		return nil, fmt.Errorf("file descriptor %d: %w", fd, err)
	}
	f := os.NewFile(uintptr(fd), fmt.Sprintf("fd:%d", fd))
	defer f.Close() // FileListener works on a duplicate
	l, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("file descriptor %d: %w", fd, errnoOf(err))
	}
	if _, ok := l.(*net.UnixListener); !ok {
		return nil, errors.Join(fmt.Errorf("file descriptor %d is not a UNIX socket", fd), l.Close())
	}
	return l, nil
}

// errnoOf strips the wrappers of package net and os, which repeat the path that our messages already name.
func errnoOf(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}
