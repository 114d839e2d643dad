// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

type slice struct{}

// Image is an open image. See the package comment for its thread rule.
type Image struct{}

// Open reads and checks the header and the tables that stay in memory. A writable image with the dirty bit has its
// refcounts rebuilt first; one with the corrupt bit is opened for reading only (EACCES otherwise). It writes nothing else:
// autoclear bits are cleared before the first change. The store stays the caller's, also after an error.
func Open(s Store, o *Options) (*Image, error) { return nil, syscall.ENOSYS }

// Header as it is now: to read, not to change. Does not wait.
func (m *Image) Header() *qcow2.Header { return nil }

// Geometry of the image. Does not wait.
func (m *Image) Geometry() *qcow2.Geometry { return nil }

// Size of the virtual disk in bytes. Does not wait.
func (m *Image) Size() int64 { return 0 }

// Stats since Open. Does not wait.
func (m *Image) Stats() Stats { return Stats{} }

// Enter begins a request: see the package comment. Exit ends it. They do not wait, and take no memory.
func (m *Image) Enter() Ticket { return 0 }

// Exit ends what Enter began.
func (m *Image) Exit(t Ticket) {}

// Lookup translates from tables in memory alone: the longest run of one kind from off on, at most n bytes (n > 0, inside
// the disk). It is false where that takes a read, or where the entry is not sound: Map tells. Does not wait, and takes no memory.
func (m *Image) Lookup(off, n int64) (Extent, bool) { return Extent{}, false }

// Map is Lookup that may wait. An entry that breaks the rules of the format is EIO, and marks a writable image corrupt.
func (m *Image) Map(off, n int64) (Extent, error) { return Extent{}, syscall.ENOSYS }

// BeginWrite finds room for a prefix of [off, off+n) and fills in a. It waits while another allocation holds the first
// cluster, and it may commit where the caches are full of changes.
func (m *Image) BeginWrite(a *Allocation, off, n int64) error { return syscall.ENOSYS }

// BeginCompressed finds room for n compressed bytes that hold the whole cluster at off (off aligned; n less than a cluster;
// the disk's last cluster is compressed whole, its end filled with zeros). They go to a.Host. Link then puts them in the
// place of whatever the cluster was.
func (m *Image) BeginCompressed(a *Allocation, off int64, n int) error { return syscall.ENOSYS }

// Link makes the tables say what was written. All transfers of a have ended without an error. What was there before is
// let go with the next Commit. Does not wait, cannot fail.
func (m *Image) Link(a *Allocation) {}

// Abort gives back what a holds; the guest sees the old data. All transfers of a have ended. Does not wait.
func (m *Image) Abort(a *Allocation) {}

// Zero makes a prefix of [off, off+n) read as zeros, and says how many bytes that is. 0 means that the tables cannot say it:
// the caller writes zeros up to the end of the (sub)cluster (ZeroUnit) that off lies in, or to off+n, as an ordinary
// write. unmap lets the host clusters go; without, they stay allocated.
func (m *Image) Zero(off, n int64, unmap bool) (int64, error) { return 0, syscall.ENOSYS }

// ZeroUnit is the size of the pieces that Zero can change: a cluster, or a subcluster. Does not wait.
func (m *Image) ZeroUnit() int64 { return 0 }

// Discard lets go of the clusters that lie whole in [off, off+n). They read as zeros afterwards, or keep their data where
// the format cannot say so (version 2 with a backing file). The space is given back after the next Commit.
func (m *Image) Discard(off, n int64) error { return syscall.ENOSYS }

// Commit makes durable all that was linked, zeroed and discarded, and every write to the store that ended, before it was
// called. Calls that come while one runs share the next.
func (m *Image) Commit() error { return syscall.ENOSYS }

// Close commits, brings refcounts up to date, clears the dirty bit if this Open set it, and ends the use of the image. No request may
// be on its way. After an error the image is closed too.
func (m *Image) Close() error { return syscall.ENOSYS }

// Snapshots are those of the image, oldest first; the caller may keep them. Does not wait.
func (m *Image) Snapshots() []qcow2.Snapshot { return nil }

// SnapshotInfo describes a snapshot to make. An empty ID takes the next free number; Seconds and so on are as in qcow2.Snapshot.
type SnapshotInfo struct {
	ID, Name             string
	Seconds, Nanoseconds uint32
	VMClock              uint64
}

// CreateSnapshot keeps the disk as it is now. No request may be on its way, here and for the other methods on snapshots,
// Resize and the methods that change bitmaps.
func (m *Image) CreateSnapshot(s SnapshotInfo) (qcow2.Snapshot, error) {
	return qcow2.Snapshot{}, syscall.ENOSYS
}

// ApplySnapshot makes the disk as it was when the snapshot was taken, its size included. idOrName is an ID, else a name (the first of several).
// ENOENT when there is none.
func (m *Image) ApplySnapshot(idOrName string) error { return syscall.ENOSYS }

// DeleteSnapshot removes a snapshot.
func (m *Image) DeleteSnapshot(idOrName string) error { return syscall.ENOSYS }

// OpenSnapshot is a view of a snapshot, read-only, with a cache of its own. It must be closed before the snapshot is deleted
// and before m is closed.
func (m *Image) OpenSnapshot(idOrName string) (*Image, error) { return nil, syscall.ENOSYS }

// Resize changes the size of the disk. A smaller one (EINVAL without shrink) loses what lies behind; a larger one reads as zeros there, but for
// the rest of the cluster that the old end lies in: there the caller writes zeros, if he cannot know that they are.
func (m *Image) Resize(size int64, shrink bool) error { return syscall.ENOSYS }

// Bitmaps are the entries of the bitmap directory. Does not wait.
func (m *Image) Bitmaps() []qcow2.Bitmap { return nil }

// AddBitmap makes an empty one. granularity is a power of two from 512 to 2 GiB, in bytes; 0 means 65536.
func (m *Image) AddBitmap(name string, granularity int64, disabled bool) error {
	return syscall.ENOSYS
}

// RemoveBitmap removes one, an inconsistent one too.
func (m *Image) RemoveBitmap(name string) error { return syscall.ENOSYS }

// ClearBitmap makes all its bits zero.
func (m *Image) ClearBitmap(name string) error { return syscall.ENOSYS }

// EnableBitmap says whether writes are tracked from now on.
func (m *Image) EnableBitmap(name string, on bool) error { return syscall.ENOSYS }

// MergeBitmap sets in dst each bit that is set in src, which may have another granularity and may be of another image.
func (m *Image) MergeBitmap(dst string, from *Image, src string) error { return syscall.ENOSYS }
