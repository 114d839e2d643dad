// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// Flags of [MemfdCreate].
const (
	MFD_CLOEXEC       = unix.MFD_CLOEXEC
	MFD_ALLOW_SEALING = unix.MFD_ALLOW_SEALING
	MFD_HUGETLB       = unix.MFD_HUGETLB
)

// MemfdCreate is memfd_create(2): a file in memory, of size 0, open for reading and writing.
func MemfdCreate(name string, flags int) (fd int, err error) {
	return unix.MemfdCreate(name, flags)
}

// Ftruncate is ftruncate(2).
func Ftruncate(fd int, size int64) error {
	for {
		if err := unix.Ftruncate(fd, size); err != unix.EINTR {
			return err
		}
	}
}

// FileSize is what fstat(2) says of fd: the size in bytes and the preferred block, which on hugetlbfs is the size of
// its pages.
func FileSize(fd int) (size, block int64, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, 0, err
	}
	return st.Size, int64(st.Blksize), nil
}

// MmapShared maps length bytes of fd at offset for reading and writing, shared with everybody else who maps the file.
// It reserves no swap space and touches no page, so its cost does not depend on length. The mapping keeps the file
// alive: fd may be closed. [MunmapShared] ends it.
func MmapShared(fd int, offset int64, length uintptr) (unsafe.Pointer, error) {
	return unix.MmapPtr(fd, offset, nil, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_NORESERVE)
}

// MunmapShared ends a mapping of [MmapShared]: the same address and length.
func MunmapShared(addr unsafe.Pointer, length uintptr) error {
	return unix.MunmapPtr(addr, length)
}

// PageSize is the size of a page of memory in bytes.
func PageSize() int { return unix.Getpagesize() }
