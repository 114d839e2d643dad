// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"errors"
	"io"
	"slices"
	"syscall"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/graph"
)

// Cache is a cache mode by the name that qemu-img has for it: none or off, writeback, writethrough, directsync, unsafe. ""
// is writeback.
type Cache string

// Valid tells whether there is such a mode.
func (c Cache) Valid() bool {
	switch c {
	case "", "none", "off", "writeback", "writethrough", "directsync", "unsafe":
		return true
	}
	return false
}

// modes are what the file is opened with, and what its user sees.
func (c Cache) modes() (file, user block.CacheMode) {
	switch c {
	case "none", "off":
		return block.CacheNone, block.CacheNone
	case "writethrough":
		return block.CacheWriteback, block.CacheWritethrough
	case "directsync":
		return block.CacheNone, block.CacheWritethrough
	case "unsafe":
		return block.CacheUnsafe, block.CacheUnsafe
	}
	return block.CacheWriteback, block.CacheWriteback
}

// DiskOptions say how an image is shown as a disk.
type DiskOptions struct {
	Cache     Cache
	Snapshot  string      // an internal snapshot, by ID or name
	NoBacking bool        // what the image does not store reads as zeros
	Backing   *graph.Spec // in place of the backing file that the image names
	Locked    bool        // this process has locked the file already
	Engine    aio.EngineKind
	Warnings  io.Writer // told of an image that is taken for raw and may be written; nil: nobody

	dataFile string // in place of the one that the image names
}

// OpenDisk opens an image, with its backing files, on a loop. The error says "Could not open".
func OpenDisk(ctx context.Context, l *aio.Loop, src Source, o DiskOptions) (*Disk, error) {
	i, err := OpenImage(src)
	if err != nil {
		return nil, err
	}
	path, format := i.Name, i.Format
	src.Store.NoLock = i.NoLock
	o.dataFile = i.DataFile
	if i.ProbedRaw() && !src.Store.ReadOnly && o.Warnings != nil {
		io.WriteString(o.Warnings, RawWarning(src.Name))
	}
	info, err := i.Info()
	if err := errors.Join(err, i.Close()); err != nil {
		return nil, Wordedf("Could not open '%s': %s", src.Name, OpenText(src.Name, err))
	}
	if o.Snapshot != "" {
		if err := snapshotFound(info, o.Snapshot); err != nil {
			return nil, err
		}
	}
	d, err := openGraph(ctx, l, src, o, path, format)
	if err != nil {
		return nil, backingError(src, info, err)
	}
	d.format, d.image = format, info
	return d, nil
}

// snapshotFound looks for a snapshot by ID or name.
func snapshotFound(info *Info, name string) error {
	if info.Format != FormatQcow2 {
		return Wordedf("Failed to load snapshot: Block format '%s' used by device '' does not support temporarily loading internal snapshots", info.Format)
	}
	if !slices.ContainsFunc(info.Snapshots, func(s SnapshotInfo) bool { return s.ID == name || s.Name == name }) {
		return Wordedf("Failed to load snapshot: Can't find snapshot")
	}
	return nil
}

// openGraph builds the graph of an image whose format is known.
func openGraph(ctx context.Context, l *aio.Loop, src Source, o DiskOptions, path, format string) (*Disk, error) {
	file, user := o.Cache.modes()
	spec := graph.Spec{
		Path: path, Format: format, ReadOnly: src.Store.ReadOnly, Cache: file, Engine: o.Engine,
	}
	switch {
	case src.Store.Shared:
		spec.Lock = graph.LockShared
	case o.Locked || src.Store.NoLock:
		spec.Lock = graph.LockOff
	}
	if format == FormatQcow2 {
		spec.FileFault = faultsOf(path)
		spec.ProbeBacking = true
		spec.DataFile = o.dataFile
		spec.Snapshot, spec.NoBacking, spec.Backing = o.Snapshot, o.NoBacking, o.Backing
	}
	if format == FormatRaw {
		spec.Fault = faultsOf(path)
	}
	node, err := graph.Build(ctx, spec, graph.AnyPath)
	if err != nil {
		return nil, err
	}
	return NewDisk(ctx, l, src.Name, node, &block.HandleOptions{ReadOnly: src.Store.ReadOnly, Cache: user})
}

// graphText words what went wrong when a graph was built. Its own errors say more than an errno, but for the plainest.
func graphText(name string, err error) string {
	var w *Worded
	if errors.As(err, &w) {
		return w.Error()
	}
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.EACCES) {
		return "Could not open '" + name + "': " + Strerror(err)
	}
	return OpenText(name, err)
}
