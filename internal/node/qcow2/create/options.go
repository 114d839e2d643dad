// SPDX-License-Identifier: Apache-2.0

package create

import (
	"fmt"
	"math/bits"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// Preallocation tells how much of the disk is there before the guest writes.
type Preallocation uint8

const (
	Off      Preallocation = iota // nothing but an empty L1 table
	Metadata                      // L2 tables that name a host cluster for each guest cluster; the file is sparse
	Falloc                        // the same, and the file system has set the blocks aside
	Full                          // the same, and zeros were written
)

// Options of a new image. The zero value, with a Size, is what other programs make without being told more: version 3,
// clusters of 64 KiB, 16 bits of refcount.
type Options struct {
	Size int64 // bytes of the virtual disk; rounded up to a sector

	Version         uint32 // 2 or 3; 0 is 3
	ClusterSize     int64  // bytes; 0 is 64 KiB
	RefcountBits    int    // 1 to 64; 0 is 16
	LazyRefcounts   bool
	ExtendedL2      bool
	CompressionType uint8 // qcow2.CompressionZlib or CompressionZstd

	BackingFile, BackingFormat string // as the image shall name them

	DataFile    string // name of the external data file as the image shall have it
	DataFileRaw bool   // the data file is a raw image on its own; turns Metadata on
	Data        Store  // the data file itself; it is made as long as the disk. nil leaves it alone

	Preallocation Preallocation
}

// Error is a combination of options that makes no image. It carries EINVAL.
type Error struct{ What string }

// Error is the text.
func (e *Error) Error() string { return e.What }

// Unwrap gives the errno.
func (e *Error) Unwrap() error { return syscall.EINVAL }

func refusef(format string, args ...any) error { return &Error{fmt.Sprintf(format, args...)} }

// Header checks the options and gives the header that they make, without the places of the tables.
func (o *Options) Header() (*qcow2.Header, error) {
	version, cluster, width := o.Version, o.ClusterSize, o.RefcountBits
	if version == 0 {
		version = 3
	}
	if cluster == 0 {
		cluster = 64 << 10
	}
	if width == 0 {
		width = 16
	}
	switch {
	case version != 2 && version != 3:
		return nil, refusef("version %d of the format is not supported (2 and 3 are)", version)
	case cluster < 1<<qcow2.MinClusterBits || cluster > 1<<qcow2.MaxClusterBits || cluster&(cluster-1) != 0:
		return nil, refusef("cluster size must be a power of two between 512 and 2M (it is %d)", cluster)
	case width < 1 || width > 64 || width&(width-1) != 0:
		return nil, refusef("refcount width must be a power of two and at most 64 bits (it is %d)", width)
	case o.Size < 0 || o.Size > 1<<62:
		return nil, fmt.Errorf("disk of %d bytes is too large: %w", o.Size, syscall.EFBIG)
	}
	h := &qcow2.Header{
		Version: version, ClusterBits: uint32(bits.TrailingZeros64(uint64(cluster))), Size: (o.Size + 511) &^ 511,
		RefcountOrder: uint32(bits.TrailingZeros(uint(width))), CompressionType: o.CompressionType, BackingFile: o.BackingFile,
	}
	if err := o.check(h); err != nil {
		return nil, err
	}
	o.setFeatures(h)
	return h, nil
}

// check refuses what does not go together.
func (o *Options) check(h *qcow2.Header) error {
	if h.Version == 2 {
		switch {
		case o.LazyRefcounts:
			return refusef("lazy refcounts need version 3 of the format (compat=1.1)")
		case h.RefcountOrder != 4:
			return refusef("refcount widths other than 16 bits need version 3 of the format (compat=1.1)")
		case o.ExtendedL2:
			return refusef("extended L2 entries need version 3 of the format (compat=1.1)")
		case o.DataFile != "":
			return refusef("external data files need version 3 of the format (compat=1.1)")
		case o.CompressionType != qcow2.CompressionZlib:
			return refusef("compression other than zlib needs version 3 of the format (compat=1.1)")
		}
	}
	prealloc := o.Preallocation != Off
	switch {
	case o.ExtendedL2 && h.ClusterBits < qcow2.MinClusterBitsExtended:
		return refusef("extended L2 entries need clusters of at least 16 KiB")
	case o.CompressionType > qcow2.CompressionZstd:
		return refusef("compression type %d is not known", o.CompressionType)
	case len(o.BackingFile) > qcow2.MaxBackingName:
		return refusef("name of the backing file is too long (%d bytes, at most %d are allowed)", len(o.BackingFile), qcow2.MaxBackingName)
	case o.BackingFormat != "" && o.BackingFile == "":
		return refusef("backing format is given without a backing file")
	case o.DataFileRaw && o.DataFile == "":
		return refusef("a raw data file needs a data file")
	case o.DataFileRaw && o.BackingFile != "":
		return refusef("backing file and raw data file cannot be used together")
	case prealloc && o.BackingFile != "" && !o.ExtendedL2:
		return refusef("backing file and preallocation can be used together only with extended L2 entries")
	}
	return nil
}

func (o *Options) setFeatures(h *qcow2.Header) {
	if o.LazyRefcounts {
		h.Compatible |= qcow2.LazyRefcounts
	}
	if o.ExtendedL2 {
		h.Incompatible |= qcow2.ExtendedL2
	}
	if o.CompressionType != qcow2.CompressionZlib {
		h.Incompatible |= qcow2.CompressionBit
	}
	h.SetBackingFormat(o.BackingFormat)
	if o.DataFile != "" {
		h.Incompatible |= qcow2.ExternalData
		h.SetDataFile(o.DataFile)
	}
	if o.DataFileRaw {
		h.Autoclear |= qcow2.RawExternal
	}
	if h.Version == 2 {
		return
	}
	h.Additional = []byte{o.CompressionType, 7: 0} // padded
	// In the smallest clusters the table of names would leave no room for the name of a backing file.
	if h.ClusterBits >= 13 {
		h.SetFeatureNames(qcow2.KnownFeatures())
	}
}

// prealloc is what is really done: a raw data file must be mapped whole, or what the image says and what the file says
// would not be the same.
func (o *Options) prealloc() Preallocation {
	if o.DataFileRaw && o.Preallocation == Off {
		return Metadata
	}
	return o.Preallocation
}
