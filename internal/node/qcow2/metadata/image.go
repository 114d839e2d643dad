// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
)

// Image is an open image. See the package comment for its thread rule.
type Image struct {
	s  Store
	o  Options
	h  *qcow2.Header  // as the image is used
	g  qcow2.Geometry // never changes
	on onDisk         // the header as it is in the file

	readOnly   bool
	closed     bool
	backing    bool  // what is unallocated may be other than zeros
	broken     error // damage that was found while writing was allowed: nothing is written any more
	ready      bool  // changes may begin: see prepare
	preparing  bool
	marked     bool // the dirty bit is on disk, and ours to clear
	marking    bool
	keepMarked bool // refcounts are not sure to be right: the dirty bit stays

	fileEnd int64 // bytes: no table lies behind it
	claims  claims

	l1 l1Table
	l2 *cache // slices, by guest cluster / entries of a slice
	// sliceBits is log2 of the entries of a slice, sliceBytes its size.
	sliceBits  uint32
	sliceBytes int64

	refcounts
	releases
	commits

	inflight *Allocation // all that are between Begin and Link or Abort
	working  int         // methods that are inside
	alone    bool        // one that must be alone is inside, or waits for the others to leave

	snapshots     []qcow2.Snapshot
	snapshotBytes int64 // of their table
	bitmaps       []qcow2.Bitmap
	badBitmaps    bool // the directory cannot be read
}

// l2CacheDefault is the most that is taken for L2 tables without being told: as others do, 256 GiB of disk with clusters
// of 64 KiB.
const l2CacheDefault = 32 << 20

// sliceMax is how much of an L2 table is read and written at a time: a block of most disks and file systems.
const sliceMax = 4096

// errReadOnly is the answer to changes of an image that was opened for reading.
var errReadOnly = fmt.Errorf("change a qcow2 image that is open for reading only: %w", syscall.EROFS)

// Open reads and checks the header and the tables that stay in memory. A writable image with the dirty bit has its
// refcounts rebuilt first; one with the corrupt bit is opened for reading only (EACCES otherwise). It writes nothing else:
// autoclear bits are cleared before the first change. The store stays the caller's, also after an error.
func Open(s Store, o *Options) (*Image, error) {
	m := &Image{s: s, readOnly: o != nil && o.ReadOnly}
	if o != nil {
		m.o = *o
	}
	if err := m.open(); err != nil {
		return nil, fmt.Errorf("open qcow2 image: %w", err)
	}
	return m, nil
}

// AssumeBacking says that what the image does not store is looked for elsewhere although its header names no backing file:
// zeros have to be stored then. It comes before the first change.
func (m *Image) AssumeBacking() { m.backing = true }

func (m *Image) open() error {
	if err := m.readHeader(); err != nil {
		return err
	}
	switch h := m.h; {
	case m.readOnly:
	case h.IsCorrupt() && !m.o.KeepCorrupt:
		return fmt.Errorf("image is marked corrupt, it can be opened for reading only (img check -r all repairs it): %w", syscall.EACCES)
	case h.HasDataFile() && m.o.Data == nil:
		return fmt.Errorf("image has an external data file, and none was given: %w", syscall.EINVAL)
	case h.IsDirty() && !m.o.KeepDirty:
		if _, err := check.RebuildRefcounts(m.s); err != nil {
			return fmt.Errorf("rebuild the refcounts of an image that was not closed: %w", err)
		}
		if err := m.readHeader(); err != nil {
			return err
		}
	}
	m.keepMarked = m.h.IsDirty()
	m.backing = m.h.BackingFile != ""
	m.makeCaches()
	for _, step := range []func() error{m.readL1, m.readRefcountTable, m.readDirectories} {
		if err := step(); err != nil {
			return err
		}
	}
	if !m.readOnly {
		m.claimTables()
		m.ready = !m.needsPreparing()
	}
	return nil
}

func (m *Image) readHeader() error {
	size, err := m.s.Size()
	if err != nil {
		return fmt.Errorf("ask for the file's length: %w", err)
	}
	m.fileEnd = size
	if m.h, err = qcow2.ReadHeader(m.s.Read); err != nil {
		return fmt.Errorf("read the header: %w", err)
	}
	m.g = m.h.Geometry()
	return m.on.read(m.s, m.h)
}

// makeCaches sizes the caches by the options and the disk.
func (m *Image) makeCaches() {
	m.sliceBytes = min(m.g.ClusterSize, sliceMax)
	m.sliceBits = 0
	for int64(m.g.L2EntrySize)<<m.sliceBits < m.sliceBytes {
		m.sliceBits++
	}
	whole := m.g.L1EntriesFor(m.h.Size) * m.g.ClusterSize // of all L2 tables
	bytes := m.o.L2CacheBytes
	if bytes <= 0 {
		bytes = min(whole, l2CacheDefault)
	}
	m.l2 = newCache(int(m.sliceBytes), max(16, bytes/m.sliceBytes))
	if m.o.RefcountCacheBytes > 0 {
		bytes = m.o.RefcountCacheBytes
	} else {
		bytes /= 4
	}
	m.blocks = newCache(int(m.g.ClusterSize), max(4, bytes/m.g.ClusterSize))
}

// readDirectories reads the snapshot table and the bitmap directory. Bitmaps that cannot be read are no reason to refuse an
// image: they stay what they are until the first change, which declares them inconsistent.
func (m *Image) readDirectories() error {
	var err error
	if m.snapshots, m.snapshotBytes, err = qcow2.ReadSnapshots(m.s.Read, m.h); err != nil {
		return fmt.Errorf("read the snapshot table: %w", err)
	}
	for i := range m.snapshots {
		if err := m.snapshots[i].Validate(&m.g); err != nil && !m.readOnly {
			return err
		}
	}
	if m.h.Autoclear&qcow2.BitmapsBit == 0 {
		return nil
	}
	if m.bitmaps, err = qcow2.ReadBitmaps(m.s.Read, m.h); err != nil {
		var damaged *qcow2.CorruptError
		if !errors.As(err, &damaged) {
			return fmt.Errorf("read the bitmap directory: %w", err)
		}
		m.badBitmaps = true
	}
	return nil
}

// claimTables marks where the tables are.
func (m *Image) claimTables() {
	m.claims.claim(0, 1)
	m.claimBytes(m.l1.offset, int64(len(m.l1.entries))*8)
	for _, e := range m.l1.entries {
		if e.Offset() != 0 {
			m.claims.claim(e.Offset()>>m.g.ClusterBits, 1)
		}
	}
	m.claimBytes(m.tableOffset, int64(len(m.table))*8)
	for _, e := range m.table {
		if e.Offset() != 0 {
			m.claims.claim(int64(uint64(e.Offset())>>m.g.ClusterBits), 1)
		}
	}
	m.claimBytes(m.h.SnapshotsOffset, m.snapshotBytes)
	for i := range m.snapshots {
		m.claimBytes(m.snapshots[i].L1Offset, int64(m.snapshots[i].L1Entries)*8)
	}
	if e, ok, err := m.h.Bitmaps(); ok && err == nil {
		m.claimBytes(e.DirectoryOffset, e.DirectorySize)
	}
	for i := range m.bitmaps {
		m.claimBytes(m.bitmaps[i].TableOffset, int64(m.bitmaps[i].TableEntries)*8)
	}
}

func (m *Image) claimBytes(off, n int64)   { m.claims.claim(off>>m.g.ClusterBits, m.g.Clusters(n)) }
func (m *Image) releaseBytes(off, n int64) { m.claims.release(off>>m.g.ClusterBits, m.g.Clusters(n)) }

// Header as it is now: to read, not to change. Does not wait.
func (m *Image) Header() *qcow2.Header { return m.h }

// Geometry of the image. Does not wait.
func (m *Image) Geometry() *qcow2.Geometry { return &m.g }

// Size of the virtual disk in bytes. Does not wait.
func (m *Image) Size() int64 { return m.h.Size }

// ReadOnly tells whether the image was opened so. Does not wait.
func (m *Image) ReadOnly() bool { return m.readOnly }

// Stats since Open. Does not wait.
func (m *Image) Stats() Stats {
	return Stats{
		L2Hits: m.l2.hits, L2Misses: m.l2.misses,
		RefcountHits: m.blocks.hits, RefcountMisses: m.blocks.misses,
		L2CacheBytes: int64(m.l2.limit) * m.sliceBytes, L2Dirty: int64(m.l2.dirty) * m.sliceBytes,
		L2CacheCovers: int64(m.l2.limit) << (m.sliceBits + m.g.ClusterBits),
		Commits:       m.done, Flushes: m.flushes, Allocated: m.allocated, Freed: m.freed,
		Pending: m.pending, Corrupt: m.broken != nil,
	}
}

// enter begins a method that changes tables; leave ends it. It waits until nobody is inside who must be alone.
func (m *Image) enter() error {
	for m.alone {
		if err := m.wait(func() bool { return !m.alone }); err != nil {
			return err
		}
	}
	if err := m.mayChange(); err != nil {
		return err
	}
	m.working++
	return nil
}

func (m *Image) leave() { m.working-- }

func (m *Image) mayChange() error {
	switch {
	case m.readOnly:
		return errReadOnly
	case m.closed:
		return fmt.Errorf("change a qcow2 image that is closed: %w", syscall.EBADF)
	}
	return m.broken
}

// enterAlone begins a method that needs all tables for itself, with everything committed; leaveAlone ends it. guest says
// that it changes what the guest sees.
func (m *Image) enterAlone(guest bool) error {
	if err := m.enter(); err != nil {
		return err
	}
	m.alone = true
	m.leave()
	err := m.wait(func() bool {
		return m.working == 0 && m.inflight == nil && !m.running && !m.reaping
	})
	if err == nil {
		err = m.clearAutoclear()
	}
	if err == nil && guest {
		err = m.prepare()
	}
	if err == nil {
		err = m.settle()
	}
	if err != nil {
		m.leaveAlone()
	}
	return err
}

func (m *Image) leaveAlone() { m.alone = false }

// wait suspends the caller until ready.
func (m *Image) wait(ready func() bool) error {
	for !ready() {
		if m.o.Waiter == nil {
			return fmt.Errorf("wait for another user of a qcow2 image that has a single one: %w", syscall.EDEADLK)
		}
		m.o.Waiter.Wait(ready)
	}
	return nil
}

// read fills p from the file.
func (m *Image) read(what string, p []byte, off int64) error {
	if err := m.s.Read(p, off); err != nil {
		return fmt.Errorf("read %s at %#x: %w", what, off, err)
	}
	return nil
}

// write brings a table, or a part of one, to the file. It is the one door for that: nothing passes once the image is known to be
// damaged, or where two tables claim the same place.
func (m *Image) write(what string, p []byte, off int64) error {
	if m.broken != nil {
		return m.broken
	}
	first := off >> m.g.ClusterBits
	if m.claims.contested(first, m.g.Clusters(off+int64(len(p)))-first) {
		return m.damage(off, "%s overlaps with another table", what)
	}
	err := m.s.Write(p, off)
	m.fileEnd = max(m.fileEnd, off+int64(len(p)))
	m.highWater = max(m.highWater, m.g.Clusters(m.fileEnd))
	if err != nil {
		return fmt.Errorf("write %s at %#x: %w", what, off, err)
	}
	return nil
}

func (m *Image) flush() error {
	m.flushes++
	if err := m.s.Flush(); err != nil {
		m.flushFailed = true
		return fmt.Errorf("flush the image: %w", err)
	}
	return nil
}

// damage is the answer to a table that breaks the rules of the format. A writable image is marked corrupt, and from then on
// all changes fail; reads that do not meet the damage go on.
func (m *Image) damage(off int64, format string, args ...any) error {
	err := &qcow2.CorruptError{Offset: off, What: fmt.Sprintf(format, args...)}
	if m.readOnly || m.broken != nil {
		return err
	}
	m.broken = fmt.Errorf("image is marked corrupt (img check -r all may repair it): %w", err)
	if m.g.Version >= 3 {
		m.h.Incompatible |= qcow2.Corrupt
		if e := m.on.change(m, func(h *qcow2.Header) { h.Incompatible |= qcow2.Corrupt }); e == nil {
			_ = m.flush() // there is nothing more that could be done
		}
	}
	if m.o.Damaged != nil {
		m.o.Damaged(m.broken)
	}
	return err
}

// Close commits, brings refcounts up to date, clears the dirty bit if this Open set it, and ends the use of the image. No
// request may be on its way. After an error the image is closed too: what was not committed is lost, as by a crash.
func (m *Image) Close() error {
	if m.readOnly || m.closed {
		m.closed = true
		return nil
	}
	err := m.wait(func() bool {
		return !m.alone && m.working == 0 && m.inflight == nil && !m.running && !m.reaping
	})
	if err == nil {
		err = m.mayChange()
	}
	m.closed = true
	if err == nil {
		err = m.settle()
	}
	if err == nil {
		err = m.unmark()
	}
	if err != nil {
		return fmt.Errorf("close qcow2 image: %w", err)
	}
	return nil
}
