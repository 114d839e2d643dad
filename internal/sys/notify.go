// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"os"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// IsEventfd tells whether fd is an eventfd, by the name that /proc gives it. Where /proc cannot be read, anything that is
// not a file, directory or device passes.
func IsEventfd(fd int) bool {
	name, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	if err == nil {
		return name == "anon_inode:[eventfd]"
	}
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == 0
}

// EventfdTake empties an eventfd that somebody else shares, without waiting and without making it non-blocking: EAGAIN
// when it is empty. It needs Linux 5.8 (RWF_NOWAIT on eventfds). It allocates nothing.
func EventfdTake(fd int) error {
	var v uint64
	iov := IOVec{Base: (*byte)(unsafe.Pointer(&v)), Len: 8} // SAFETY: 8 bytes that outlive the call
	// SAFETY: one iovec, which the kernel reads during the call and keeps no reference to. Offset -1 is the file position.
	_, _, e := syscall.Syscall6(unix.SYS_PREADV2, uintptr(fd), uintptr(unsafe.Pointer(&iov)), 1,
		^uintptr(0), ^uintptr(0), unix.RWF_NOWAIT)
	if e != 0 {
		return e
	}
	return nil
}

// EventfdHasRoom tells whether adding one to the counter would not wait now.
func EventfdHasRoom(fd int) bool {
	p := unix.PollFd{Fd: int32(fd), Events: unix.POLLOUT}
	// SAFETY: one pollfd, which the kernel reads and writes during the call only.
	n, _, e := syscall.Syscall(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&unix.Timespec{})))
	return e == 0 && n == 1 && p.Revents&unix.POLLOUT != 0
}
