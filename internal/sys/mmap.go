// SPDX-License-Identifier: Apache-2.0

package sys

import "golang.org/x/sys/unix"

// Protections and flags of [Mmap], under the kernel's names.
const (
	PROT_READ     = unix.PROT_READ
	PROT_WRITE    = unix.PROT_WRITE
	MAP_SHARED    = unix.MAP_SHARED
	MAP_PRIVATE   = unix.MAP_PRIVATE
	MAP_ANONYMOUS = unix.MAP_ANONYMOUS
	MAP_POPULATE  = unix.MAP_POPULATE
)

// Mmap maps length bytes of fd from offset on. The slice is outside the Go heap; it is given back with [Munmap] and
// must not be resliced at its start before that.
func Mmap(fd int, offset int64, length, prot, flags int) ([]byte, error) {
	return unix.Mmap(fd, offset, length, prot, flags)
}

// MmapAnon maps length bytes of fresh, zeroed, page-aligned private memory: a buffer that O_DIRECT accepts and that
// the garbage collector neither moves nor scans.
func MmapAnon(length int) ([]byte, error) {
	return unix.Mmap(-1, 0, length, PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_ANONYMOUS)
}

// Munmap gives a whole mapping of [Mmap] or [MmapAnon] back. Whoever touches the memory afterwards faults.
func Munmap(b []byte) error { return unix.Munmap(b) }
