// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import "unsafe"

// CurrentPosition as an offset reads and writes at the file's own position, like read(2) and write(2). It is also the
// offset for pipes and the like in [SQE.PrepSplice]; others ignore theirs.
const CurrentPosition = ^uint64(0)

// PrepNop prepares a request that does nothing and succeeds.
func (s *SQE) PrepNop() { s.prep(IORING_OP_NOP, -1, 0, 0, 0, 0) }

// PrepRead prepares pread(2): up to len(b) bytes of fd at off. Reads and writes of one segment are cheaper this way than
// as a vector.
func (s *SQE) PrepRead(fd int, b []byte, off uint64) {
	s.prep(IORING_OP_READ, fd, off, addressOf(b), uint32(len(b)), 0)
}

// PrepWrite prepares pwrite(2): the bytes of b to fd at off.
func (s *SQE) PrepWrite(fd int, b []byte, off uint64) {
	s.prep(IORING_OP_WRITE, fd, off, addressOf(b), uint32(len(b)), 0)
}

// PrepReadv prepares preadv2(2) with RWF_ flags. The vector, too, must stay until the completion on kernels that lack
// FeatSubmitStable. 1,024 segments are the kernel's limit.
func (s *SQE) PrepReadv(fd int, v []IOVec, off uint64, rwFlags uint32) {
	s.prep(IORING_OP_READV, fd, off, address(unsafe.Pointer(unsafe.SliceData(v))), uint32(len(v)), rwFlags)
}

// PrepWritev prepares pwritev2(2) with RWF_ flags, such as [RWF_DSYNC]. See PrepReadv.
func (s *SQE) PrepWritev(fd int, v []IOVec, off uint64, rwFlags uint32) {
	s.prep(IORING_OP_WRITEV, fd, off, address(unsafe.Pointer(unsafe.SliceData(v))), uint32(len(v)), rwFlags)
}

// PrepReadFixed is PrepRead into b, which lies inside the registered buffer index.
func (s *SQE) PrepReadFixed(fd int, b []byte, off uint64, index uint16) {
	s.prep(IORING_OP_READ_FIXED, fd, off, addressOf(b), uint32(len(b)), 0)
	s.BufIndex = index
}

// PrepWriteFixed is PrepWrite of b, which lies inside the registered buffer index.
func (s *SQE) PrepWriteFixed(fd int, b []byte, off uint64, index uint16) {
	s.prep(IORING_OP_WRITE_FIXED, fd, off, addressOf(b), uint32(len(b)), 0)
	s.BufIndex = index
}

// PrepFsync prepares fsync(2), or fdatasync(2) with [IORING_FSYNC_DATASYNC]. It covers writes that were complete when it
// was submitted, not those in flight.
func (s *SQE) PrepFsync(fd int, fsyncFlags uint32) { s.prep(IORING_OP_FSYNC, fd, 0, 0, 0, fsyncFlags) }

// PrepFallocate prepares fallocate(2): FALLOC_FL_ bits in mode, n bytes from off.
func (s *SQE) PrepFallocate(fd int, mode uint32, off, n uint64) {
	s.prep(IORING_OP_FALLOCATE, fd, off, n, mode, 0)
}

// PrepFtruncate prepares ftruncate(2) (Linux 6.9).
func (s *SQE) PrepFtruncate(fd int, size uint64) { s.prep(IORING_OP_FTRUNCATE, fd, size, 0, 0, 0) }

// PrepSyncFileRange prepares sync_file_range(2): n bytes from off, SYNC_FILE_RANGE_ bits in flags. It makes nothing durable.
func (s *SQE) PrepSyncFileRange(fd int, off uint64, n, flags uint32) {
	s.prep(IORING_OP_SYNC_FILE_RANGE, fd, off, 0, n, flags)
}

// PrepFadvise prepares posix_fadvise(2): n bytes from off, POSIX_FADV_ value in advice.
func (s *SQE) PrepFadvise(fd int, off uint64, n, advice uint32) {
	s.prep(IORING_OP_FADVISE, fd, off, 0, n, advice)
}

// PrepOpenat prepares openat(2). path ends in a zero byte (syscall.BytePtrFromString); O_ bits in flags. The result is the
// descriptor.
func (s *SQE) PrepOpenat(dirfd int, path *byte, flags, mode uint32) {
	s.prep(IORING_OP_OPENAT, dirfd, 0, address(unsafe.Pointer(path)), mode, flags)
}

// PrepClose prepares close(2).
func (s *SQE) PrepClose(fd int) { s.prep(IORING_OP_CLOSE, fd, 0, 0, 0, 0) }

// PrepStatx prepares statx(2): AT_ bits in flags, STATX_ bits in mask. path ends in a zero byte; buf is a struct statx of
// 256 bytes. Both must stay until the completion.
func (s *SQE) PrepStatx(dirfd int, path *byte, flags, mask uint32, buf unsafe.Pointer) {
	s.prep(IORING_OP_STATX, dirfd, address(buf), address(unsafe.Pointer(path)), mask, flags)
}

// PrepSplice prepares splice(2) of n bytes; the offset of an end that is a pipe is [CurrentPosition]. SPLICE_F_ bits in
// flags.
func (s *SQE) PrepSplice(fdIn int, offIn uint64, fdOut int, offOut uint64, n, flags uint32) {
	s.prep(IORING_OP_SPLICE, fdOut, offOut, offIn, n, flags)
	s.SpliceFdIn = int32(fdIn)
}
