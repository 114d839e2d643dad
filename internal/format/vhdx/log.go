// SPDX-License-Identifier: Apache-2.0

package vhdx

import (
	"cmp"
	"encoding/binary"
	"hash/crc32"
	"io"
	"slices"

	"github.com/sluice-blk/sluice/internal/format/sparse"
)

const (
	logSector     = 4 * kib
	maxLog        = 16 * mib // Hyper-V and QEMU write 1 MiB
	maxLogZeros   = 1024     // a log holds few ranges of zeros
	maxLogOffset  = 2 * maxSize
	logHeaderSize = 64
	descriptor    = 32
)

// ring is the log as it lies in the file. Entries begin at its sectors and may go round its end.
type ring struct {
	bytes   []byte
	id      guid    // of the entries that count
	entries []entry // by their first sector; length 0: none
}

// entry is one entry of the log, without its changes.
type entry struct {
	sequence      uint64
	at, length    int64
	tail          int64
	count         int64  // of descriptors
	flushed, last uint64 // how long the file was at least, and shall be
}

// replay finds the run of entries that holds and carries it out in memory.
//
// [MS-VHDX] 2.3.2: the run is a row of sound entries whose numbers follow one another, the last of which names as its tail
// an entry of the row; of several such rows, the one with the highest number. The entries from that tail on are carried out.
func (i *Image) replay(r io.ReaderAt, h header) error {
	if h.logVersion != 0 {
		return sparse.Unsupportedf("VHDX log version %d (only 0 is read)", h.logVersion)
	}
	if h.log.length == 0 || h.log.length > maxLog {
		return sparse.Corruptf("VHDX log of %d bytes", h.log.length)
	}
	g := &ring{bytes: make([]byte, h.log.length), id: h.logGUID}
	if err := sparse.ReadFull(r, i.fileSize, g.bytes, h.log.offset, "VHDX log"); err != nil {
		return err
	}
	if err := g.scan(); err != nil {
		return err
	}
	run := g.activeRun()
	if len(run) == 0 {
		return sparse.Corruptf("VHDX log: the header says that there is something to carry out, and no sound entry is there")
	}
	if flushed := run[len(run)-1].flushed; flushed > uint64(i.fileSize) {
		return sparse.Corruptf("VHDX log: the file had %d bytes and has %d now (it is cut short)", flushed, i.fileSize)
	}
	i.Replayed = len(run)
	i.log = newOverlay()
	for _, e := range run {
		g.changes(e, i.log.add)
	}
	return i.log.finish()
}

// scan looks at each sector for an entry that is sound. Sound entries lie apart from one another, and what is left of older
// ones does not add up to more than the ring; a ring where much more has to be summed is made to take time.
func (g *ring) scan() error {
	size := int64(len(g.bytes))
	g.entries = make([]entry, size/logSector)
	budget := 16 * size
	for at := int64(0); at < size; at += logSector {
		e, ok := g.header(at)
		if !ok {
			continue
		}
		if budget -= e.length; budget < 0 {
			return sparse.Corruptf("VHDX log: its entries lie over one another")
		}
		if g.sum(e) && g.changes(e, nil) {
			g.entries[at/logSector] = e
		}
	}
	return nil
}

// header reads the header of the entry at a sector, if one is there.
func (g *ring) header(at int64) (e entry, ok bool) {
	h, size := g.bytes[at:at+logHeaderSize], int64(len(g.bytes))
	if string(h[:4]) != "loge" || guid(h[32:48]) != g.id {
		return e, false
	}
	e = entry{
		at:       at,
		length:   int64(binary.LittleEndian.Uint32(h[8:])),
		tail:     int64(binary.LittleEndian.Uint32(h[12:])),
		sequence: binary.LittleEndian.Uint64(h[16:]),
		count:    int64(binary.LittleEndian.Uint32(h[24:])),
		flushed:  binary.LittleEndian.Uint64(h[48:]),
		last:     binary.LittleEndian.Uint64(h[56:]),
	}
	return e, e.length >= logSector && e.length%logSector == 0 && e.length <= size && e.tail%logSector == 0 && e.tail < size &&
		e.sequence != 0 && e.count <= (e.length-logHeaderSize)/descriptor
}

// sum compares the checksum of an entry.
func (g *ring) sum(e entry) bool {
	first := g.bytes[e.at:min(e.at+e.length, int64(len(g.bytes)))]
	sum := crc32.Update(0, castagnoli, first[:4])
	sum = crc32.Update(sum, castagnoli, make([]byte, 4))
	sum = crc32.Update(sum, castagnoli, first[8:])
	sum = crc32.Update(sum, castagnoli, g.bytes[:e.length-int64(len(first))])
	return sum == binary.LittleEndian.Uint32(first[4:])
}

// sector gives sector k of an entry.
func (g *ring) sector(e entry, k int64) []byte {
	at := (e.at + k*logSector) % int64(len(g.bytes))
	return g.bytes[at : at+logSector]
}

// change is one change that the log makes to the file: a sector, or zeros where sector is nil.
type change struct {
	offset, length int64
	sector         []byte // as it lies in the log
	lead           [8]byte
	trail          [4]byte
}

// changes goes through the changes of an entry, and tells whether all are sound. Their sectors follow the descriptors.
func (g *ring) changes(e entry, each func(change)) bool {
	next := (logHeaderSize + e.count*descriptor + logSector - 1) / logSector
	for k := range e.count {
		at := logHeaderSize + k*descriptor
		d := g.sector(e, at/logSector)[at%logSector:][:descriptor]
		c, ok := parseChange(d, e.sequence)
		if !ok {
			return false
		}
		if c.length == 0 {
			if next*logSector >= e.length {
				return false
			}
			c.length, c.sector = logSector, g.sector(e, next)
			next++
			if !soundSector(c.sector, e.sequence) {
				return false
			}
		}
		if each != nil {
			each(c)
		}
	}
	return true
}

// parseChange reads a descriptor. A length of 0 stands for a sector that follows.
func parseChange(d []byte, sequence uint64) (c change, ok bool) {
	offset, length := binary.LittleEndian.Uint64(d[16:]), uint64(0)
	switch string(d[:4]) {
	case "zero":
		if length = binary.LittleEndian.Uint64(d[8:]); length == 0 {
			return c, false
		}
	case "desc":
		c.lead, c.trail = [8]byte(d[8:16]), [4]byte(d[4:8])
	default:
		return c, false
	}
	if offset > maxLogOffset || length > maxLogOffset || (offset|length)%logSector != 0 {
		return c, false
	}
	c.offset, c.length = int64(offset), int64(length)
	return c, binary.LittleEndian.Uint64(d[24:]) == sequence
}

// soundSector looks at the signature and the number at the two ends of a sector in the log.
func soundSector(s []byte, sequence uint64) bool {
	number := uint64(binary.LittleEndian.Uint32(s[4:]))<<32 | uint64(binary.LittleEndian.Uint32(s[logSector-4:]))
	return string(s[:4]) == "data" && number == sequence
}

// activeRun gives the entries to carry out.
func (g *ring) activeRun() []entry {
	var best []entry
	for _, e := range g.entries {
		if e.length == 0 {
			continue
		}
		run := g.runFrom(e)
		if len(run) > 0 && (best == nil || run[len(run)-1].sequence > best[len(best)-1].sequence) {
			best = run
		}
	}
	return best
}

// runFrom gives the entries from the tail to the head of the row that begins with e; none when the row has no tail.
func (g *ring) runFrom(e entry) []entry {
	var row []entry
	size := int64(len(g.bytes))
	for used := int64(0); e.length > 0 && used+e.length <= size; {
		row = append(row, e)
		used += e.length
		next := g.entries[(e.at+e.length)%size/logSector]
		if next.sequence != e.sequence+1 {
			break
		}
		e = next
	}
	for ; len(row) > 0; row = row[:len(row)-1] {
		k, ok := slices.BinarySearchFunc(row, row[len(row)-1].tail, func(e entry, tail int64) int {
			return cmp.Compare((e.at-row[0].at+size)%size, (tail-row[0].at+size)%size)
		})
		if ok {
			return row[k:]
		}
	}
	return nil
}

// overlay is what the log puts over the file. Later changes go over earlier ones.
type overlay struct {
	sectors map[int64]ordered // by offset
	zeros   []ordered
	changed []region // all of it, in order and joined
	n       int

	file io.ReaderAt
}

type ordered struct {
	change
	order int
}

func newOverlay() *overlay { return &overlay{sectors: map[int64]ordered{}} }

func (o *overlay) add(c change) {
	o.n++
	if c.sector == nil {
		o.zeros = append(o.zeros, ordered{c, o.n})
	} else {
		o.sectors[c.offset] = ordered{c, o.n}
	}
	o.changed = append(o.changed, region{c.offset, c.length})
}

// finish puts what was added in order.
func (o *overlay) finish() error {
	if len(o.zeros) > maxLogZeros {
		return sparse.Unsupportedf("VHDX log with more than %d ranges of zeros (have it replayed first: qemu-img check -r all, or open it in Hyper-V)", maxLogZeros)
	}
	slices.SortFunc(o.changed, func(a, b region) int { return cmp.Compare(a.offset, b.offset) })
	joined := o.changed[:0]
	for _, g := range o.changed {
		if k := len(joined) - 1; k >= 0 && g.offset <= joined[k].offset+joined[k].length {
			joined[k].length = max(joined[k].length, g.offset+g.length-joined[k].offset)
			continue
		}
		joined = append(joined, g)
	}
	o.changed = joined
	return nil
}

// touches tells whether the log changes something in the range. A nil overlay touches nothing.
func (o *overlay) touches(offset, length int64) bool {
	if o == nil {
		return false
	}
	k, _ := slices.BinarySearchFunc(o.changed, offset, func(g region, at int64) int {
		if g.offset+g.length <= at {
			return -1
		}
		return 1
	})
	return k < len(o.changed) && o.changed[k].offset < offset+length
}

func (o *overlay) over(file io.ReaderAt) io.ReaderAt {
	return &overlay{o.sectors, o.zeros, o.changed, o.n, file}
}

// ReadAt implements io.ReaderAt.
func (o *overlay) ReadAt(p []byte, offset int64) (int, error) {
	n, err := o.file.ReadAt(p, offset)
	end := offset + int64(n)
	for at := offset &^ (logSector - 1); at < end; at += logSector {
		from, to := max(at, offset), min(at+logSector, end)
		if o.touches(from, to-from) {
			o.patch(p[from-offset:to-offset], at, from-at)
		}
	}
	return n, err
}

// patch changes p, which is a part of the file's sector at at and begins skip bytes behind its beginning.
func (o *overlay) patch(p []byte, at, skip int64) {
	s, ok := o.sectors[at]
	for _, z := range o.zeros {
		if z.offset <= at && at < z.offset+z.length && (!ok || z.order > s.order) {
			clear(p)
			ok = false // and no sector before it counts
			s.order = z.order
		}
	}
	if !ok {
		return
	}
	var whole [logSector]byte
	copy(whole[:], s.sector)
	copy(whole[:], s.lead[:])
	copy(whole[logSector-len(s.trail):], s.trail[:])
	copy(p, whole[skip:])
}
