// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Flags of [Open].
const (
	O_RDONLY  = unix.O_RDONLY
	O_RDWR    = unix.O_RDWR
	O_DIRECT  = unix.O_DIRECT
	O_CLOEXEC = unix.O_CLOEXEC
	O_CREAT   = unix.O_CREAT
	O_EXCL    = unix.O_EXCL
)

// Open is open(2). A signal does not end it.
func Open(path string, flags int, mode uint32) (fd int, err error) {
	for {
		fd, err = unix.Open(path, flags, mode)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// Stat_t is the kernel's struct stat.
type Stat_t = unix.Stat_t

// Fstat is fstat(2).
func Fstat(fd int, st *Stat_t) error {
	for {
		if err := unix.Fstat(fd, st); err != unix.EINTR {
			return err
		}
	}
}

// DeviceNumber splits a device number as fstat gives it.
func DeviceNumber(dev uint64) (major, minor uint32) { return unix.Major(dev), unix.Minor(dev) }

// Statx_t is the kernel's struct statx.
type Statx_t = unix.Statx_t

// STATX_DIOALIGN asks for Dio_mem_align and Dio_offset_align, which are valid where it is set in Mask too (Linux 6.1).
const STATX_DIOALIGN = unix.STATX_DIOALIGN

// StatxFd is statx(2) of an open file.
func StatxFd(fd int, mask int, st *Statx_t) error {
	return unix.Statx(fd, "", unix.AT_EMPTY_PATH, mask, st)
}

// What [Lseek] looks for.
const (
	SEEK_SET  = 0
	SEEK_END  = 2
	SEEK_DATA = unix.SEEK_DATA
	SEEK_HOLE = unix.SEEK_HOLE
)

// Lseek is lseek(2). It moves the position of the open file, which reads and writes at an offset do not use.
func Lseek(fd int, offset int64, whence int) (int64, error) {
	return unix.Seek(fd, offset, whence)
}

// Kinds of lock of [OfdSetlk] and [OfdGetlk].
const (
	F_RDLCK = unix.F_RDLCK
	F_WRLCK = unix.F_WRLCK
	F_UNLCK = unix.F_UNLCK
)

// OfdSetlk sets or clears a lock on length bytes at start that belongs to the open file, not to the process
// (fcntl F_OFD_SETLK). It never waits: EAGAIN tells that somebody else's lock is in the way.
func OfdSetlk(fd int, kind int16, start, length int64) error {
	lk := unix.Flock_t{Type: kind, Start: start, Len: length}
	for {
		if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_SETLK, &lk); err != unix.EINTR {
			return err
		}
	}
}

// OfdGetlk tells the kind of a lock of another open file that is in the way of setting this one; F_UNLCK is none
// (fcntl F_OFD_GETLK).
func OfdGetlk(fd int, kind int16, start, length int64) (int16, error) {
	lk := unix.Flock_t{Type: kind, Start: start, Len: length}
	if err := unix.FcntlFlock(uintptr(fd), unix.F_OFD_GETLK, &lk); err != nil {
		return 0, err
	}
	return lk.Type, nil
}

// BlkGetSize64 is the size of a block device in bytes (ioctl BLKGETSIZE64).
func BlkGetSize64(fd int) (uint64, error) {
	var size uint64
	// SAFETY: the kernel writes one 64-bit word during the call and keeps no reference.
	_, _, e := syscall.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.BLKGETSIZE64, uintptr(unsafe.Pointer(&size)))
	if e != 0 {
		return 0, e
	}
	return size, nil
}

// BlkSszGet is the logical block size of a block device (ioctl BLKSSZGET).
func BlkSszGet(fd int) (int, error) { return unix.IoctlGetInt(fd, unix.BLKSSZGET) }

// BlkPbszGet is the physical block size of a block device (ioctl BLKPBSZGET).
func BlkPbszGet(fd int) (int, error) {
	var size uint32
	// SAFETY: the kernel writes one 32-bit word during the call and keeps no reference.
	_, _, e := syscall.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.BLKPBSZGET, uintptr(unsafe.Pointer(&size)))
	if e != 0 {
		return 0, e
	}
	return int(size), nil
}

// Pread reads into b from offset on (pread64(2)).
func Pread(fd int, b []byte, offset int64) (int, error) {
	for {
		n, err := unix.Pread(fd, b, offset)
		if err != unix.EINTR {
			return n, err
		}
	}
}

// MAP_NORESERVE lets [Mmap] map more memory than there is, to be taken page by page.
const MAP_NORESERVE = unix.MAP_NORESERVE

// MADV_DONTNEED of private memory lets it read as zeros again.
const MADV_DONTNEED = unix.MADV_DONTNEED

// Madvise is madvise(2).
func Madvise(b []byte, advice int) error { return unix.Madvise(b, advice) }
