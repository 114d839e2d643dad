// SPDX-License-Identifier: Apache-2.0

// Package guestmem maps a guest's memory and turns guest addresses into slices, checking every one of them.
//
// It owns the mappings and nothing else: no ring, no request, no protocol. A [Map] never changes. When the front-end
// sends a new table, or adds or removes a region, a new Map is made, and the loops are given it; requests in flight
// keep the one they were made with ([Map.Retain]), and a region is unmapped when the last Map that has it is gone.
//
// Nothing here touches, populates or pins a page of the guest. What is behind an address may still vanish, since the
// front-end may truncate the file: the access then faults, which [sys.SetPanicOnFault] makes a panic and
// [sys.CopyGuarded] an error. Contents are never to be trusted to stay the same between two reads.
//
// Maps are safe for concurrent use.
package guestmem

import (
	"errors"
	"fmt"
	"sort"
	"sync/atomic"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/invariant"
	"github.com/sluice-blk/sluice/internal/sys"
)

// MaxRegions bounds a map. It is the number of memory slots that a vhost-user front-end can fill at most: KVM's 512
// less three that QEMU keeps for itself.
const MaxRegions = 509

// linearMax is how many regions are searched one after the other: a guest has two or three, and then a loop over them
// is quicker than the branches of a binary search.
const linearMax = 8

var (
	// ErrRange marks an address or a length that lies outside of the guest's memory, or across two regions where one
	// piece was asked for.
	ErrRange = errors.New("outside of guest memory")
	// ErrRegion marks a region that cannot be part of a map: malformed, too long for its file, or in another's way.
	ErrRegion = errors.New("invalid memory region")
	// ErrNoRoom marks a list of segments that is full.
	ErrNoRoom = errors.New("no room for a segment")
)

// Region is one piece of guest memory as the vhost-user messages SET_MEM_TABLE and ADD_MEM_REG describe it. All but
// FD are bytes.
type Region struct {
	GuestAddr uint64 // guest physical address of the first byte
	Size      uint64 // not 0
	UserAddr  uint64 // the same byte's address in the front-end, in which it gives ring addresses
	Offset    uint64 // of the first byte in the file ("mmap offset"); need not be a multiple of the page size
	FD        int    // borrowed until the call returns; -1 in what Map.Regions says
}

// region is a Region of a Map: where it is mapped and who keeps it.
type region struct {
	Region
	base unsafe.Pointer // the byte at GuestAddr
	back *mapping
}

// Map is a guest's memory: an immutable table of regions. The zero Map is not usable; see [NewMap].
type Map struct {
	guest []region     // sorted by GuestAddr
	user  []region     // the same, sorted by UserAddr
	refs  atomic.Int32 // users; the Map's hold on its mappings ends when the last is gone
}

// NewMap maps the regions. The file descriptors are borrowed: they may be closed when NewMap returns. It succeeds
// whole, or fails and leaves nothing mapped. No region at all is a map in which every address is out of range.
//
// The caller holds the Map's first reference and gives it back with [Map.Release].
//
// Errors: [ErrRegion] for what the front-end got wrong, else a wrapped errno of fstat or mmap.
// May be called from any goroutine.
func NewMap(regions []Region) (*Map, error) {
	if len(regions) > MaxRegions {
		return nil, fmt.Errorf("map guest memory: %d regions, at most %d: %w", len(regions), MaxRegions, ErrRegion)
	}
	if err := checkTable(regions); err != nil {
		return nil, fmt.Errorf("map guest memory: %w", err)
	}
	table := make([]region, 0, len(regions))
	for _, r := range regions {
		mapped, err := mapRegion(r)
		if err != nil {
			for i := range table {
				table[i].back.release()
			}
			return nil, fmt.Errorf("map guest memory: %w", err)
		}
		table = append(table, mapped)
	}
	return newMap(table), nil
}

// Add makes a map that has r as well; the mappings of the others are shared with m, which stays as it is. The errors
// and the ownership are those of [NewMap]. May be called from any goroutine, by one that holds a reference to m.
func (m *Map) Add(r Region) (*Map, error) {
	if len(m.guest) >= MaxRegions {
		return nil, fmt.Errorf("add guest memory: more than %d regions: %w", MaxRegions, ErrRegion)
	}
	if err := checkTable(append(m.Regions(), r)); err != nil {
		return nil, fmt.Errorf("add guest memory: %w", err)
	}
	mapped, err := mapRegion(r)
	if err != nil {
		return nil, fmt.Errorf("add guest memory: %w", err)
	}
	return newMap(append(m.share(nil), mapped)), nil
}

// Remove makes a map that lacks the region which the three values name together, as REM_MEM_REG does; m stays as it
// is. [ErrRegion] when there is none. The caller owns the new map's first reference.
// May be called from any goroutine, by one that holds a reference to m.
func (m *Map) Remove(guestAddr, size, userAddr uint64) (*Map, error) {
	for i := range m.guest {
		r := &m.guest[i]
		if r.GuestAddr == guestAddr && r.Size == size && r.UserAddr == userAddr {
			return newMap(m.share(r)), nil
		}
	}
	return nil, fmt.Errorf("remove guest memory: no region of %#x bytes at guest %#x, user %#x: %w",
		size, guestAddr, userAddr, ErrRegion)
}

// Regions is the table, sorted by guest address, with the FD of each -1: a map keeps no descriptor.
// Safe for concurrent use.
func (m *Map) Regions() []Region {
	out := make([]Region, len(m.guest), len(m.guest)+1)
	for i := range m.guest {
		out[i] = m.guest[i].Region
	}
	return out
}

// Retain adds a user. The caller must already be one: a Map whose users are gone cannot be brought back.
// May be called from any goroutine.
func (m *Map) Retain() {
	n := m.refs.Add(1)
	invariant.Assert(n > 1, "guestmem: retain of a map that nobody holds")
}

// Release ends the caller's use: no slice that it took from the map may be touched any more. The last one unmaps what
// no other Map shares, which may take milliseconds for a large region that was in use.
// May be called from any goroutine.
func (m *Map) Release() {
	n := m.refs.Add(-1)
	invariant.Assert(n >= 0, "guestmem: more releases than users")
	if n != 0 {
		return
	}
	for i := range m.guest {
		m.guest[i].back.release()
	}
}

// Slice is the length bytes of memory at the guest physical address, in one piece. An address that is in no region,
// and a piece that leaves its region, is [ErrRange]. Nothing is allocated.
// Safe for concurrent use, by those who hold a reference.
func (m *Map) Slice(guestAddr, length uint64) ([]byte, error) {
	if r := m.find(guestAddr); r != nil {
		if at := guestAddr - r.GuestAddr; length <= r.Size-at {
			return r.slice(at, length), nil
		}
	}
	return nil, ErrRange
}

// UserSlice is [Map.Slice] by an address of the front-end's own, as SET_VRING_ADDR gives them.
func (m *Map) UserSlice(userAddr, length uint64) ([]byte, error) {
	i := sort.Search(len(m.user), func(i int) bool { return m.user[i].UserAddr > userAddr })
	if i == 0 {
		return nil, ErrRange
	}
	r := &m.user[i-1]
	at := userAddr - r.UserAddr
	if at >= r.Size || length > r.Size-at {
		return nil, ErrRange
	}
	return r.slice(at, length), nil
}

// AppendIOVec appends the length bytes at the guest physical address to dst. Where they run from one region into
// another that begins at the very next guest address they become a segment for each; any gap is [ErrRange], and dst
// comes back as it was. It allocates only when dst has no room. No bytes are no segment.
// Safe for concurrent use, by those who hold a reference.
func (m *Map) AppendIOVec(dst []sys.IOVec, guestAddr uint64, length uint32) ([]sys.IOVec, error) {
	if p, ok := m.piece(guestAddr, length); ok && length != 0 {
		return append(dst, p), nil
	}
	return m.across(dst, guestAddr, uint64(length), true)
}

// PutIOVec is [Map.AppendIOVec] that never allocates: [ErrNoRoom], with dst as it was, when its capacity is used up.
func (m *Map) PutIOVec(dst []sys.IOVec, guestAddr uint64, length uint32) ([]sys.IOVec, error) {
	if p, ok := m.piece(guestAddr, length); ok && length != 0 && len(dst) < cap(dst) {
		return append(dst, p), nil
	}
	return m.across(dst, guestAddr, uint64(length), false)
}

// piece is the memory as one segment, if one region has it all.
func (m *Map) piece(guestAddr uint64, length uint32) (sys.IOVec, bool) {
	r := m.find(guestAddr)
	if r == nil {
		return sys.IOVec{}, false
	}
	at := guestAddr - r.GuestAddr
	if uint64(length) > r.Size-at {
		return sys.IOVec{}, false
	}
	// SAFETY: at < r.Size, so the pointer is inside the mapping, and the length was checked.
	return sys.IOVec{Base: (*byte)(unsafe.Add(r.base, at)), Len: uint64(length)}, true
}

// Window is one region of a Map, for whoever asks for many pieces that mostly lie in the same one. The zero Window holds
// nothing. It is good for as long as a reference to the Map is held, and not safe for concurrent use.
type Window struct {
	start, size uint64
	base        unsafe.Pointer
}

// Piece is the memory as one segment, if the window has it all. It is small enough to be inlined.
func (w *Window) Piece(guestAddr uint64, length uint32) (v sys.IOVec, ok bool) {
	// An address below the window wraps to a difference that is larger than its size.
	at := guestAddr - w.start
	if at >= w.size || uint64(length) > w.size-at {
		return v, false
	}
	// SAFETY: at < size, so the pointer is inside the mapping, and the length was checked.
	return sys.IOVec{Base: (*byte)(unsafe.Add(w.base, at)), Len: uint64(length)}, true
}

// Window is the region that holds the byte at guestAddr, or a window of nothing.
// Safe for concurrent use, by those who hold a reference.
func (m *Map) Window(guestAddr uint64) Window {
	if r := m.find(guestAddr); r != nil {
		return Window{start: r.GuestAddr, size: r.Size, base: r.base}
	}
	return Window{}
}

// across appends a segment for each region that the bytes touch.
func (m *Map) across(dst []sys.IOVec, guestAddr, length uint64, grow bool) ([]sys.IOVec, error) {
	before := len(dst)
	for more := true; more; {
		r := m.find(guestAddr)
		if r == nil {
			return dst[:before], ErrRange
		}
		at := guestAddr - r.GuestAddr
		n := min(length, r.Size-at)
		if n == 0 {
			break
		}
		if !grow && len(dst) == cap(dst) {
			return dst[:before], ErrNoRoom
		}
		// SAFETY: at < r.Size and n <= r.Size-at, so the segment is inside the mapping.
		dst = append(dst, sys.IOVec{Base: (*byte)(unsafe.Add(r.base, at)), Len: n})
		length -= n
		more = length > 0
		if guestAddr += n; guestAddr == 0 && more { // behind the last byte of 64 bits
			return dst[:before], ErrRange
		}
	}
	return dst, nil
}

// find is the region that holds the byte at guestAddr, or nil.
func (m *Map) find(guestAddr uint64) *region {
	if len(m.guest) > linearMax {
		return m.findMany(guestAddr)
	}
	for i := range m.guest {
		// An address below the region wraps to a difference that is larger than any region's size, since no region
		// wraps.
		if r := &m.guest[i]; guestAddr-r.GuestAddr < r.Size {
			return r
		}
	}
	return nil
}

// findMany is find by halves.
func (m *Map) findMany(guestAddr uint64) *region {
	lo, hi := 0, len(m.guest)
	for lo < hi {
		mid := int(uint(lo+hi) >> 1)
		if m.guest[mid].GuestAddr <= guestAddr {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	if lo == 0 {
		return nil
	}
	if r := &m.guest[lo-1]; guestAddr-r.GuestAddr < r.Size {
		return r
	}
	return nil
}

// slice is length bytes of the region from at on, which the caller has checked.
func (r *region) slice(at, length uint64) []byte {
	// SAFETY: at < r.Size and length <= r.Size-at were checked, and the region is mapped while a Map that has it lives.
	return unsafe.Slice((*byte)(unsafe.Add(r.base, at)), int(length))
}

// newMap takes over one reference to each mapping of the table.
func newMap(table []region) *Map {
	m := &Map{guest: table, user: append([]region(nil), table...)}
	sort.Slice(m.guest, func(i, j int) bool { return m.guest[i].GuestAddr < m.guest[j].GuestAddr })
	sort.Slice(m.user, func(i, j int) bool { return m.user[i].UserAddr < m.user[j].UserAddr })
	m.refs.Store(1)
	return m
}

// share is the table without the region except, with one more reference to each of its mappings.
func (m *Map) share(except *region) []region {
	table := make([]region, 0, len(m.guest)+1)
	for i := range m.guest {
		r := &m.guest[i]
		if r == except {
			continue
		}
		r.back.refs.Add(1)
		table = append(table, *r)
	}
	return table
}
