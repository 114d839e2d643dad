// SPDX-License-Identifier: Apache-2.0

package guestmem

import (
	"fmt"
	"math"
	"sort"
	"sync/atomic"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/invariant"
	"github.com/sluice-blk/sluice/internal/sys"
)

// alignMax is the largest page that a mapping is aligned to: 1 GiB, the largest huge page of both architectures. A
// file that names a larger preferred block is not on hugetlbfs.
const alignMax = 1 << 30

// mapping is one mmap, shared by all the Maps that have its region.
type mapping struct {
	addr   unsafe.Pointer
	length uintptr
	refs   atomic.Int32 // Maps that hold it
}

func (b *mapping) release() {
	n := b.refs.Add(-1)
	invariant.Assert(n >= 0, "guestmem: mapping released too often")
	if n == 0 {
		// It can fail only for an address that is not ours, and there is nobody to tell.
		err := sys.MunmapShared(b.addr, b.length)
		invariant.Assert(err == nil, "guestmem: munmap of a mapping failed")
	}
}

// mapRegion maps a region that checkRegion has passed.
func mapRegion(r Region) (region, error) {
	if err := checkFile(r.FD); err != nil {
		return region{}, fmt.Errorf("file of region at guest %#x: %w", r.GuestAddr, err)
	}
	size, block, err := sys.FileSize(r.FD)
	if err != nil {
		return region{}, fmt.Errorf("stat file of region at guest %#x: %w", r.GuestAddr, err)
	}
	if end := r.Offset + r.Size; size < 0 || end > uint64(size) {
		return region{}, fmt.Errorf("region at guest %#x ends at %#x of a file of %#x bytes: %w",
			r.GuestAddr, end, size, ErrRegion)
	}
	align := pageOf(block)
	start := r.Offset &^ (align - 1)
	// hugetlbfs unmaps whole pages only, so the length is rounded as well; what it adds is never handed out.
	length := (r.Offset - start + r.Size + align - 1) &^ (align - 1)
	addr, err := sys.MmapShared(r.FD, int64(start), uintptr(length))
	if err != nil {
		return region{}, fmt.Errorf("mmap %#x bytes at %#x for region at guest %#x: %w", length, start, r.GuestAddr, err)
	}
	back := &mapping{addr: addr, length: uintptr(length)}
	back.refs.Store(1)
	r.FD = -1
	// SAFETY: Offset-start is less than length.
	return region{Region: r, base: unsafe.Add(addr, r.Offset-start), back: back}, nil
}

// checkFile refuses memory in files whose pages somebody else has to bring: an access to a page that a FUSE or a network
// server never delivers is no fault that could be taken, it holds the thread, the loop and all of its disks for ever.
func checkFile(fd int) error {
	magic, err := sys.StatfsType(fd)
	if err != nil {
		return fmt.Errorf("ask for its file system: %w", err)
	}
	switch magic {
	case sys.TMPFS_MAGIC, sys.HUGETLBFS_MAGIC, sys.RAMFS_MAGIC, sys.EXT4_SUPER_MAGIC, sys.XFS_SUPER_MAGIC, sys.BTRFS_SUPER_MAGIC:
		return nil
	}
	return fmt.Errorf("it lies on a file system of type %#x, which is neither memory nor a local disk: %w (use a memfd, or a file in /dev/shm)", magic, ErrRegion)
}

// pageOf is the alignment of a mapping whose file prefers this block: the page of the machine or of its hugetlbfs. An
// alignment that is larger than need be does no harm.
func pageOf(block int64) uint64 {
	page := uint64(sys.PageSize())
	if b := uint64(block); block > 0 && b > page && b <= alignMax && b&(b-1) == 0 {
		return b
	}
	return page
}

// checkTable tells what is wrong with the regions by themselves and between each other, without asking the kernel.
func checkTable(regions []Region) error {
	for _, r := range regions {
		if err := checkRegion(r); err != nil {
			return err
		}
	}
	if err := checkOverlap(regions, "guest", func(r Region) uint64 { return r.GuestAddr }); err != nil {
		return err
	}
	return checkOverlap(regions, "user", func(r Region) uint64 { return r.UserAddr })
}

func checkRegion(r Region) error {
	switch {
	case r.Size == 0:
		return fmt.Errorf("region at guest %#x has no bytes: %w", r.GuestAddr, ErrRegion)
	case r.Size-1 > math.MaxUint64-r.GuestAddr:
		return fmt.Errorf("region at guest %#x of %#x bytes wraps: %w", r.GuestAddr, r.Size, ErrRegion)
	case r.Size-1 > math.MaxUint64-r.UserAddr:
		return fmt.Errorf("region at user %#x of %#x bytes wraps: %w", r.UserAddr, r.Size, ErrRegion)
	case r.Offset > math.MaxInt64-alignMax || r.Size > math.MaxInt64-alignMax-r.Offset:
		return fmt.Errorf("region at guest %#x: offset %#x and size %#x are no place in a file: %w",
			r.GuestAddr, r.Offset, r.Size, ErrRegion)
	}
	return nil
}

// checkOverlap looks at the address space that start names. checkRegion has passed each region.
func checkOverlap(regions []Region, space string, start func(Region) uint64) error {
	byStart := append([]Region(nil), regions...)
	sort.Slice(byStart, func(i, j int) bool { return start(byStart[i]) < start(byStart[j]) })
	for i := 1; i < len(byStart); i++ {
		a, b := byStart[i-1], byStart[i]
		if start(b)-start(a) < a.Size {
			return fmt.Errorf("regions at %s %#x and %#x overlap: %w", space, start(a), start(b), ErrRegion)
		}
	}
	return nil
}
