// SPDX-License-Identifier: Apache-2.0

package check

import (
	"errors"
	"fmt"
	"math"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// checker is one run.
type checker struct {
	s Store
	o *Options
	r Result

	fix Repair // what may be changed: what was asked for, as long as everything can be read

	h    *qcow2.Header
	g    qcow2.Geometry
	size int64 // of the file
	file int64 // clusters of the file, a last part of one included

	want *counts        // references found
	over map[int64]bool // clusters with more references than want can hold
	have *counts        // refcounts of the image, of the clusters of the file; set by compare

	tables  []*table // L2 tables, in the order in which they were found
	byPlace map[int64]*table

	refcounts *refcounts
	rebuild   bool     // the refcount structures themselves are not sound
	again     bool     // everything is counted a second time, without the refcount structures and without a word
	misplaced []*table // with entries that a repair will change

	snapshots     []qcow2.Snapshot
	snapshotBytes int64

	narrow *WidthError // the first cluster whose references are too many to count

	done, total int64 // of Progress
	buf         []byte
}

// table is an L2 table and how often it is referred to.
type table struct {
	off           int64
	active, total uint64 // by the active L1 table, by all
}

// Run checks the image on s, and repairs what o allows. An error is an image that cannot be looked at, or a store that
// cannot be written to; everything else is in the result, of which as much is filled in as is known.
func Run(s Store, o *Options) (*Result, error) {
	if o == nil {
		o = &Options{}
	}
	c := &checker{s: s, o: o, fix: o.Repair}
	if err := c.open(); err != nil {
		return &c.r, err
	}
	for _, step := range []func() error{c.clearAutoclear, c.countReferences, c.repairEntries, c.compare, c.checkCopied, c.finish} {
		if err := step(); err != nil {
			return &c.r, err
		}
	}
	return &c.r, nil
}

// RebuildRefcounts makes the refcounts of an image whose dirty bit is set true again, and clears the bit. It changes the
// header on disk, which must be read again; an error is also an image with corruptions that could not be repaired, which
// must not be written to. After it nothing is cached: the caller opens the image anew.
func RebuildRefcounts(s Store) (*Result, error) {
	r, err := Run(s, &Options{Repair: Everything})
	if err == nil && (r.Corruptions != 0 || r.CheckErrors != 0) {
		err = &qcow2.CorruptError{What: fmt.Sprintf("image was not closed, and %d corruptions and %d errors of reading it cannot be repaired",
			r.Corruptions, r.CheckErrors)}
	}
	return r, err
}

// open reads the header.
func (c *checker) open() error {
	h, err := qcow2.ReadHeaderUnchecked(c.s.Read)
	if err != nil {
		return err
	}
	if err := h.Supported(); err != nil {
		return err
	}
	c.h, c.g = h, h.Geometry()
	if err := c.validate(); err != nil {
		return err
	}
	if c.size, err = c.s.Size(); err != nil {
		return fmt.Errorf("ask for the size of the image: %w", err)
	}
	c.file = c.g.Clusters(c.size)
	c.buf = make([]byte, c.g.ClusterSize)
	c.r.TotalClusters = c.g.Clusters(h.Size)
	return nil
}

// validate is the header's own, but for what can be repaired: that there is no refcount table, or too many snapshots.
func (c *checker) validate() error {
	h := *c.h
	if h.RefcountTableClusters == 0 {
		h.RefcountTableClusters, h.RefcountTableOffset = 1, c.g.ClusterSize // wherever: none is read
	}
	if c.fix&Errors != 0 {
		h.Snapshots = min(h.Snapshots, qcow2.MaxSnapshots)
	}
	return h.Validate()
}

// clearAutoclear clears bits that are not known before anything is written: what they stand for may not hold afterwards.
func (c *checker) clearAutoclear() error {
	if c.fix == Nothing || !c.h.ClearUnknownAutoclear() {
		return nil
	}
	var b [8]byte
	putUint64(b[:], c.h.Autoclear)
	if err := errors.Join(c.s.Write(b[:], qcow2.OffsetAutoclear), c.s.Flush()); err != nil {
		return fmt.Errorf("clear autoclear bits: %w", err)
	}
	return nil
}

// countReferences makes want: what everything in the image refers to.
func (c *checker) countReferences() error {
	c.want, c.over = newCounts(&c.g), make(map[int64]bool)
	c.tables, c.byPlace = nil, make(map[int64]*table)
	c.use(0, c.g.ClusterSize, 1)
	if err := c.readSnapshots(); err != nil {
		return err
	}
	if err := c.countL1s(); err != nil {
		return err
	}
	for _, t := range c.tables {
		if err := c.countL2(t); err != nil {
			return err
		}
		c.step()
	}
	c.use(c.h.SnapshotsOffset, c.snapshotBytes, 1)
	if off, n, ok, err := c.h.Encryption(); err != nil {
		c.corrupt(1, false, "ERROR %v", err)
	} else if ok {
		c.use(off, n, 1)
	}
	if err := c.countBitmaps(); err != nil {
		return err
	}
	if c.r.CheckErrors != 0 {
		c.fix = Nothing // what a table names that could not be read is no leak
	}
	if c.again {
		return nil
	}
	return c.countRefcounts()
}

// use counts n references to each cluster of a range of the file.
func (c *checker) use(off, length int64, n uint64) {
	if length <= 0 {
		return
	}
	// the last cluster of the file may be there in part
	if off < 0 || off > math.MaxInt64-length || off+length-c.size >= c.g.ClusterSize {
		c.corrupt(n, false, "ERROR: counting reference for region exceeding the end of the file by one cluster or more: offset 0x%x size 0x%x", off, length)
		return
	}
	for k := off >> c.g.ClusterBits; k <= (off+length-1)>>c.g.ClusterBits; k++ {
		if lost := c.want.add(k, n); lost > 0 {
			c.over[k] = true
			if c.narrow == nil {
				c.narrow = &WidthError{Offset: k << c.g.ClusterBits, Count: c.want.get(k) + lost}
			}
			c.corrupt(lost, false, "ERROR: overflow cluster offset=0x%x", k<<c.g.ClusterBits)
		}
	}
}

// references is what want holds of the cluster at off; false where there are more.
func (c *checker) references(off int64) (uint64, bool) {
	k := off >> c.g.ClusterBits
	return c.want.get(k), !c.over[k]
}

// inFile tells whether a range that was given to use was counted.
func (c *checker) inFile(off, length int64) bool {
	return off >= 0 && off <= math.MaxInt64-length && off+length-c.size < c.g.ClusterSize
}

func (c *checker) corrupt(n uint64, fixed bool, format string, args ...any) {
	if fixed {
		c.r.CorruptionsFixed += int64(n)
	} else {
		c.r.Corruptions += int64(n)
	}
	c.report(Corruption, fixed, format, args...)
}

func (c *checker) report(kind Kind, fixed bool, format string, args ...any) {
	if c.o.Report != nil && !c.again {
		c.o.Report(Finding{Kind: kind, Fixed: fixed, Text: fmt.Sprintf(format, args...)})
	}
}

// failed counts what could not be read. Only an error of the store stays one: the rest of the image is looked at.
func (c *checker) failed(format string, args ...any) {
	c.r.CheckErrors++
	c.report(Failure, false, format, args...)
}

func (c *checker) step() {
	c.done++
	if c.o.Progress != nil {
		c.o.Progress(min(c.done, c.total), c.total)
	}
}

// word says what happened to a finding, as it begins its line.
func (c *checker) word(need Repair) (string, bool) {
	if c.fix&need != 0 {
		return "Repairing", true
	}
	return "ERROR", false
}

// finish writes what a repair makes of the header's bits. An image that is sound now is neither dirty nor corrupt.
func (c *checker) finish() error {
	if c.fix == Nothing {
		return nil
	}
	if err := c.s.Flush(); err != nil {
		return fmt.Errorf("flush the repair: %w", err)
	}
	if c.r.Corruptions != 0 || c.r.CheckErrors != 0 || c.h.Incompatible&(qcow2.Dirty|qcow2.Corrupt) == 0 {
		return nil
	}
	c.h.Incompatible &^= qcow2.Dirty | qcow2.Corrupt
	var b [8]byte
	putUint64(b[:], c.h.Incompatible)
	if err := errors.Join(c.s.Write(b[:], qcow2.OffsetIncompatible), c.s.Flush()); err != nil {
		return fmt.Errorf("clear dirty and corrupt bits: %w", err)
	}
	return nil
}
