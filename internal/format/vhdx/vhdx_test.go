// SPDX-License-Identifier: Apache-2.0

package vhdx

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"io"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-blk/sluice/internal/blocktest/imagetest"
	"github.com/sluice-blk/sluice/internal/format/sparse"
)

// parts are the pieces that an image is made of, each of which a test may change. The image is 8 MiB: log, metadata and
// table from 1 MiB on, and four blocks behind them.
type parts struct {
	header, regions, items, values, table, log []byte
}

const (
	atLog      = 1 * mib
	atMetadata = 2 * mib
	atTable    = 3 * mib
	atBlocks   = 4 * mib
	imageSize  = 8 * mib
)

var logID = makeGUID(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)

func le(v ...any) []byte {
	var b bytes.Buffer
	for _, x := range v {
		_ = binary.Write(&b, binary.LittleEndian, x) // to memory, of numbers
	}
	return b.Bytes()
}

// sound is an image of a disk of 5 MiB and a half in blocks of 1 MiB: the second block of the file, a hole, zeros,
// something undefined, the first block, and the half of the fourth.
func sound() parts {
	return parts{
		header: le([]byte("head"), uint32(0), uint64(7), [16]byte{}, [16]byte{}, guid{}, uint16(0), uint16(1), uint32(mib), uint64(atLog)),
		regions: le([]byte("regi"), uint32(0), uint32(2), uint32(0),
			regionTable, uint64(atTable), uint32(mib), uint32(1),
			regionMetadata, uint64(atMetadata), uint32(mib), uint32(1)),
		items: le([]byte("metadata"), uint16(0), uint16(5), [20]byte{},
			itemParameters, uint32(metadataSize), uint32(8), uint32(4), uint32(0),
			itemSize, uint32(metadataSize+8), uint32(8), uint32(6), uint32(0),
			itemLogicalSector, uint32(metadataSize+16), uint32(4), uint32(6), uint32(0),
			itemPhysicalSector, uint32(metadataSize+20), uint32(4), uint32(6), uint32(0),
			itemIdentifier, uint32(metadataSize+24), uint32(16), uint32(6), uint32(0)),
		values: le(uint32(mib), uint32(0), uint64(5*mib+mib/2), uint32(512), uint32(4096), [16]byte{1}),
		table: le(uint64(atBlocks+mib|blockPresent), uint64(blockNotPresent), uint64(blockZero), uint64(blockUndefined),
			uint64(atBlocks|blockPresent), uint64(atBlocks+3*mib|blockPresent)),
	}
}

// image puts the parts together and makes the checksums right.
func (p parts) image() []byte {
	b := make([]byte, imageSize)
	copy(b, Magic)
	first := bytes.Clone(p.header)
	if len(first) >= 16 {
		first[8]-- // an older header, which does not hold
	}
	put(b[headerOffset1:headerOffset1+headerSize], first)
	put(b[headerOffset2:headerOffset2+headerSize], p.header)
	put(b[regionsOffset1:regionsOffset1+regionListSize], p.regions)
	put(b[regionsOffset2:regionsOffset2+regionListSize], p.regions)
	copy(b[atMetadata:atMetadata+metadataSize], p.items)
	copy(b[atMetadata+metadataSize:], p.values)
	copy(b[atTable:atBlocks], p.table)
	copy(b[atLog:atMetadata], p.log)
	return b
}

// put copies a part to its place and sums it.
func put(place, part []byte) {
	copy(place, part)
	binary.LittleEndian.PutUint32(place[4:], 0)
	binary.LittleEndian.PutUint32(place[4:], crc32.Checksum(place, castagnoli))
}

// logEntry makes an entry of the log. A change without data is zeros.
func logEntry(sequence uint64, tail int64, changes ...change) []byte {
	sectors := (logHeaderSize + len(changes)*descriptor + logSector - 1) / logSector
	var descriptors, data []byte
	for _, c := range changes {
		if c.sector == nil {
			descriptors = append(descriptors, le([]byte("zero"), uint32(0), c.length, c.offset, sequence)...)
			continue
		}
		descriptors = append(descriptors, le([]byte("desc"), c.sector[logSector-4:], c.sector[:8], c.offset, sequence)...)
		s := bytes.Clone(c.sector)
		copy(s, le([]byte("data"), uint32(sequence>>32)))
		copy(s[logSector-4:], le(uint32(sequence)))
		data = append(data, s...)
	}
	b := make([]byte, sectors*logSector)
	copy(b, le([]byte("loge"), uint32(0), uint32(len(b)+len(data)), uint32(tail), sequence, uint32(len(changes)), uint32(0),
		logID, uint64(imageSize), uint64(imageSize)))
	copy(b[logHeaderSize:], descriptors)
	b = append(b, data...)
	put(b, b)
	return b
}

// withLog is an image whose log is in use.
func withLog(log []byte) parts {
	p := sound()
	copy(p.header[48:], logID[:])
	p.log = log
	return p
}

// tableSector is the sector of the table with these entries.
func tableSector(entries ...uint64) []byte {
	s := make([]byte, logSector)
	copy(s, le(entries))
	s[logSector-1] = 0x77
	return s
}

func open(r io.ReaderAt, size int64) (int64, sparse.Map, error) {
	i, err := Open(r, size)
	if err != nil {
		return 0, nil, err
	}
	m, err := i.Map(r)
	return i.Size, m, err
}

func extents(t *testing.T, b []byte) (all []sparse.Extent) {
	t.Helper()
	disk, m, err := open(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	for at := int64(0); at < disk; {
		e := m.Lookup(at, disk-at)
		all = append(all, e)
		at += e.Length
	}
	return all
}

func TestImage(t *testing.T) {
	b := sound().image()
	want := []sparse.Extent{
		{Kind: sparse.Data, Offset: 0, Length: mib, Host: 5 * mib},
		{Kind: sparse.Hole, Offset: mib, Length: mib},
		{Kind: sparse.Zero, Offset: 2 * mib, Length: mib},
		{Kind: sparse.Hole, Offset: 3 * mib, Length: mib},
		{Kind: sparse.Data, Offset: 4 * mib, Length: mib, Host: 4 * mib},
		{Kind: sparse.Data, Offset: 5 * mib, Length: mib / 2, Host: 7 * mib},
	}
	if d := cmp.Diff(want, extents(t, b)); d != "" {
		t.Error(d)
	}
	i, err := Open(bytes.NewReader(b), imageSize)
	if err != nil || i.LogicalSector != 512 || i.PhysicalSector != 4096 || i.Fixed || i.Replayed != 0 {
		t.Errorf("%+v, %v", i, err)
	}
	// Each of the two headers, and of the two lists of regions, will do.
	for _, at := range []int{headerOffset1, headerOffset2, regionsOffset1, regionsOffset2} {
		damaged := bytes.Clone(b)
		damaged[at+100] ^= 1
		if d := cmp.Diff(want, extents(t, damaged)); d != "" {
			t.Errorf("one copy at %d damaged: %s", at, d)
		}
	}
}

// Behind each chunk of blocks the table has an entry for its bitmap, which is no block.
func TestBitmapEntries(t *testing.T) {
	p := sound()
	// 4096 blocks of 1 MiB share a bitmap, with sectors of 512 bytes.
	p.values = le(uint32(mib), uint32(0), uint64(4097*mib), uint32(512), uint32(512), [16]byte{})
	p.table = make([]byte, 8*4098)
	copy(p.table[8*4095:], le(uint64(atBlocks|blockPresent), uint64(atBlocks+mib|blockPresent), uint64(atBlocks+2*mib|blockPresent)))
	want := []sparse.Extent{
		{Kind: sparse.Hole, Offset: 0, Length: 4095 * mib},
		{Kind: sparse.Data, Offset: 4095 * mib, Length: mib, Host: 4 * mib},
		{Kind: sparse.Data, Offset: 4096 * mib, Length: mib, Host: 6 * mib},
	}
	if d := cmp.Diff(want, extents(t, p.image())); d != "" {
		t.Error(d)
	}
}

func set(part *[]byte, at int, to ...any) {
	*part = bytes.Clone(*part)
	copy((*part)[at:], le(to...))
}

var changes = []struct {
	name   string
	change func(p *parts)
	want   string
}{
	{"version", func(p *parts) { set(&p.header, 66, uint16(2)) }, "version 2"},
	{"log beyond the end", func(p *parts) { set(&p.header, 68, uint32(64*mib)) }, "VHDX log"},
	{"log nowhere", func(p *parts) { set(&p.header, 72, uint64(1<<63)) }, "VHDX log"},
	{"log over the headers", func(p *parts) { set(&p.header, 72, uint64(0)) }, "VHDX log"},
	{"log version", func(p *parts) { set(&p.header, 48, logID, uint16(1)) }, "log version"},
	{"log in use and empty", func(p *parts) { set(&p.header, 48, logID) }, "no sound entry"},
	{"no log", func(p *parts) { set(&p.header, 48, logID, uint16(0), uint16(1), uint32(0)) }, "log of 0"},
	{"regions", func(p *parts) { set(&p.regions, 8, uint32(2048)) }, "at most 2047"},
	{"no regions", func(p *parts) { set(&p.regions, 8, uint32(0)) }, "missing"},
	{"a region twice", func(p *parts) { set(&p.regions, 16, regionMetadata) }, "twice"},
	{"an unknown region", func(p *parts) { set(&p.regions, 16, logID) }, "must be understood"},
	{"region on no MiB", func(p *parts) { set(&p.regions, 32, uint64(atTable+512)) }, "whole MiB"},
	{"region over the headers", func(p *parts) { set(&p.regions, 32, uint64(0)) }, "whole MiB"},
	{"region beyond the end", func(p *parts) { set(&p.regions, 32, uint64(1<<63)) }, "beyond the end"},
	{"region reaches beyond the end", func(p *parts) { set(&p.regions, 40, uint32(16*mib)) }, "beyond the end"},
	{"metadata without signature", func(p *parts) { set(&p.items, 0, uint8(0)) }, "no signature"},
	{"many items", func(p *parts) { set(&p.items, 10, uint16(2048)) }, "at most 2047"},
	{"no items", func(p *parts) { set(&p.items, 10, uint16(0)) }, "missing"},
	{"an item twice", func(p *parts) { set(&p.items, 32, itemSize) }, "twice"},
	{"an unknown item", func(p *parts) { set(&p.items, 32, logID) }, "must be understood"},
	{"a parent locator", func(p *parts) { set(&p.items, 32, itemParent) }, "parent"},
	{"item in the list", func(p *parts) { set(&p.items, 48, uint32(32)) }, "behind the list"},
	{"item beyond the region", func(p *parts) { set(&p.items, 52, uint32(1<<31)) }, "within the region"},
	{"item too short", func(p *parts) { set(&p.items, 52, uint32(7)) }, "too short"},
	{"a parent", func(p *parts) { set(&p.values, 4, uint32(2)) }, "parent"},
	{"block size small", func(p *parts) { set(&p.values, 0, uint32(mib/2)) }, "block size"},
	{"block size odd", func(p *parts) { set(&p.values, 0, uint32(3*mib)) }, "block size"},
	{"block size large", func(p *parts) { set(&p.values, 0, uint32(512*mib)) }, "block size"},
	{"sectors", func(p *parts) { set(&p.values, 16, uint32(1024)) }, "logical sectors"},
	{"physical sectors", func(p *parts) { set(&p.values, 20, uint32(0)) }, "physical sectors"},
	{"disk of odd bytes", func(p *parts) { set(&p.values, 8, uint64(5*mib+1)) }, "no multiple"},
	{"disk too large", func(p *parts) { set(&p.values, 8, uint64(1<<63)) }, "64 TiB"},
	{"disk beyond the table", func(p *parts) { set(&p.values, 8, uint64(1<<40)) }, "are needed"},
	{"block in the headers", func(p *parts) { set(&p.table, 0, uint64(blockPresent)) }, "no block can lie"},
	{"block beyond the end", func(p *parts) { set(&p.table, 0, uint64(8*mib|blockPresent)) }, "cut short"},
	{"block nowhere", func(p *parts) { set(&p.table, 0, uint64(1<<63|blockPresent)) }, "is said to lie"},
	{"block in part", func(p *parts) { set(&p.table, 0, uint64(atBlocks|blockPartly)) }, "no parent"},
	{"unknown state", func(p *parts) { set(&p.table, 0, uint64(4)) }, "unknown state"},
}

func TestWhatIsRefused(t *testing.T) {
	for _, c := range changes {
		p := sound()
		c.change(&p)
		if err := imagetest.Survives(t, open, p.image()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
	b := sound().image()
	for _, n := range []int{0, 7, 8, headerOffset1 + 9, headerOffset2, regionsOffset1 + 9, regionsOffset2, atLog, atMetadata, atTable, imageSize - mib} {
		if err := imagetest.Survives(t, open, b[:n]); err == nil {
			t.Errorf("an image cut at %d is taken", n)
		}
	}
}

// A log in use is carried out in memory: of its entries those from the tail on, the later over the earlier.
func TestLogReplay(t *testing.T) {
	moved := func(block uint64) change {
		return change{offset: atTable, sector: tableSector(atBlocks+block*mib|blockPresent, atBlocks+mib|blockPresent)}
	}
	old := logEntry(3, 0, moved(3))
	first := logEntry(8, int64(len(old)), moved(2))
	second := logEntry(9, int64(len(old)), change{offset: atTable, length: logSector}, moved(0))
	third := logEntry(10, int64(len(old)), change{offset: atTable, length: logSector})
	host := func(b []byte) int64 {
		e := extents(t, b)[0]
		if e.Kind == sparse.Data {
			return e.Host
		}
		return 0
	}
	for _, c := range []struct {
		name     string
		log      []byte
		host     int64
		replayed int
	}{
		{"one entry", append(bytes.Clone(old), first...), 6 * mib, 1},
		{"the later over the earlier", bytes.Join([][]byte{old, first, second}, nil), 4 * mib, 2},
		{"zeros over all", bytes.Join([][]byte{old, first, second, third}, nil), 0, 3},
		{"a torn entry is not carried out", bytes.Join([][]byte{old, first, second[:len(second)-logSector]}, nil), 6 * mib, 1},
	} {
		b := withLog(c.log).image()
		if got := host(b); got != c.host {
			t.Errorf("%s: the first block is at %d, want %d", c.name, got, c.host)
		}
		i, err := Open(bytes.NewReader(b), imageSize)
		if err != nil || i.Replayed != c.replayed {
			t.Errorf("%s: %d entries were carried out, want %d, %v", c.name, i.Replayed, c.replayed, err)
		}
	}
}

// An entry may go round the end of the log.
func TestLogGoesRound(t *testing.T) {
	e := logEntry(5, mib-logSector, change{offset: atTable, sector: tableSector(atBlocks + 2*mib | blockPresent)})
	log := make([]byte, mib)
	copy(log[mib-logSector:], e)
	copy(log, e[logSector:])
	if got := extents(t, withLog(log).image())[0].Host; got != 6*mib {
		t.Errorf("the first block is at %d", got)
	}
}

func TestWhatALogIsRefusedFor(t *testing.T) {
	entry := func(c ...change) []byte { return logEntry(5, 0, c...) }
	damaged := entry(change{offset: atTable, length: logSector})
	damaged[logHeaderSize] = 'Z'
	put(damaged, damaged)
	var zeros []change
	for k := range int64(maxLogZeros + 1) {
		zeros = append(zeros, change{offset: atTable + k*logSector, length: logSector})
	}
	flushed := entry()
	copy(flushed[48:], le(uint64(imageSize+1)))
	put(flushed, flushed)
	for _, c := range []struct {
		name string
		log  []byte
		want string
	}{
		{"it changes a block", entry(change{offset: atBlocks + mib + logSector, sector: make([]byte, logSector)}), "changes block 0 of the disk"},
		{"an unknown change", damaged, "no sound entry"},
		{"a change of no sector", entry(change{offset: atTable + 1, length: logSector}), "no sound entry"},
		{"a change of nothing", entry(change{offset: atTable}), "no sound entry"},
		{"a change far away", entry(change{offset: maxLogOffset + logSector, length: logSector}), "no sound entry"},
		{"many zeros", entry(zeros...), "ranges of zeros"},
		{"the file was longer", flushed, "cut short"},
		{"its tail is not there", logEntry(5, logSector), "no sound entry"},
	} {
		if err := imagetest.Survives(t, open, withLog(c.log).image()); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

// Entries that lie over one another cannot make opening take long.
func TestOverlappingEntries(t *testing.T) {
	log := make([]byte, mib)
	for at := 0; at < len(log); at += logSector {
		copy(log[at:], le([]byte("loge"), uint32(0), uint32(mib), uint32(0), uint64(1+at), uint32(0), uint32(0), logID))
	}
	if err := imagetest.Survives(t, open, withLog(log).image()); err == nil || !strings.Contains(err.Error(), "over one another") {
		t.Error(err)
	}
}

func FuzzOpen(f *testing.F) {
	add := func(p parts) { f.Add(p.header, p.regions, p.items, p.values, p.table, p.log) }
	add(sound())
	add(withLog(logEntry(5, 0, change{offset: atTable, sector: tableSector(atBlocks | blockPresent)}, change{offset: atMetadata, length: logSector})))
	for _, c := range changes {
		p := sound()
		c.change(&p)
		add(p)
	}
	f.Fuzz(func(t *testing.T, header, regions, items, values, table, log []byte) {
		_ = imagetest.Survives(t, open, parts{header, regions, items, values, table, log}.image())
	})
}

// FuzzLog makes the checksums of entries right, so that what is behind them is reached.
func FuzzLog(f *testing.F) {
	f.Add(logEntry(5, 0, change{offset: atTable, sector: tableSector(atBlocks | blockPresent)}), uint16(2*logSector))
	f.Add(logEntry(5, 0, change{offset: atTable, length: mib}), uint16(logSector))
	f.Fuzz(func(t *testing.T, log []byte, length uint16) {
		n := int(length) &^ (logSector - 1)
		for at := 0; n > 0 && at+n <= min(len(log), mib); at += n {
			put(log[at:at+n], log[at:at+n])
		}
		_ = imagetest.Survives(t, open, withLog(log).image())
	})
}
