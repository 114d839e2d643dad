// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Names of poll(2) and epoll(7), under the kernel's names. The bits of both are the same.
const (
	POLLIN   = unix.POLLIN
	POLLOUT  = unix.POLLOUT
	POLLERR  = unix.POLLERR
	POLLHUP  = unix.POLLHUP
	POLLNVAL = unix.POLLNVAL

	EPOLLET = unix.EPOLLET

	EPOLL_CTL_ADD = unix.EPOLL_CTL_ADD
	EPOLL_CTL_DEL = unix.EPOLL_CTL_DEL
	EPOLL_CTL_MOD = unix.EPOLL_CTL_MOD
)

// EpollEvent is the kernel's struct epoll_event for this architecture; Fd and Pad together are its 64 bits of user data.
type EpollEvent = unix.EpollEvent

// PollFd is the kernel's struct pollfd. The kernel skips an entry with a negative Fd.
type PollFd = unix.PollFd

// CPUSet is a set of processors, for [SchedSetaffinity].
type CPUSet = unix.CPUSet

// EpollCreate1 makes an epoll instance that is closed on exec (epoll_create1(2)).
func EpollCreate1() (int, error) { return unix.EpollCreate1(unix.EPOLL_CLOEXEC) }

// EpollCtl adds, changes or removes one descriptor (epoll_ctl(2)). ev may be nil for EPOLL_CTL_DEL.
func EpollCtl(epfd, op, fd int, ev *EpollEvent) error {
	// SAFETY: the kernel reads *ev during the call and keeps no reference.
	_, _, e := syscall.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(epfd), uintptr(op), uintptr(fd), uintptr(unsafe.Pointer(ev)), 0, 0)
	if e != 0 {
		return e
	}
	return nil
}

// EpollPwait waits for at most msec milliseconds, for ever when msec is negative, and fills events (epoll_pwait(2)).
// events must not be empty. It allocates nothing.
func EpollPwait(epfd int, events []EpollEvent, msec int) (int, error) {
	// SAFETY: the kernel writes at most len(events) entries during the call and keeps no reference.
	n, _, e := syscall.Syscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(unsafe.SliceData(events))),
		uintptr(len(events)), uintptr(msec), 0, 0)
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}

// EpollPwait2 is [EpollPwait] with nanoseconds (epoll_pwait2(2), Linux 5.11; ENOSYS before).
func EpollPwait2(epfd int, events []EpollEvent, nsec int64) (int, error) {
	var ts unix.Timespec
	var tsp *unix.Timespec
	if nsec >= 0 {
		ts = unix.NsecToTimespec(nsec)
		tsp = &ts
	}
	// SAFETY: as for EpollPwait; the kernel reads *tsp during the call.
	n, _, e := syscall.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(epfd), uintptr(unsafe.Pointer(unsafe.SliceData(events))),
		uintptr(len(events)), uintptr(unsafe.Pointer(tsp)), 0, 0)
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}

// Ppoll waits for at most nsec nanoseconds, for ever when nsec is negative, and fills in Revents (ppoll(2)). It
// allocates nothing.
func Ppoll(fds []PollFd, nsec int64) (int, error) {
	var ts unix.Timespec
	var tsp *unix.Timespec
	if nsec >= 0 {
		ts = unix.NsecToTimespec(nsec)
		tsp = &ts
	}
	// SAFETY: the kernel reads and writes len(fds) entries during the call, reads and may write *tsp, keeps no reference.
	n, _, e := syscall.Syscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(unsafe.SliceData(fds))), uintptr(len(fds)),
		uintptr(unsafe.Pointer(tsp)), 0, 0, 0)
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}

// SchedGetaffinity is the set of processors that the calling thread may run on (sched_getaffinity(2)).
func SchedGetaffinity(set *CPUSet) error { return unix.SchedGetaffinity(0, set) }

// SchedSetaffinity ties the calling thread to the processors of set (sched_setaffinity(2)). The goroutine must be locked
// to its thread.
func SchedSetaffinity(set *CPUSet) error { return unix.SchedSetaffinity(0, set) }
