// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Flags of [Preadv2] and [Pwritev2].
const (
	RWF_DSYNC  = unix.RWF_DSYNC  // this write is durable, with what is needed to read it back, before it is answered
	RWF_NOWAIT = unix.RWF_NOWAIT // EAGAIN instead of waiting; EOPNOTSUPP where the file cannot tell
)

// Modes of [Fallocate].
const (
	FALLOC_FL_KEEP_SIZE  = unix.FALLOC_FL_KEEP_SIZE
	FALLOC_FL_PUNCH_HOLE = unix.FALLOC_FL_PUNCH_HOLE
	FALLOC_FL_ZERO_RANGE = unix.FALLOC_FL_ZERO_RANGE
)

// Types of file systems that live in memory, as [StatfsType] tells them.
const (
	TMPFS_MAGIC     = unix.TMPFS_MAGIC
	RAMFS_MAGIC     = unix.RAMFS_MAGIC
	HUGETLBFS_MAGIC = 0x958458f6
)

// Types of local file systems on a disk.
const (
	EXT4_SUPER_MAGIC  = unix.EXT4_SUPER_MAGIC // ext2 and ext3, too
	XFS_SUPER_MAGIC   = unix.XFS_SUPER_MAGIC
	BTRFS_SUPER_MAGIC = unix.BTRFS_SUPER_MAGIC
)

// IOV_MAX is how many segments one transfer may have (UIO_MAXIOV).
const IOV_MAX = 1024

// Preadv2 reads into the segments of vs from offset on (preadv2(2)). It allocates nothing.
func Preadv2(fd int, vs []IOVec, offset int64, flags int) (int, error) {
	return vectored(unix.SYS_PREADV2, fd, vs, offset, flags)
}

// Pwritev2 writes the segments of vs from offset on (pwritev2(2)). It allocates nothing.
func Pwritev2(fd int, vs []IOVec, offset int64, flags int) (int, error) {
	return vectored(unix.SYS_PWRITEV2, fd, vs, offset, flags)
}

func vectored(trap uintptr, fd int, vs []IOVec, offset int64, flags int) (int, error) {
	// The offset goes in two halves, of which a 64-bit kernel uses the first alone.
	// SAFETY: the kernel uses the array and the segments during the call; the slice keeps them alive.
	n, _, e := syscall.Syscall6(trap, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(vs))), uintptr(len(vs)),
		uintptr(offset), 0, uintptr(flags))
	if e != 0 {
		return 0, e
	}
	return int(n), nil
}

// Fdatasync makes what was written to fd durable, with the metadata needed to read it back (fdatasync(2)).
func Fdatasync(fd int) error {
	_, _, e := syscall.Syscall(unix.SYS_FDATASYNC, uintptr(fd), 0, 0)
	if e != 0 {
		return e
	}
	return nil
}

// Fallocate changes how [offset, offset+length) of a file is allocated (fallocate(2)).
func Fallocate(fd int, mode uint32, offset, length int64) error {
	_, _, e := syscall.Syscall6(unix.SYS_FALLOCATE, uintptr(fd), uintptr(mode), uintptr(offset), uintptr(length), 0, 0)
	if e != 0 {
		return e
	}
	return nil
}

// BlkDiscard tells a block device that a range is of no more use (ioctl BLKDISCARD).
func BlkDiscard(fd int, offset, length int64) error {
	return blkRange(fd, unix.BLKDISCARD, offset, length)
}

// BlkZeroout makes a range of a block device read as zeros, without giving it back (ioctl BLKZEROOUT).
func BlkZeroout(fd int, offset, length int64) error {
	return blkRange(fd, unix.BLKZEROOUT, offset, length)
}

func blkRange(fd int, req uintptr, offset, length int64) error {
	span := [2]uint64{uint64(offset), uint64(length)}
	// SAFETY: the kernel reads two words of span during the call and keeps no reference.
	_, _, e := syscall.Syscall(unix.SYS_IOCTL, uintptr(fd), req, uintptr(unsafe.Pointer(&span)))
	if e != 0 {
		return e
	}
	return nil
}

// StatfsType is the magic number of the file system that fd lies on (fstatfs(2)).
func StatfsType(fd int) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return 0, err
	}
	return int64(st.Type), nil
}

// FileMode is the kernel's st_mode of fd (fstat(2)); the S_IFMT bits tell what kind of file it is.
func FileMode(fd int) (uint32, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, err
	}
	return st.Mode, nil
}

// FileFlags are the status flags that fd was opened with (fcntl F_GETFL).
func FileFlags(fd int) (int, error) {
	return unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
}
