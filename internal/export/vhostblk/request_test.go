// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"bytes"
	"testing"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/virtqtest"
)

const diskSize = 8 << 20

func memDisk(t *testing.T, o mem.Options) block.Node {
	t.Helper()
	if o.Size == 0 {
		o.Size = diskSize
	}
	n, err := mem.New(o)
	must(t, err)
	return n
}

// Goal: each request is answered as the specification says, whatever its framing. Method: one chain at a time on a disk in
// memory, and the disk's content looked at where a refused request must have changed nothing.
func TestRequests(t *testing.T) {
	const capacity = diskSize / virtioblk.SectorSize
	const ok, ioerr, unsupp = virtioblk.StatusOK, virtioblk.StatusIOErr, virtioblk.StatusUnsupp
	for _, c := range []struct {
		name    string
		kind    virtioblk.RequestType
		sector  uint64
		length  int
		status  virtioblk.Status
		written uint32
	}{
		{"read of one sector", virtioblk.TypeIn, 0, 512, ok, 513},
		{"read of the last sector", virtioblk.TypeIn, capacity - 1, 512, ok, 513},
		{"read at the capacity", virtioblk.TypeIn, capacity, 512, ioerr, 513},
		{"read across the end", virtioblk.TypeIn, capacity - 1, 1024, ioerr, 1025},
		{"read at sector 2^55", virtioblk.TypeIn, 1 << 55, 512, ioerr, 513},
		{"read at sector 2^64-1", virtioblk.TypeIn, 1<<64 - 1, 512, ioerr, 513},
		{"read of 1 byte", virtioblk.TypeIn, 0, 1, ioerr, 2},
		{"read of 511 bytes", virtioblk.TypeIn, 0, 511, ioerr, 512},
		{"read of 513 bytes", virtioblk.TypeIn, 0, 513, ioerr, 514},
		{"read of nothing", virtioblk.TypeIn, 0, 0, ioerr, 1},
		{"write of one sector", virtioblk.TypeOut, 1, 512, ok, 1},
		{"write at the capacity", virtioblk.TypeOut, capacity, 512, ioerr, 1},
		{"write of 1000 bytes", virtioblk.TypeOut, 0, 1000, ioerr, 1},
		{"write at sector 2^64-1", virtioblk.TypeOut, 1<<64 - 1, 512, ioerr, 1},
		{"flush without data", virtioblk.TypeFlush, 0, 0, ok, 1},
		{"flush with a sector, which means nothing", virtioblk.TypeFlush, 77, 0, ok, 1},
		{"id in 20 bytes", virtioblk.TypeGetID, 0, 20, ok, 21},
		{"id in 8 bytes", virtioblk.TypeGetID, 0, 8, ok, 9},
		{"unknown type 99", 99, 0, 512, unsupp, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, memDisk(t, mem.Options{}), rigOptions{serial: "a serial"})
			q := r.queues[0]
			status, written := q.do(r.standard(c.kind, c.sector, c.length))
			if status != c.status || written != c.written {
				t.Errorf("status %d, used length %d; want %d, %d", status, written, c.status, c.written)
			}
			// Whatever it was, the next one is served.
			if status, _ := q.do(r.standard(virtioblk.TypeIn, 0, 512)); status != ok {
				t.Errorf("a good read afterwards: status %d", status)
			}
		})
	}
}

func TestSerialIsPaddedWithZeros(t *testing.T) {
	r := newRig(t, memDisk(t, mem.Options{}), rigOptions{serial: "sn-17"})
	req := r.standard(virtioblk.TypeGetID, 0, virtioblk.IDBytes)
	for i := range req.data.Bytes {
		req.data.Bytes[i] = poison
	}
	if status, _ := r.queues[0].do(req); status != virtioblk.StatusOK {
		t.Fatalf("status %d", status)
	}
	want := virtioblk.EncodeID("sn-17")
	if !bytes.Equal(req.data.Bytes, want[:]) {
		t.Errorf("got %q, want %q", req.data.Bytes, want)
	}
}

// A driver may cut its buffers where it likes: 448 and 64 bytes are a sector, and a header may lie in three pieces.
func TestFramingIsTheDriversChoice(t *testing.T) {
	r := newRig(t, memDisk(t, mem.Options{}), rigOptions{})
	q := r.queues[0]
	write := r.standard(virtioblk.TypeOut, 3, 512)
	for i := range write.data.Bytes {
		write.data.Bytes[i] = byte(i)
	}
	header, data := write.readable[0], write.readable[1]
	write.readable = []virtqtest.Segment{
		{Addr: header.Addr, Len: 5}, {Addr: header.Addr + 5, Len: 10}, {Addr: header.Addr + 15, Len: 1},
		{Addr: data.Addr, Len: 448}, {Addr: data.Addr + 448, Len: 64},
	}
	if status, _ := q.do(write); status != virtioblk.StatusOK {
		t.Fatalf("write in pieces: status %d", status)
	}
	read := r.standard(virtioblk.TypeIn, 3, 512)
	// The status shares a descriptor with the end of the data.
	both := r.alloc(100 + 1)
	copyOf := read.writable[0]
	read.writable = []virtqtest.Segment{{Addr: copyOf.Addr, Len: 412}, {Addr: both.Addr, Len: 101}}
	read.status = virtqtest.Buffer{Addr: both.Addr + 100, Bytes: both.Bytes[100:]}
	status, written := q.do(read)
	if status != virtioblk.StatusOK || written != 513 {
		t.Fatalf("read in pieces: status %d, used length %d", status, written)
	}
	if got := append(append([]byte{}, read.data.Bytes[:412]...), both.Bytes[:100]...); !bytes.Equal(got, write.data.Bytes) {
		t.Error("the data read is not the data written")
	}
}

// Chains that cannot be a request come back with used length 0 where there is no place for a status, with an error where
// there is one, and the queue goes on.
func TestMalformedChainsComeBack(t *testing.T) {
	for _, c := range []struct {
		name    string
		spoil   func(*request)
		status  byte
		written uint32
	}{
		{"header only", func(q *request) { q.writable = nil }, poison, 0},
		{"status of length 0", func(q *request) { q.writable[1].Len = 0; q.writable = q.writable[1:] }, poison, 0},
		{"header of 15 bytes", func(q *request) { q.readable[0].Len = 15 }, byte(virtioblk.StatusIOErr), 513},
		{"no header", func(q *request) { q.readable = nil }, byte(virtioblk.StatusIOErr), 513},
		{"data outside of memory", func(q *request) { q.writable[0].Addr = 1 }, byte(virtioblk.StatusIOErr), 0},
		{"data that wraps", func(q *request) { q.writable[0].Addr = 1<<64 - 100 }, byte(virtioblk.StatusIOErr), 0},
		{"header outside of memory", func(q *request) { q.readable[0].Addr = 1 << 50 }, byte(virtioblk.StatusIOErr), 0},
		{"status outside of memory", func(q *request) { q.writable[1].Addr = 1 << 50 }, poison, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, memDisk(t, mem.Options{}), rigOptions{})
			q := r.queues[0]
			req := r.standard(virtioblk.TypeIn, 0, 512)
			c.spoil(req)
			_, written := q.do(req)
			if got := req.status.Bytes[0]; got != c.status || written != c.written {
				t.Errorf("status byte %#x, used length %d; want %#x, %d", got, written, c.status, c.written)
			}
			if status, _ := q.do(r.standard(virtioblk.TypeIn, 0, 512)); status != virtioblk.StatusOK {
				t.Errorf("a good read afterwards: status %d", status)
			}
		})
	}
}

func (r *rig) ranges(kind virtioblk.RequestType, payload int, ranges ...virtioblk.DiscardRange) *request {
	q := r.standard(kind, 0, payload)
	for i, d := range ranges {
		if (i+1)*virtioblk.DiscardRangeSize <= payload {
			d.Encode(q.data.Bytes[i*virtioblk.DiscardRangeSize:])
		}
	}
	return q
}

// Ranges are checked all of them before any is acted on.
func TestDiscardAndWriteZeroes(t *testing.T) {
	const capacity = diskSize / virtioblk.SectorSize
	type R = virtioblk.DiscardRange
	good := R{Sector: 8, Sectors: 8}
	for _, c := range []struct {
		name    string
		kind    virtioblk.RequestType
		payload int
		ranges  []R
		status  virtioblk.Status
	}{
		{"zeroes", virtioblk.TypeWriteZeroes, 16, []R{good}, virtioblk.StatusOK},
		{"zeroes with unmap", virtioblk.TypeWriteZeroes, 16, []R{{Sector: 8, Sectors: 8, Flags: 1}}, virtioblk.StatusOK},
		{"discard", virtioblk.TypeDiscard, 16, []R{good}, virtioblk.StatusOK},
		{"two ranges", virtioblk.TypeWriteZeroes, 32, []R{good, {Sector: 32, Sectors: 8}}, virtioblk.StatusOK},
		{"range that asks for nothing", virtioblk.TypeWriteZeroes, 16, []R{{Sector: 8}}, virtioblk.StatusOK},
		{"across the end", virtioblk.TypeWriteZeroes, 16, []R{{Sector: capacity - 1, Sectors: 2}}, virtioblk.StatusIOErr},
		{"good, then across the end", virtioblk.TypeWriteZeroes, 32, []R{good, {Sector: capacity - 1, Sectors: 2}}, virtioblk.StatusIOErr},
		{"wraps", virtioblk.TypeDiscard, 16, []R{{Sector: 1<<64 - 1, Sectors: 1}}, virtioblk.StatusIOErr},
		{"2^32-1 sectors", virtioblk.TypeWriteZeroes, 16, []R{{Sectors: 1<<32 - 1}}, virtioblk.StatusIOErr},
		{"15 bytes", virtioblk.TypeDiscard, 15, nil, virtioblk.StatusIOErr},
		{"17 bytes", virtioblk.TypeWriteZeroes, 17, []R{good}, virtioblk.StatusIOErr},
		{"no range", virtioblk.TypeDiscard, 0, nil, virtioblk.StatusIOErr},
		{"a range too many", virtioblk.TypeDiscard, (maxRangeSegments + 1) * 16, []R{good}, virtioblk.StatusIOErr},
		{"discard with unmap", virtioblk.TypeDiscard, 16, []R{{Sector: 8, Sectors: 8, Flags: 1}}, virtioblk.StatusUnsupp},
		{"reserved flag", virtioblk.TypeWriteZeroes, 16, []R{{Sector: 8, Sectors: 8, Flags: 2}}, virtioblk.StatusUnsupp},
		{"good, then a reserved flag", virtioblk.TypeWriteZeroes, 32, []R{good, {Sector: 32, Sectors: 8, Flags: 4}}, virtioblk.StatusUnsupp},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, memDisk(t, mem.Options{}), rigOptions{})
			q := r.queues[0]
			fill := r.standard(virtioblk.TypeOut, 0, 64*512)
			for i := range fill.data.Bytes {
				fill.data.Bytes[i] = 0x55
			}
			if status, _ := q.do(fill); status != virtioblk.StatusOK {
				t.Fatal("fill")
			}
			status, written := q.do(r.ranges(c.kind, c.payload, c.ranges...))
			if status != c.status || written != 1 {
				t.Errorf("status %d, used length %d; want %d, 1", status, written, c.status)
			}
			read := r.standard(virtioblk.TypeIn, 0, 64*512)
			if status, _ := q.do(read); status != virtioblk.StatusOK {
				t.Fatal("read back")
			}
			want := bytes.Repeat([]byte{0x55}, 64*512)
			if c.status == virtioblk.StatusOK {
				for _, d := range c.ranges {
					clear(want[d.Sector*512 : (d.Sector+uint64(d.Sectors))*512])
				}
			}
			if !bytes.Equal(read.data.Bytes, want) {
				t.Error("the disk does not hold what it must after the request")
			}
		})
	}
}

func TestReadOnlyDiskRefusesWrites(t *testing.T) {
	r := newRig(t, memDisk(t, mem.Options{}), rigOptions{handle: block.HandleOptions{ReadOnly: true}})
	q := r.queues[0]
	if r.dev.Features()&virtioblk.FeatureRO == 0 {
		t.Error("the device does not say that it is read-only")
	}
	for _, kind := range []virtioblk.RequestType{virtioblk.TypeOut, virtioblk.TypeDiscard, virtioblk.TypeWriteZeroes} {
		if status, _ := q.do(r.ranges(kind, 512)); status != virtioblk.StatusIOErr {
			t.Errorf("type %d: status %d, want an I/O error", kind, status)
		}
	}
	if status, _ := q.do(r.standard(virtioblk.TypeIn, 0, 512)); status != virtioblk.StatusOK {
		t.Error("it cannot be read")
	}
}

// FuzzRequest throws chains of random framing and content at a device and wants each back, once, with the disk's memory
// untouched behind its end. The driver judges doubled and unknown completions itself.
func FuzzRequest(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, uint16(512), uint8(1))
	f.Add([]byte{11, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 1, 0, 0, 0}, uint16(0), uint8(3))
	f.Add([]byte{1, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255}, uint16(1024), uint8(2))
	f.Add([]byte{4}, uint16(0), uint8(0))
	f.Fuzz(func(t *testing.T, readable []byte, writable uint16, cut uint8) {
		r := newRig(t, memDisk(t, mem.Options{}), rigOptions{})
		q := r.queues[0]
		req := &request{status: r.alloc(1)}
		if len(readable) > 0 {
			b := r.alloc(len(readable))
			copy(b.Bytes, readable)
			at := min(int(cut), len(readable))
			for _, s := range []virtqtest.Segment{{Addr: b.Addr, Len: uint32(at)}, {Addr: b.Addr + uint64(at), Len: uint32(len(readable) - at)}} {
				if s.Len > 0 {
					req.readable = append(req.readable, s)
				}
			}
		}
		if writable > 0 {
			req.writable = append(req.writable, segment(r.alloc(int(writable))))
		}
		if len(req.readable)+len(req.writable) == 0 {
			return
		}
		if _, written := q.do(req); int(written) > int(writable) {
			t.Errorf("used length %d of %d writable bytes", written, writable)
		}
		if status, _ := q.do(r.standard(virtioblk.TypeIn, 0, 512)); status != virtioblk.StatusOK {
			t.Errorf("a good read afterwards: status %d", status)
		}
	})
}
