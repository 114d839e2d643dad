// SPDX-License-Identifier: Apache-2.0

// Package qcow2 is the on-disk form of the qcow2 image format, versions 2 and 3: the header with its extensions, the
// geometry, the entries of the L1, L2 and refcount tables, the snapshot table and the bitmap directory.
//
// It is a pure codec: bytes in, checked values out, and back. It does no I/O of its own, keeps no state and never
// writes; where a structure's length is known only while it is read, the function takes a [ReadFunc]. Whatever comes
// from an image is bounded before it is used, so that no byte of a file makes it panic, loop or allocate more than the
// limits below say. Values are safe for concurrent use as long as nobody changes them.
//
// The words are those of the format's specification (docs/interop/qcow2 in QEMU's documentation); "section" in a comment
// means a heading there. All numbers on disk are big-endian. Offsets and lengths are int64 bytes.
package qcow2

// ReadFunc fills p from the image at off, whole or with an error; bytes beyond the end of the file read as zeros.
type ReadFunc func(p []byte, off int64) error

// Limits, all of them checked before anything is allocated by what an image says. Those of the tables are the limits
// that the format's other programs keep, so that what one opens the other opens.
const (
	MinClusterBits = 9  // 512 bytes
	MaxClusterBits = 21 // 2 MiB
	// MinClusterBitsExtended is the least for extended L2 entries: a subcluster has at least 512 bytes.
	MinClusterBitsExtended = 14

	MaxL1Bytes            = 32 << 20 // of one L1 table
	MaxRefcountTableBytes = 8 << 20
	MaxRefcountOrder      = 6 // 64 bits

	MaxBackingName = 1023
	MaxDataFile    = 1023 // bytes of the external data file's name

	MaxSnapshots          = 65536
	MaxSnapshotTableBytes = 64 << 20 // of the whole table
	MaxSnapshotExtra      = 1024     // bytes of extra data in one entry

	MaxBitmaps              = 65535
	MaxBitmapDirectoryBytes = 64 << 20 // 1 KiB for each bitmap there may be
	MaxBitmapName           = 1023
	MaxBitmapExtra          = 1 << 16 // bytes of extra data in one directory entry
	MaxBitmapTableEntries   = 1 << 23 // 64 MiB of table for one bitmap
	MinGranularityBits      = 9
	MaxGranularityBits      = 31

	// MaxHostOffset is the first offset that no L1 or L2 entry can name: 64 PiB.
	MaxHostOffset = int64(1) << 56
)
