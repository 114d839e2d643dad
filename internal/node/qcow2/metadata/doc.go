// SPDX-License-Identifier: Apache-2.0

// Package metadata is the tables of one open qcow2 image: it finds where guest data lie, finds room for new data, and
// brings the tables to disk in an order that a crash at any point survives with leaked clusters at worst.
//
// It owns the header, the L1 and L2 tables, the refcounts, the snapshot table and the bitmap directory. Guest data it
// never touches: it says where to read and write, and is told when that has been done. The order of writes stands in
// docs/QCOW2.md; what follows are the rules of its use.
//
// # Threads and suspension
//
// An [Image] is used by one thread at a time, and cooperatively: on a loop many coroutines use it, and each call of
// the [Store] may suspend the caller and let another one in. These calls (and [Waiter.Wait]) are the only points where
// that happens. Methods that say "Does not wait." make no such call and may be used anywhere on the loop, so also in a
// completion; all others must be called on a coroutine (or, with a Store that blocks, from plain code).
//
// # A request
//
// Each request, read or write, holds a [Ticket] from before it asks for the first translation until its last transfer
// has ended. As long as it does, no cluster that the tables named to it is given to anybody else.
//
//	read    Lookup, or Map when that says false; transfer; next extent
//	write   Lookup: where it says Data and InPlace, transfer there. Else
//	        BeginWrite: transfer to a.Host, fill a.Head and a.Tail by reading the guest bytes there; then Link (or Abort)
//	zeroes  Zero, which says how much of the range it has done; where that is nothing, write zeros up to the next cluster
//	discard Discard
//	flush   Commit, also where nothing was allocated: it flushes the store
//
// Errors carry a syscall.Errno. After an error of the store the tables in memory go on standing for what the guest was
// told, and whatever was not written is written by the next Commit.
package metadata

import (
	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// Store is the file under an image. On a loop each call suspends the calling coroutine until it is done.
type Store interface {
	Read(p []byte, off int64) error  // fills p whole; bytes beyond the end of the file are zero
	Write(p []byte, off int64) error // all of p, or an error; grows the file. p must not be changed until it returns
	Zero(off, n int64) error         // reads as zeros afterwards; grows the file
	Discard(off, n int64) error      // space given back; contents unspecified
	Flush() error                    // everything written before is durable
	Size() (int64, error)            // length of the file in bytes
	Truncate(n int64) error
}

// Waiter lets coroutines wait for each other: Wait suspends the caller until ready holds. ready is cheap, changes nothing
// and makes no call of the image or the store; it is to be looked at again whenever a method of the image has returned or
// a coroutine of it was suspended, on the same thread.
type Waiter interface {
	Wait(ready func() bool)
}

// Options of an open image. The zero value opens it for reading and writing by a single user.
type Options struct {
	ReadOnly bool // no method that changes anything works; nothing is written
	// L2CacheBytes bounds the cache of L2 tables, and so how much of the disk is translated without a read: 8 bytes a
	// cluster (16 with extended entries). 0 means enough for the whole disk, at most 32 MiB. What is changed and not yet
	// committed is pinned in it; at most as much again is taken for what changes while it is being committed.
	L2CacheBytes int64
	// RefcountCacheBytes bounds the cache of refcount blocks. 0 means a quarter of the L2 cache, at least 4 blocks.
	RefcountCacheBytes int64
	// KeepOnDiscard leaves the host clusters of discarded and zeroed ranges allocated, so that the image does not
	// fragment: they read as zeros, and the next write goes where the old one was.
	KeepOnDiscard bool
	// NoDiscard does not hand freed clusters back with Store.Discard.
	NoDiscard bool
	// Waiter is needed where more than one coroutine uses the image; nil is a single user, which never has to wait.
	Waiter Waiter
	// Data is the external data file of an image that has one, needed for writing: it is flushed before what leads to it is
	// written, and ranges that are discarded, or zeroed so that their space may go, are discarded in it.
	Data Store
	// KeepDirty opens an image with the dirty bit without rebuilding its refcounts, and KeepCorrupt one with the corrupt
	// bit for writing: for tools that are about to repair it.
	KeepDirty, KeepCorrupt bool
	// Damaged is told, once, why the image takes no more changes: by whoever finds it, so that it must not wait.
	Damaged func(why error)
}

// Kind is what the tables say about a piece of guest data.
type Kind = qcow2.Kind

// The kinds of an Extent.
const (
	Unallocated   = qcow2.Unallocated   // in the backing file; zeros where there is none or it is shorter
	Zero          = qcow2.Zero          // zeros, no host cluster
	ZeroAllocated = qcow2.ZeroAllocated // zeros, a host cluster stands ready
	Data          = qcow2.Data          // in the image (or the external data file) at Host
	Compressed    = qcow2.Compressed    // one cluster, or a part of one, compressed at Host
)

// Extent is a run of guest bytes of one kind, contiguous on the host too where the kind has a place there.
type Extent struct {
	Kind   Kind
	Length int64 // bytes from the offset that was asked for
	// Host is where the first byte lies, for Data and ZeroAllocated. For Compressed it is where the compressed bytes of the
	// whole cluster begin; the cluster is the one that the offset lies in, and the extent ends with it at the latest.
	Host int64
	// InPlace says that Data may be overwritten where they are: nobody else shares them and no table is to change.
	InPlace bool
	// CompressedLen is how many bytes from Host on to give to the decompressor: the data end somewhere in the last 512.
	CompressedLen int
}

// Ticket is one request's stay in the tables: see Image.Enter.
type Ticket uint8

// Stats are counters since the image was opened, and sizes.
type Stats struct {
	L2Hits, L2Misses             uint64
	RefcountHits, RefcountMisses uint64
	L2CacheBytes, L2Dirty        int64  // what the cache may hold; what waits for a commit
	L2CacheCovers                int64  // bytes of the disk that a full cache translates
	Commits, Flushes             uint64 // of Commit; flushes of the store
	Allocated, Freed             uint64 // host clusters, of data and tables
	Pending                      int64  // host clusters that were let go and are not yet reusable
	Corrupt                      bool   // found while open: nothing is written any more
}
