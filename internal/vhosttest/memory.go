// SPDX-License-Identifier: Apache-2.0

package vhosttest

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
)

// Memory is one region of guest memory as a front-end has it: a file in memory, mapped.
type Memory struct {
	FD        int
	Bytes     []byte
	GuestAddr uint64
}

// NewMemory makes size bytes of memory at the guest physical address.
func NewMemory(guestAddr uint64, size int) (*Memory, error) {
	fd, err := sys.MemfdCreate("guest", sys.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make guest memory: %w", err)
	}
	if err := sys.Ftruncate(fd, int64(size)); err != nil {
		return nil, fmt.Errorf("make guest memory of %d bytes: %w", size, errors.Join(err, sys.Close(fd)))
	}
	b, err := sys.Mmap(fd, 0, size, sys.PROT_READ|sys.PROT_WRITE, sys.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map guest memory of %d bytes: %w", size, errors.Join(err, sys.Close(fd)))
	}
	return &Memory{FD: fd, Bytes: b, GuestAddr: guestAddr}, nil
}

// UserAddr is the address of the byte at offset in this process, in which a front-end gives ring addresses.
func (m *Memory) UserAddr(offset int) uint64 {
	// SAFETY: the address is only told; the slice outlives the mapping's use as the caller closes it last.
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(m.Bytes)))) + uint64(offset)
}

// Region describes the whole of it.
func (m *Memory) Region() guestmem.Region {
	return guestmem.Region{GuestAddr: m.GuestAddr, Size: uint64(len(m.Bytes)), UserAddr: m.UserAddr(0), FD: m.FD}
}

// Close unmaps the memory and closes its file. A second Close does no harm.
func (m *Memory) Close() error {
	if m.Bytes == nil {
		return nil
	}
	err := errors.Join(sys.Munmap(m.Bytes), sys.Close(m.FD))
	m.Bytes, m.FD = nil, -1
	return err
}
