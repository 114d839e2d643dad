// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Flags of [Eventfd], under the kernel's names.
const (
	EFD_CLOEXEC   = unix.EFD_CLOEXEC
	EFD_NONBLOCK  = unix.EFD_NONBLOCK
	EFD_SEMAPHORE = unix.EFD_SEMAPHORE
)

// Eventfd makes a counter that starts at initval (eventfd(2)).
func Eventfd(initval uint, flags int) (int, error) { return unix.Eventfd(initval, flags) }

// EventfdRead takes the counter and sets it to zero. A counter of zero gives EAGAIN on a non-blocking descriptor and
// waits on any other. It allocates nothing.
func EventfdRead(fd int) (uint64, error) {
	var v uint64
	// SAFETY: the kernel writes 8 bytes to v during the call and keeps no reference.
	n, _, e := syscall.Syscall(syscall.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&v)), unsafe.Sizeof(v))
	switch {
	case e != 0:
		return 0, e
	case n != unsafe.Sizeof(v):
		return 0, syscall.EIO // not an eventfd: they hand over 8 bytes or none
	}
	return v, nil
}

// EventfdWrite adds v to the counter. A counter that would pass its limit of 2^64-2 gives EAGAIN on a non-blocking
// descriptor and waits on any other. It allocates nothing.
func EventfdWrite(fd int, v uint64) error {
	// SAFETY: the kernel reads 8 bytes of v during the call and keeps no reference.
	n, _, e := syscall.Syscall(syscall.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&v)), unsafe.Sizeof(v))
	switch {
	case e != 0:
		return e
	case n != unsafe.Sizeof(v):
		return syscall.EIO
	}
	return nil
}
