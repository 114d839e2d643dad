// SPDX-License-Identifier: Apache-2.0

package sluice

import (
	"fmt"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/daemon"
)

// Cache says what of the host's memory stands between the disk's user and the medium, and what a completed write
// promises.
type Cache string

const (
	// CacheDefault is CacheNone where the file allows it, else CacheWriteback.
	CacheDefault Cache = ""
	// CacheNone goes past the host's page cache (O_DIRECT). Flush makes writes durable.
	CacheNone Cache = "none"
	// CacheWriteback uses the host's page cache. Flush makes writes durable.
	CacheWriteback Cache = "writeback"
	// CacheWritethrough uses the host's page cache for reads; a write completes when it is durable.
	CacheWritethrough Cache = "writethrough"
	// CacheUnsafe uses the host's page cache and ignores Flush: a crash of the host may lose anything.
	CacheUnsafe Cache = "unsafe"
)

// Lock says how an image is protected against other processes.
type Lock string

const (
	// LockOn locks the image as QEMU does: as its only writer, or as a reader that keeps writers away.
	LockOn Lock = ""
	// LockShared looks on without a lock, whoever writes. It needs ReadOnly.
	LockShared Lock = "shared"
	// LockOff takes no lock.
	LockOff Lock = "off"
)

// Format is how the bytes of a disk lie in its file.
type Format string

const (
	// FormatRaw has the bytes of the disk as those of the file.
	FormatRaw Format = ""
	// FormatQcow2 is QEMU's image format, versions 2 and 3.
	FormatQcow2 Format = "qcow2"

	// FormatVMDK, FormatVHDX, FormatVPC and FormatVDI are images of other houses, in one file each. They need ReadOnly.
	FormatVMDK Format = "vmdk"
	FormatVHDX Format = "vhdx"
	FormatVPC  Format = "vpc"
	FormatVDI  Format = "vdi"
)

// Options say how a disk is opened. The zero value, and a nil pointer, open it for reading and writing.
type Options struct {
	ReadOnly bool
	Cache    Cache
	Lock     Lock
	// Engine is how requests reach the kernel; the zero value asks the file.
	Engine aio.EngineKind

	// Offset and Size make a window onto the file the disk, in bytes. A Size of 0 is up to the file's end.
	Offset, Size int64

	// KeepSpace does not let Discard and WriteZeroes give space back to the file system.
	KeepSpace bool
	// Format is what the file is. The zero value is FormatRaw.
	Format Format
	// NoBacking shows zeros for what a qcow2 image does not hold itself. Without it what stands behind the image is opened,
	// read-only, in the format that the image names.
	NoBacking bool
	// Snapshot shows an internal snapshot of a qcow2 image, by its ID or name. It needs ReadOnly.
	Snapshot string
	// L2CacheSize is how many bytes of a qcow2 image's tables are kept in memory; one mebibyte covers 8 GiB of a disk with
	// clusters of 64 KiB. 0 keeps enough for the whole disk, at most 32 MiB.
	L2CacheSize int64

	// RefuseFormats fails when the file looks like an image of another format than raw.
	RefuseFormats bool

	// Loops run the disk's I/O. They must run already, and until the disk is closed. None gives the disk a loop of its
	// own, which is one thread.
	Loops []*aio.Loop
}

func (o *Options) config() (daemon.DiskConfig, error) {
	cache, err := block.ParseCacheMode(string(o.Cache))
	if err != nil {
		return daemon.DiskConfig{}, err
	}
	c := daemon.DiskConfig{
		Format: string(o.Format), ReadOnly: o.ReadOnly, Cache: cache, Lock: string(o.Lock), Engine: o.Engine, Offset: o.Offset, Size: o.Size, NoDiscard: o.KeepSpace,
	}
	if o.RefuseFormats {
		if o.Format != FormatRaw && o.Format != "raw" {
			return c, fmt.Errorf("format %s is named, and other formats than raw are to be refused", o.Format)
		}
		c.Format = "probe"
	}
	c.Snapshot, c.L2CacheSize = o.Snapshot, o.L2CacheSize
	if o.NoBacking {
		c.Backing = "off"
	}
	return c, nil
}

// validate is the check of a configuration of one disk.
func validate(c daemon.DiskConfig) error {
	one := daemon.Config{Disks: []daemon.DiskConfig{c}}
	if err := one.Validate(); err != nil {
		return fmt.Errorf("open disk: %w", err)
	}
	return nil
}
