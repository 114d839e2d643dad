// SPDX-License-Identifier: Apache-2.0

package guestmem_test

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
)

// Goal: no address that a front-end or a guest can name leads outside of its memory, and no mapping outlives its users.
// Method: tables of regions and addresses; what is mapped is read from /proc/self/maps by the name of the memfd.

// file makes a memfd of a size under a name that nobody else uses.
func file(t *testing.T, name string, size int64) int {
	t.Helper()
	fd, err := sys.MemfdCreate(name, sys.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sys.Close(fd) })
	if err := sys.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	return fd
}

// mapped counts the mappings of the memfd with this name.
func mapped(t *testing.T, name string) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Skipf("needs /proc/self/maps to see mappings: %v", err)
	}
	return strings.Count(string(b), "memfd:"+name+" ")
}

func mustMap(t *testing.T, regions ...guestmem.Region) *guestmem.Map {
	t.Helper()
	m, err := guestmem.NewMap(regions)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

const page = 64 << 10 // a multiple of every page size

func TestMalformedTablesAreRefusedWholeAndLeaveNothingMapped(t *testing.T) {
	name := "refused"
	fd := file(t, name, 16*page)
	good := guestmem.Region{GuestAddr: 0, Size: page, UserAddr: 0x10_0000, FD: fd}
	many := make([]guestmem.Region, guestmem.MaxRegions+1)
	for i := range many {
		many[i] = guestmem.Region{GuestAddr: uint64(i) * page, Size: page, UserAddr: uint64(i) * page, FD: fd}
	}
	ro, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		t.Fatal(err)
	}
	defer ro.Close()
	proc, err := os.Open("/proc/version") // as a server behind FUSE or a network could be
	if err != nil {
		t.Fatal(err)
	}
	defer proc.Close()
	at := func(guest, size, user, offset uint64) []guestmem.Region {
		return []guestmem.Region{good, {GuestAddr: guest, Size: size, UserAddr: user, Offset: offset, FD: fd}}
	}
	for _, c := range []struct {
		name    string
		regions []guestmem.Region
		want    error
	}{
		{"no bytes", at(1<<32, 0, 1<<32, 0), guestmem.ErrRegion},
		{"guest range wraps", at(math.MaxUint64-page+2, page, 1<<32, 0), guestmem.ErrRegion},
		{"user range wraps", at(1<<32, page, math.MaxUint64-page+2, 0), guestmem.ErrRegion},
		{"guest ranges overlap by a byte", at(page-1, page, 1<<32, 0), guestmem.ErrRegion},
		{"guest ranges overlap from below", []guestmem.Region{
			{GuestAddr: page, Size: page, UserAddr: 1 << 32, FD: fd}, {GuestAddr: 1, Size: page, UserAddr: 1 << 33, FD: fd},
		}, guestmem.ErrRegion},
		{"one inside the other", at(16, 16, 1<<32, 0), guestmem.ErrRegion},
		{"the same twice", []guestmem.Region{good, good}, guestmem.ErrRegion},
		{"user ranges overlap", at(1<<32, page, 0x10_0000+page-1, 0), guestmem.ErrRegion},
		{"longer than the file", at(1<<32, 16*page+1, 1<<32, 0), guestmem.ErrRegion},
		{"offset leads behind the file", at(1<<32, page, 1<<32, 15*page+1), guestmem.ErrRegion},
		{"offset and size wrap", at(1<<32, page, 1<<32, math.MaxUint64-8), guestmem.ErrRegion},
		{"offset and size leave 63 bits", at(1<<32, page, 1<<32, math.MaxInt64-8), guestmem.ErrRegion},
		{"size of 2^62", at(1<<32, 1<<62, 1<<32, 0), guestmem.ErrRegion},
		{"size of 2^64-1", at(1, math.MaxUint64, 1<<32, 0), guestmem.ErrRegion},
		{"too many", many, guestmem.ErrRegion},
		{"no descriptor", []guestmem.Region{good, {GuestAddr: 1 << 32, Size: page, UserAddr: 1 << 32, FD: -1}}, syscall.EBADF},
		{"file of another kind of system", []guestmem.Region{good, {GuestAddr: 1 << 32, Size: page, UserAddr: 1 << 32, FD: int(proc.Fd())}}, guestmem.ErrRegion},
		{"read-only descriptor", []guestmem.Region{good, {GuestAddr: 1 << 32, Size: page, UserAddr: 1 << 32, FD: int(ro.Fd())}}, syscall.EACCES},
	} {
		t.Run(c.name, func(t *testing.T) {
			m, err := guestmem.NewMap(c.regions)
			if !errors.Is(err, c.want) || m != nil {
				t.Errorf("got %v, %v; want no map and %v", m, err, c.want)
			}
			if n := mapped(t, name); n != 0 {
				t.Errorf("%d mappings were left behind", n)
			}
			if len(c.regions) > 2 {
				return
			}
			base := mustMap(t, c.regions[0])
			defer base.Release()
			if m, err := base.Add(c.regions[1]); !errors.Is(err, c.want) || m != nil {
				t.Errorf("added: got %v, %v; want no map and %v", m, err, c.want)
			}
			if n := mapped(t, name); n != 1 {
				t.Errorf("%d mappings after a failed Add, want 1", n)
			}
		})
	}
	m, err := guestmem.NewMap(many[:16])
	if err != nil {
		t.Fatalf("a good table: %v", err)
	}
	m.Release()
}

func TestAddressesAreCheckedAgainstTheirRegion(t *testing.T) {
	fd := file(t, "lookup", 8*page)
	const low, high, top = uint64(page), uint64(1) << 32, uint64(math.MaxUint64 - page + 1)
	m := mustMap(t,
		guestmem.Region{GuestAddr: high, Size: 2 * page, UserAddr: 0x7000_0000_0000, Offset: 2 * page, FD: fd},
		guestmem.Region{GuestAddr: low, Size: page, UserAddr: 0x7100_0000_0000, Offset: page, FD: fd},
		guestmem.Region{GuestAddr: top, Size: page, UserAddr: top, Offset: 4 * page, FD: fd},
	)
	defer m.Release()
	for _, c := range []struct {
		addr, length uint64
		ok           bool
	}{
		{low, page, true}, {low, page + 1, false}, {low - 1, 1, false}, {low - 1, 2, false}, {low + page - 1, 1, true},
		{low + page, 0, false}, {low + page, 1, false}, {low, 0, true}, {0, 0, false}, {0, math.MaxUint64, false},
		{high, 2 * page, true}, {high + 1, 2 * page, false}, {high + 8, math.MaxUint64, false},
		{high + 8, math.MaxUint64 - high, false}, {high + 2*page - 1, 1, true}, {high - 1, 1, false},
		{top, page, true}, {top, page + 1, false}, {math.MaxUint64, 1, true}, {math.MaxUint64, 2, false},
		{math.MaxUint64, math.MaxUint64, false}, {top - 1, 2, false},
	} {
		b, err := m.Slice(c.addr, c.length)
		if (err == nil) != c.ok || (err != nil && !errors.Is(err, guestmem.ErrRange)) {
			t.Errorf("Slice(%#x, %#x): %v, want ok %v", c.addr, c.length, err, c.ok)
		}
		if err == nil && uint64(len(b)) != c.length {
			t.Errorf("Slice(%#x, %#x) has %d bytes", c.addr, c.length, len(b))
		}
	}
	for _, c := range []struct {
		addr, length uint64
		ok           bool
	}{
		{0x7000_0000_0000, 2 * page, true}, {0x7000_0000_0000, 2*page + 1, false}, {0x7000_0000_0000 - 1, 1, false},
		{0x7100_0000_0000 + page - 1, 1, true}, {0x7100_0000_0000 + page, 1, false}, {0, 1, false},
		{math.MaxUint64, 1, true}, {math.MaxUint64, 2, false}, {0x7000_0000_0008, math.MaxUint64, false}, {low, 1, false},
	} {
		if _, err := m.UserSlice(c.addr, c.length); (err == nil) != c.ok {
			t.Errorf("UserSlice(%#x, %#x): %v, want ok %v", c.addr, c.length, err, c.ok)
		}
	}
}

func TestNoRegionsIsAMapOfNothing(t *testing.T) {
	m := mustMap(t)
	defer m.Release()
	if _, err := m.Slice(0, 1); !errors.Is(err, guestmem.ErrRange) {
		t.Errorf("Slice: %v", err)
	}
	if _, err := m.UserSlice(0, 0); !errors.Is(err, guestmem.ErrRange) {
		t.Errorf("UserSlice: %v", err)
	}
	if _, err := m.AppendIOVec(nil, 0, 1); !errors.Is(err, guestmem.ErrRange) {
		t.Errorf("AppendIOVec: %v", err)
	}
}

func TestOffsetOfARegionNeedNotBeAligned(t *testing.T) {
	name := "unaligned"
	fd := file(t, name, 4*page)
	w := os.NewFile(uintptr(mustDup(t, fd)), name)
	defer w.Close()
	const offset = page + 4096 + 512 + 3
	if _, err := w.WriteAt([]byte("here"), offset); err != nil {
		t.Fatal(err)
	}
	m := mustMap(t, guestmem.Region{GuestAddr: 0x1003, Size: 2 * page, UserAddr: 0x2003, Offset: offset, FD: fd})
	for _, get := range []func() ([]byte, error){
		func() ([]byte, error) { return m.Slice(0x1003, 4) },
		func() ([]byte, error) { return m.UserSlice(0x2003, 4) },
	} {
		if b, err := get(); err != nil || string(b) != "here" {
			t.Errorf("got %q, %v", b, err)
		}
	}
	b, err := m.Slice(0x1003, 2*page)
	if err != nil {
		t.Fatal(err)
	}
	b[2*page-1] = 0x77 // mapped to the last byte, and not by a neighbour
	var last [1]byte
	if _, err := w.ReadAt(last[:], offset+2*page-1); err != nil || last[0] != 0x77 {
		t.Errorf("the last byte of the region is %#x in the file (%v)", last[0], err)
	}
	m.Release()
	if n := mapped(t, name); n != 0 {
		t.Errorf("%d mappings left", n)
	}
}

func mustDup(t *testing.T, fd int) int {
	t.Helper()
	n, err := syscall.Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestSegmentsFollowGuestContiguousRegions(t *testing.T) {
	fd := file(t, "segments", 8*page)
	m := mustMap(t,
		guestmem.Region{GuestAddr: 0, Size: page, UserAddr: 0x10000000, Offset: 0, FD: fd},
		guestmem.Region{GuestAddr: page, Size: page, UserAddr: 0x30000000, Offset: 4 * page, FD: fd}, // elsewhere in the file
		guestmem.Region{GuestAddr: 2 * page, Size: page, UserAddr: 0x20000000, Offset: page, FD: fd},
		guestmem.Region{GuestAddr: 4 * page, Size: page, UserAddr: 0x40000000, Offset: 2 * page, FD: fd}, // behind a gap
		guestmem.Region{GuestAddr: math.MaxUint64 - page + 1, Size: page, UserAddr: 0x50000000, Offset: 3 * page, FD: fd},
	)
	defer m.Release()
	if w := m.Window(3 * page); w != (guestmem.Window{}) {
		t.Errorf("a window in the gap: %+v", w)
	}
	for _, c := range []struct {
		name   string
		addr   uint64
		length uint32
		want   []uint64 // lengths; nil: out of range
	}{
		{"inside one", 16, 100, []uint64{100}},
		{"a whole one", 0, page, []uint64{page}},
		{"over one border", page - 8, 16, []uint64{8, 8}},
		{"over two borders", page - 8, page + 16, []uint64{8, page, 8}},
		{"no bytes", 16, 0, []uint64{}},
		{"into the gap", 3*page - 8, 16, nil},
		{"over the gap", 3*page - 8, 2 * page, nil},
		{"from the gap", 3 * page, 16, nil},
		{"behind the last", 5*page - 8, 16, nil},
		{"no bytes nowhere", 3 * page, 0, nil},
		{"to the last byte of 64 bits", math.MaxUint64 - 7, 8, []uint64{8}},
		{"over the last byte to address 0, which is mapped", math.MaxUint64 - 7, 16, nil},
		{"all of 32 bits", 0, math.MaxUint32, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := make([]sys.IOVec, 1, 8)
			got, err := m.AppendIOVec(before, c.addr, c.length)
			put, errPut := m.PutIOVec(before, c.addr, c.length)
			if fmt.Sprint(err, got) != fmt.Sprint(errPut, put) {
				t.Errorf("PutIOVec differs: %v %v against %v %v", put, errPut, got, err)
			}
			if c.want == nil {
				if !errors.Is(err, guestmem.ErrRange) || len(got) != 1 {
					t.Fatalf("got %d segments, %v; want ErrRange and the list as it was", len(got), err)
				}
				return
			}
			if err != nil || len(got) != 1+len(c.want) {
				t.Fatalf("got %d segments, %v; want %d", len(got)-1, err, len(c.want))
			}
			addr := c.addr
			for i, n := range c.want {
				b, err := m.Slice(addr, n)
				if err != nil || got[1+i] != sys.IOVecOf(b) {
					t.Errorf("segment %d is not the memory at %#x", i, addr)
				}
				addr += n
			}
			if len(c.want) == 0 {
				return
			}
			full := make([]sys.IOVec, 0, len(c.want)-1)
			if got, err := m.PutIOVec(full, c.addr, c.length); !errors.Is(err, guestmem.ErrNoRoom) || len(got) != 0 {
				t.Errorf("put into too little room: %v, %v", got, err)
			}
			if got, err := m.AppendIOVec(full, c.addr, c.length); err != nil || len(got) != len(c.want) {
				t.Errorf("append to too little room: %v, %v", got, err)
			}
		})
	}
	list := make([]sys.IOVec, 0, 4)
	if n := testing.AllocsPerRun(100, func() {
		l, _ := m.AppendIOVec(list, page-8, page+16)
		_, _ = m.PutIOVec(l, 0, 512)
		_, _ = m.Slice(16, 16)
		_, _ = m.UserSlice(0x20000000, 16)
		_, _ = m.Slice(3*page, 16)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestMappingsLiveAsLongAsAMapThatHasThem(t *testing.T) {
	name := "lives"
	fd := file(t, name, 4*page)
	a := guestmem.Region{GuestAddr: 0, Size: page, UserAddr: 1 << 32, FD: fd}
	b := guestmem.Region{GuestAddr: 1 << 32, Size: page, UserAddr: 1 << 33, Offset: page, FD: fd}
	want := func(n int, when string) {
		t.Helper()
		if got := mapped(t, name); got != n {
			t.Fatalf("%s: %d mappings, want %d", when, got, n)
		}
	}
	one := mustMap(t, a)
	one.Retain()
	two, err := one.Add(b)
	if err != nil {
		t.Fatal(err)
	}
	want(2, "after adding b")
	if _, err := two.Remove(a.GuestAddr, a.Size, a.UserAddr+1); !errors.Is(err, guestmem.ErrRegion) {
		t.Fatalf("remove by a wrong user address: %v", err)
	}
	three, err := two.Remove(a.GuestAddr, a.Size, a.UserAddr)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := three.Slice(0, 1); !errors.Is(err, guestmem.ErrRange) {
		t.Errorf("the removed region is still found: %v", err)
	}
	two.Release()
	want(2, "after the middle map is gone")
	in, err := one.Slice(0, page)
	if err != nil {
		t.Fatal(err)
	}
	one.Release()
	want(2, "with a request in flight in the first map")
	in[0] = 1
	one.Release()
	want(1, "after the first map is gone")
	if r := three.Regions(); len(r) != 1 || r[0].GuestAddr != b.GuestAddr || r[0].Offset != b.Offset || r[0].FD != -1 {
		t.Errorf("regions: %+v", r)
	}
	three.Release()
	want(0, "after all")
}

func TestManyRegionsAreFoundLikeFew(t *testing.T) {
	fd := file(t, "many", page)
	regions := make([]guestmem.Region, guestmem.MaxRegions)
	for i := range regions { // each with a hole of half its size behind it
		regions[len(regions)-1-i] = guestmem.Region{
			GuestAddr: uint64(i) * 0x3000, Size: 0x2000, UserAddr: 1<<40 + uint64(i)*0x3000, FD: fd,
		}
	}
	m := mustMap(t, regions...)
	defer m.Release()
	for addr := uint64(0); addr < guestmem.MaxRegions*0x3000; addr += 0x800 {
		_, err := m.Slice(addr, 0x800)
		_, errUser := m.UserSlice(1<<40+addr, 0x800)
		if want := addr%0x3000 < 0x2000; (err == nil) != want || (errUser == nil) != want {
			t.Fatalf("address %#x: %v, by user address %v; want found: %v", addr, err, errUser, want)
		}
	}
	if _, err := m.Add(guestmem.Region{GuestAddr: 1 << 40, Size: 1, UserAddr: 1, FD: fd}); !errors.Is(err, guestmem.ErrRegion) {
		t.Errorf("one region too many: %v", err)
	}
}

func TestALargeRegionCostsNoMemory(t *testing.T) {
	name := "large"
	fd := file(t, name, 16<<30)
	m, err := guestmem.NewMap([]guestmem.Region{{GuestAddr: 0, Size: 16 << 30, UserAddr: 1 << 40, FD: fd}})
	if errors.Is(err, syscall.ENOMEM) {
		t.Skip("needs 16 GiB of address space")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer m.Release()
	if _, err := m.Slice(0, 16<<30); err != nil {
		t.Error(err)
	}
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		t.Fatal(err)
	}
	if st.Blocks != 0 {
		t.Errorf("mapping the memory filled %d blocks of it", st.Blocks)
	}
}

func TestMemoryThatTheFrontEndTruncatesIsAnErrorWhenGuarded(t *testing.T) {
	fd := file(t, "truncated", page)
	m := mustMap(t, guestmem.Region{Size: page, UserAddr: 1 << 32, FD: fd})
	defer m.Release()
	b, err := m.Slice(0, 16)
	if err != nil {
		t.Fatal(err)
	}
	if err := sys.Ftruncate(fd, 0); err != nil {
		t.Fatal(err)
	}
	if err := sys.CopyGuarded(make([]byte, 16), b); !errors.Is(err, syscall.EFAULT) {
		t.Errorf("copy: %v, want EFAULT", err)
	}
}

// FuzzLookup compares lookups with a search of the table by the definition.
func FuzzLookup(f *testing.F) {
	f.Add(uint64(0), uint64(1), uint32(16), uint8(3))
	f.Add(uint64(math.MaxUint64), uint64(math.MaxUint64), uint32(math.MaxUint32), uint8(20))
	f.Add(uint64(page-1), uint64(2), uint32(2*page), uint8(9))
	fd := -1
	f.Fuzz(func(t *testing.T, addr, length uint64, short uint32, count uint8) {
		if fd < 0 {
			var err error
			if fd, err = sys.MemfdCreate("fuzz", sys.MFD_CLOEXEC); err != nil {
				t.Fatal(err)
			}
			if err := sys.Ftruncate(fd, page); err != nil {
				t.Fatal(err)
			}
		}
		var regions []guestmem.Region
		next := uint64(count) * 8
		for i := range uint64(count % 24) {
			r := guestmem.Region{GuestAddr: next, Size: 1 + (i*4097)%page, UserAddr: next ^ 1<<40, FD: fd}
			regions = append(regions, r)
			next += r.Size + i%3*page
		}
		m := mustMap(t, regions...)
		defer m.Release()
		inside := func(a, n uint64) bool {
			for _, r := range regions {
				if a >= r.GuestAddr && a-r.GuestAddr < r.Size && n <= r.Size-(a-r.GuestAddr) {
					return true
				}
			}
			return false
		}
		for _, a := range []uint64{addr, addr % (next + 16)} {
			if _, err := m.Slice(a, length); (err == nil) != inside(a, length) {
				t.Errorf("Slice(%#x, %#x): %v", a, length, err)
			}
			w := m.Window(a)
			if v, ok := w.Piece(a, short); ok != inside(a, uint64(short)) {
				t.Errorf("Piece(%#x, %#x): %v", a, short, ok)
			} else if b, err := m.Slice(a, uint64(short)); ok && (err != nil || sys.IOVecOf(b) != v) {
				t.Errorf("Piece(%#x, %#x) is not what Slice gives", a, short)
			}
			if v, ok := w.Piece(addr^length, short); ok {
				if b, err := m.Slice(addr^length, uint64(short)); err != nil || sys.IOVecOf(b) != v {
					t.Errorf("Piece(%#x, %#x) of a window at %#x: not in memory", addr^length, short, a)
				}
			}
			list, err := m.AppendIOVec(nil, a, short)
			if err != nil {
				continue
			}
			total := uint64(0)
			for _, v := range list {
				b, err := m.Slice(a+total, v.Len)
				if err != nil || sys.IOVecOf(b) != v {
					t.Errorf("segment at %#x of %#x bytes: %v", a+total, v.Len, err)
				}
				total += v.Len
			}
			if total != uint64(short) {
				t.Errorf("segments of %d bytes, want %d", total, short)
			}
		}
	})
}

func BenchmarkAppendIOVec(b *testing.B) {
	fd, err := sys.MemfdCreate("bench", sys.MFD_CLOEXEC)
	if err != nil {
		b.Fatal(err)
	}
	defer sys.Close(fd)
	if err := sys.Ftruncate(fd, page); err != nil {
		b.Fatal(err)
	}
	for _, n := range []int{1, 3, 64} {
		b.Run(fmt.Sprintf("regions=%d", n), func(b *testing.B) {
			var regions []guestmem.Region
			for i := range uint64(n) {
				regions = append(regions, guestmem.Region{GuestAddr: i << 20, Size: page, UserAddr: i << 20, FD: fd})
			}
			m, err := guestmem.NewMap(regions)
			if err != nil {
				b.Fatal(err)
			}
			defer m.Release()
			list := make([]sys.IOVec, 0, 4)
			addr := uint64(n-1) << 20
			b.ReportAllocs()
			for b.Loop() {
				if _, err := m.AppendIOVec(list, addr, 512); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
