// SPDX-License-Identifier: Apache-2.0

package virtqtest

import (
	"fmt"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
)

// Memory is one region of guest memory: a memfd, mapped here, and a simple allocator that never frees.
type Memory struct {
	fd        int
	guestAddr uint64
	bytes     []byte
	next      int // offset of the first byte not handed out
}

// Buffer is a piece of guest memory: where the guest has it, and its bytes.
type Buffer struct {
	Addr  uint64 // guest physical
	Bytes []byte
}

// NewMemory makes a region of size bytes, all zero, at a guest physical address. It is given back with Close.
func NewMemory(guestAddr uint64, size int) (*Memory, error) {
	fd, err := sys.MemfdCreate("guest-memory", sys.MFD_CLOEXEC|sys.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("make guest memory: %w", err)
	}
	if err := sys.Ftruncate(fd, int64(size)); err != nil {
		sys.Close(fd)
		return nil, fmt.Errorf("make guest memory of %d bytes: %w", size, err)
	}
	p, err := sys.MmapShared(fd, 0, uintptr(size))
	if err != nil {
		sys.Close(fd)
		return nil, fmt.Errorf("map guest memory of %d bytes: %w", size, err)
	}
	// SAFETY: the mapping has size bytes and lives until Close.
	return &Memory{fd: fd, guestAddr: guestAddr, bytes: unsafe.Slice((*byte)(p), size)}, nil
}

// Close unmaps the memory. Nobody may touch a Buffer or a Driver in it afterwards.
func (m *Memory) Close() error {
	if m.bytes == nil {
		return nil
	}
	err := sys.MunmapShared(unsafe.Pointer(unsafe.SliceData(m.bytes)), uintptr(len(m.bytes)))
	m.bytes = nil
	if e := sys.Close(m.fd); err == nil {
		err = e
	}
	return err
}

// FD is the memfd, borrowed until Close.
func (m *Memory) FD() int { return m.fd }

// Region describes the memory as a front-end would. Its descriptor is borrowed until Close.
func (m *Memory) Region() guestmem.Region {
	return guestmem.Region{
		GuestAddr: m.guestAddr,
		Size:      uint64(len(m.bytes)),
		UserAddr:  m.UserAddr(m.guestAddr),
		FD:        m.fd,
	}
}

// UserAddr is this process's address of a guest address inside the region.
func (m *Memory) UserAddr(guestAddr uint64) uint64 {
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(m.bytes)))) + guestAddr - m.guestAddr
}

// End is the guest address behind the last byte.
func (m *Memory) End() uint64 { return m.guestAddr + uint64(len(m.bytes)) }

// At is length bytes at a guest address, which must be inside the region.
func (m *Memory) At(guestAddr uint64, length int) []byte {
	at := guestAddr - m.guestAddr
	return m.bytes[at : at+uint64(length) : at+uint64(length)]
}

// Alloc hands out length bytes at a multiple of align, a power of two. What it handed out is never given back.
func (m *Memory) Alloc(length, align int) (Buffer, error) {
	at := (m.next + align - 1) &^ (align - 1)
	if length < 0 || at > len(m.bytes) || length > len(m.bytes)-at {
		return Buffer{}, fmt.Errorf("allocate %d bytes of guest memory: %d of %d are in use", length, m.next, len(m.bytes))
	}
	m.next = at + length
	return Buffer{Addr: m.guestAddr + uint64(at), Bytes: m.bytes[at : at+length : at+length]}, nil
}
