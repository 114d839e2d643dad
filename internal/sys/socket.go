// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"golang.org/x/sys/unix"
)

// Flags that recvmsg(2) gives back, under the kernel's names.
const (
	MSG_CTRUNC = unix.MSG_CTRUNC // control data did not fit, or not every descriptor could be installed
)

// What [FileType] tells, under the kernel's names. An eventfd, as every anonymous inode, has the type 0.
const (
	S_IFSOCK = unix.S_IFSOCK
	S_IFIFO  = unix.S_IFIFO
	S_IFCHR  = unix.S_IFCHR
	S_IFREG  = unix.S_IFREG
)

// File status flags that [FcntlGetfl] tells, under the kernel's names.
const O_NONBLOCK = unix.O_NONBLOCK

// RightsSpace is the room in bytes that the control data of recvmsg(2) needs for n descriptors.
func RightsSpace(n int) int { return unix.CmsgSpace(4 * n) }

// UnixRights is the control data that sends the descriptors (SCM_RIGHTS, unix(7)). They stay the caller's.
func UnixRights(fds ...int) []byte { return unix.UnixRights(fds...) }

// ParseUnixRights appends to dst the descriptors that the control data brought. They are the caller's to close, whether
// there is an error or not.
func ParseUnixRights(dst []int, control []byte) ([]int, error) {
	if len(control) == 0 {
		return dst, nil
	}
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return dst, err
	}
	for i := range messages {
		if messages[i].Header.Level != unix.SOL_SOCKET || messages[i].Header.Type != unix.SCM_RIGHTS {
			continue
		}
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return dst, err
		}
		dst = append(dst, fds...)
	}
	return dst, nil
}

// Socketpair is two connected stream sockets of the family AF_UNIX, closed on exec (socketpair(2)).
func Socketpair() (a, b int, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	return fds[0], fds[1], err
}

// Dup is another descriptor of the same open file, closed on exec (F_DUPFD_CLOEXEC, fcntl(2)). The file's status flags
// and position are shared with the first.
func Dup(fd int) (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0) }

// FcntlGetfl is the file's status flags (F_GETFL, fcntl(2)). They belong to the open file, and so to every process that
// has a descriptor of it: a descriptor that came over a socket can be asked for them, never given others.
func FcntlGetfl(fd int) (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0) }

// FcntlGetfd is the descriptor's own flags (F_GETFD, fcntl(2)); bit 0 is close-on-exec.
func FcntlGetfd(fd int) (int, error) { return unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0) }

// FileType is the type of the file behind fd: one of the S_IF constants, or 0 for an anonymous inode (fstat(2)).
func FileType(fd int) (uint32, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, err
	}
	return st.Mode & unix.S_IFMT, nil
}

// Close is close(2). The descriptor is gone even when there is an error.
func Close(fd int) error { return unix.Close(fd) }
