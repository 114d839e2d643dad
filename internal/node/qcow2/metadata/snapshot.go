// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"fmt"
	"slices"
	"strconv"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// Operations on snapshots change how many uses a cluster has, and with that the flag at each entry that says whether
// there is more than one: two things in many places, which no order of writes keeps in step. So they set the dirty bit
// before and clear it after; an image that was not closed in between has counts and flags made anew from its tables.
// What decides whether the operation has happened is one write to the header.

// SnapshotInfo describes a snapshot to make. An empty ID takes the next free number; the rest is as in qcow2.Snapshot.
type SnapshotInfo struct {
	ID, Name             string
	Seconds, Nanoseconds uint32
	VMClock              uint64
	ICount               uint64 // qcow2.NoICount where it is not known
}

// Snapshots are those of the image, oldest first; the caller may keep them. Does not wait.
func (m *Image) Snapshots() []qcow2.Snapshot { return slices.Clone(m.snapshots) }

// findSnapshot finds a snapshot by its ID, or else by its name.
func (m *Image) findSnapshot(idOrName string) (int, error) {
	byID := func(s qcow2.Snapshot) bool { return s.ID == idOrName }
	byName := func(s qcow2.Snapshot) bool { return s.Name == idOrName }
	i := slices.IndexFunc(m.snapshots, byID)
	if i < 0 {
		i = slices.IndexFunc(m.snapshots, byName)
	}
	if i < 0 {
		return 0, fmt.Errorf("find snapshot %q: %w", idOrName, syscall.ENOENT)
	}
	return i, m.snapshots[i].Validate(&m.g)
}

// CreateSnapshot keeps the disk as it is now. No request may be on its way, here and for the other methods on snapshots,
// Resize and the methods that change bitmaps.
func (m *Image) CreateSnapshot(info SnapshotInfo) (qcow2.Snapshot, error) {
	if err := m.enterAlone(false); err != nil {
		return qcow2.Snapshot{}, err
	}
	defer m.leaveAlone()
	s, err := m.newSnapshot(info)
	if err == nil {
		err = m.createSnapshot(&s)
	}
	if err != nil {
		return qcow2.Snapshot{}, fmt.Errorf("make a snapshot: %w", err)
	}
	return s, nil
}

func (m *Image) newSnapshot(info SnapshotInfo) (qcow2.Snapshot, error) {
	s := qcow2.Snapshot{
		ID: info.ID, Name: info.Name, Seconds: info.Seconds, Nanoseconds: info.Nanoseconds, VMClock: info.VMClock,
		L1Entries: m.h.L1Entries, DiskSize: m.h.Size, ICount: info.ICount,
	}
	if m.g.DataFile {
		return s, fmt.Errorf("guest data lie in an external file: %w", syscall.EOPNOTSUPP)
	}
	if s.ID == "" {
		highest := 0
		for i := range m.snapshots {
			if n, err := strconv.Atoi(m.snapshots[i].ID); err == nil {
				highest = max(highest, n)
			}
		}
		s.ID = strconv.Itoa(highest + 1)
	}
	if slices.ContainsFunc(m.snapshots, func(o qcow2.Snapshot) bool { return o.ID == s.ID }) {
		return s, fmt.Errorf("there is one with ID %q: %w", s.ID, syscall.EEXIST)
	}
	// what cannot be written must not be begun
	_, err := qcow2.EncodeSnapshots(append(slices.Clone(m.snapshots), s))
	return s, err
}

func (m *Image) createSnapshot(s *qcow2.Snapshot) error {
	if err := m.mark(); err != nil {
		return err
	}
	shared, err := m.share(m.l1.entries)
	if err == nil {
		if err = m.settle(); err == nil {
			err = m.fixCopied()
		}
		if err == nil {
			s.L1Offset, err = m.place("the L1 table of a snapshot", encodeL1(m.l1.entries))
		}
		if err == nil {
			err = m.setSnapshots(append(slices.Clone(m.snapshots), *s))
		}
	}
	if err != nil {
		m.displace(s.L1Offset, int64(s.L1Entries)*8)
		m.undoShare(m.l1.entries, shared)
		m.finish()
		return err
	}
	m.finish()
	return nil
}

// undoShare takes back what a share that is not to be has counted.
func (m *Image) undoShare(l1 []qcow2.L1Entry, shared int64) {
	err := m.restore()
	if err == nil {
		err = m.unshare(l1, shared)
	}
	if err == nil {
		err = m.fixCopied()
	}
	m.keepMarked = m.keepMarked || err != nil
}

// finish writes what an operation left to write, and clears the dirty bit. The operation has happened: what fails here is
// tried again by the next commit and by Close.
func (m *Image) finish() {
	if m.settle() == nil {
		_ = m.unmark()
	}
}

// ApplySnapshot makes the disk as it was when the snapshot was taken, its size included. idOrName is an ID, else a name
// (the first of several). ENOENT when there is none.
func (m *Image) ApplySnapshot(idOrName string) error {
	if err := m.enterAlone(true); err != nil {
		return err
	}
	defer m.leaveAlone()
	i, err := m.findSnapshot(idOrName)
	if err == nil {
		err = m.applySnapshot(m.snapshots[i])
	}
	if err != nil {
		return fmt.Errorf("apply a snapshot: %w", err)
	}
	return nil
}

func (m *Image) applySnapshot(s qcow2.Snapshot) error {
	l1, err := m.readL1At("the L1 table of a snapshot", s.L1Offset, int(s.L1Entries))
	if err != nil {
		return err
	}
	for i, e := range l1 {
		l1[i] = qcow2.NewL1Entry(e.Offset(), false)
	}
	if err := m.mark(); err != nil {
		return err
	}
	shared, err := m.share(l1)
	var off int64
	if err == nil {
		err = m.settle()
	}
	if err == nil {
		err = m.fixTables(l1)
	}
	if err == nil {
		off, err = m.place("the L1 table", encodeL1(l1))
	}
	if err == nil {
		err = m.suspendBitmaps(s.DiskSize)
	}
	if err == nil {
		err = m.settle()
	}
	if err == nil {
		err = m.setDurable(func(h *qcow2.Header) { h.L1Offset, h.L1Entries, h.Size = off, uint32(len(l1)), s.DiskSize })
	}
	if err != nil {
		m.displace(off, int64(len(l1))*8)
		m.undoShare(l1, shared)
		m.finish()
		return err
	}
	old, oldOffset := m.l1.entries, m.l1.offset
	m.releaseTables(old)
	m.l1.entries, m.l1.offset = l1, off
	for _, e := range l1 {
		if e.Offset() != 0 {
			m.claims.claim(e.Offset()>>m.g.ClusterBits, 1)
		}
	}
	m.forgetTables()
	m.displace(oldOffset, int64(len(old))*8)
	m.settleShares(m.unshare(old, -1))
	return m.resumeBitmaps()
}

// releaseTables takes the claims of the L2 tables of an L1 table away.
func (m *Image) releaseTables(l1 []qcow2.L1Entry) {
	for _, e := range l1 {
		if e.Offset() != 0 {
			m.claims.release(e.Offset()>>m.g.ClusterBits, 1)
		}
	}
}

// settleShares ends an operation that has happened, and gave up uses: err is what failed in that.
func (m *Image) settleShares(err error) {
	if err == nil {
		err = m.settle()
	}
	if err == nil {
		err = m.fixCopied()
	}
	m.keepMarked = m.keepMarked || err != nil
	m.finish()
}

// DeleteSnapshot removes a snapshot. idOrName is as for ApplySnapshot.
func (m *Image) DeleteSnapshot(idOrName string) error {
	if err := m.enterAlone(false); err != nil {
		return err
	}
	defer m.leaveAlone()
	i, err := m.findSnapshot(idOrName)
	if err == nil {
		err = m.deleteSnapshot(i)
	}
	if err != nil {
		return fmt.Errorf("delete a snapshot: %w", err)
	}
	return nil
}

func (m *Image) deleteSnapshot(i int) error {
	s := m.snapshots[i]
	l1, err := m.readL1At("the L1 table of a snapshot", s.L1Offset, int(s.L1Entries))
	if err != nil {
		return err
	}
	if err := m.mark(); err != nil {
		return err
	}
	if err := m.setSnapshots(slices.Delete(slices.Clone(m.snapshots), i, i+1)); err != nil {
		if m.restore() != nil {
			m.keepMarked = true
		}
		m.finish()
		return err
	}
	m.displace(s.L1Offset, int64(len(l1))*8)
	m.settleShares(m.unshare(l1, -1))
	return nil
}

// setSnapshots writes a new snapshot table and makes it the valid one. Everything that was written before is durable
// before.
func (m *Image) setSnapshots(all []qcow2.Snapshot) error {
	b, err := qcow2.EncodeSnapshots(all)
	if err != nil {
		return err
	}
	off, err := m.place("the snapshot table", b)
	if err == nil {
		err = m.settle()
	}
	oldOffset, oldBytes := m.h.SnapshotsOffset, m.snapshotBytes
	if err == nil {
		err = m.setDurable(func(h *qcow2.Header) { h.Snapshots, h.SnapshotsOffset = uint32(len(all)), off })
	}
	if err != nil {
		m.displace(off, int64(len(b)))
		return err
	}
	m.displace(oldOffset, oldBytes)
	m.snapshots, m.snapshotBytes = all, int64(len(b))
	return nil
}

// place writes a table to clusters of its own, and tells where; an empty one is nowhere.
func (m *Image) place(what string, b []byte) (int64, error) {
	if len(b) == 0 {
		return 0, nil
	}
	n := m.g.Clusters(int64(len(b)))
	c, err := m.allocateTable(n)
	if err != nil {
		return 0, err
	}
	off := c << m.g.ClusterBits
	whole := make([]byte, n<<m.g.ClusterBits)
	copy(whole, b)
	m.claims.claim(c, n)
	if err := m.write(what, whole, off); err != nil {
		m.displace(off, int64(len(b)))
		return 0, err
	}
	return off, nil
}

// displace lets go of a table of n bytes that place made. Its clusters are free after a commit, when the header on disk surely
// does not name it.
func (m *Image) displace(off, n int64) {
	if off == 0 || n == 0 {
		return
	}
	m.releaseBytes(off, n)
	m.letGo(off>>m.g.ClusterBits, m.g.Clusters(n))
}

// eachUse calls fn for every use that an L1 table makes of host clusters, its own excepted: L2 tables, and what these
// lead to, always in the same order.
func (m *Image) eachUse(l1 []qcow2.L1Entry, fn func(r run) error) error {
	buf := make([]byte, m.g.ClusterSize)
	for i, e := range l1 {
		off, err := m.l2Table(e)
		if err != nil {
			return err
		}
		if off == 0 {
			continue
		}
		if err := m.read("an L2 table", buf, off); err != nil {
			return err
		}
		if err := fn(run{off >> m.g.ClusterBits, 1}); err != nil {
			return err
		}
		for k := range m.g.L2Entries() {
			e := m.g.Entry(buf, k)
			if m.g.Kind(e) == qcow2.Invalid {
				return m.damage(off+int64(k*m.g.L2EntrySize), "L2 entry of the guest offset %#x is not sound (%#x)", m.g.Guest(i, k), e.Word)
			}
			if r := m.hostClusters(e); r.n > 0 {
				if err := fn(r); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// share counts one more use of everything that an L1 table leads to, and tells how many uses that were, also where it
// failed.
func (m *Image) share(l1 []qcow2.L1Entry) (shared int64, err error) {
	err = m.eachUse(l1, func(r run) error {
		for c := r.first; c < r.first+r.n; c++ {
			if err := m.addRef(c); err != nil {
				return err
			}
			shared++
		}
		return nil
	})
	return shared, err
}

// unshare takes the first n uses back, all of them for n < 0. What is free then is so at once: nothing durable leads there
// any more.
func (m *Image) unshare(l1 []qcow2.L1Entry, n int64) error {
	if n == 0 {
		return nil
	}
	batch := run{}
	err := m.eachUse(l1, func(r run) error {
		if n >= 0 {
			r.n = min(r.n, n)
			n -= r.n
		}
		if r.n == 0 {
			return nil
		}
		if batch.first+batch.n == r.first {
			batch.n += r.n
			return nil
		}
		m.pending += batch.n
		m.release(batch)
		batch = r
		return m.broken
	})
	m.pending += batch.n
	m.release(batch)
	if err == nil {
		err = m.broken
	}
	return err
}

// fixCopied makes the flags of the active tables say what the refcounts say. The cache of slices is empty afterwards.
func (m *Image) fixCopied() error {
	defer m.forgetTables()
	for i, e := range m.l1.entries {
		if e.Offset() == 0 {
			continue
		}
		n, err := m.refcount(e.Offset() >> m.g.ClusterBits)
		if err != nil {
			return err
		}
		if want := qcow2.NewL1Entry(e.Offset(), n == 1); want != e {
			m.l1.entries[i] = want
			m.l1.dirty.add(i)
		}
	}
	return m.fixTables(m.l1.entries)
}

// fixTables does that in the L2 tables that an L1 table leads to.
func (m *Image) fixTables(l1 []qcow2.L1Entry) error {
	buf := make([]byte, m.g.ClusterSize)
	for _, e := range l1 {
		off, err := m.l2Table(e)
		if err == nil && off != 0 {
			err = m.fixTable(buf, off)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (m *Image) fixTable(buf []byte, off int64) error {
	if err := m.read("an L2 table", buf, off); err != nil {
		return err
	}
	changed := false
	for k := range m.g.L2Entries() {
		e := m.g.Entry(buf, k)
		if e.IsCompressed() || e.Offset() == 0 || m.g.DataFile {
			continue
		}
		n, err := m.refcount(e.Offset() >> m.g.ClusterBits)
		if err != nil {
			return err
		}
		if want := e.WithCopied(n == 1); want != e {
			m.g.PutEntry(buf, k, want)
			changed = true
		}
	}
	if !changed {
		return nil
	}
	return m.write("an L2 table", buf, off)
}

// OpenSnapshot is a view of a snapshot, read-only, with a cache of its own. It must be closed before the snapshot is
// deleted and before m is closed.
func (m *Image) OpenSnapshot(idOrName string) (*Image, error) {
	i, err := m.findSnapshot(idOrName)
	if err != nil {
		return nil, fmt.Errorf("open a snapshot: %w", err)
	}
	s := m.snapshots[i]
	h := *m.h
	h.Size, h.L1Offset, h.L1Entries = s.DiskSize, s.L1Offset, s.L1Entries
	v := &Image{s: m.s, o: m.o, h: &h, g: m.g, readOnly: true, backing: m.backing, fileEnd: m.fileEnd}
	v.makeCaches()
	if err := v.readL1(); err != nil {
		return nil, fmt.Errorf("open a snapshot: %w", err)
	}
	return v, nil
}
