// SPDX-License-Identifier: Apache-2.0

// Package graph builds a graph of nodes from a description that somebody has checked.
//
// The format of an image is named, never guessed: a guest writes what it likes to its disk, and a raw disk that begins
// with the magic of another format must stay a raw disk. Probing is a format of its own, for those who ask for it by
// name; and since nothing can be recognised by what it lacks, it only ever refuses.
//
// A path is opened only through the gate that the caller supplies. Control plane; safe for concurrent use. It owns
// nothing that it built: the node that Build returns owns the nodes below it.
package graph

import (
	"context"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/fault"
	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/node/foreign"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/node/null"
	"github.com/sluice-blk/sluice/internal/node/raw"
)

// maxDepth bounds how many nodes stand above one another: as many as a request has room for layers that want to see it
// come back, with the handle on top.
const maxDepth = aio.MaxIntercepts - 1

// Names of drivers, formats and ways of locking.
const (
	DriverFile = "file"
	DriverNull = "null"
	DriverMem  = "mem"

	FormatRaw   = "raw"
	FormatQcow2 = "qcow2"
	FormatProbe = "probe"

	LockOn     = "on"     // as the only writer, or as a reader that keeps writers away
	LockShared = "shared" // look on, read-only, whoever writes
	LockOff    = "off"
)

// Spec describes a graph. Empty strings and zeroes are the defaults.
type Spec struct {
	Driver   string // file (default), null or mem
	Path     string // file
	Size     int64  // null and mem: bytes
	Format   string // raw (default), qcow2 or probe; vmdk, vhdx, vpc and vdi need ReadOnly
	ReadOnly bool

	// Growable opens a raw file that grows as it is written, see file.Options: for whoever puts a format on it.
	Growable bool

	// Of qcow2 images. A backing chain is opened read-only, each file with the format that the image above it names.
	NoBacking         bool   // what the image does not store reads as zeros, although it names a backing file
	Backing           *Spec  // in place of the backing file that the image names; with NoBacking neither is opened
	ProbeBacking      bool   // a backing file whose format is not named is probed; without it, it is refused
	DataFile          string // in place of the external data file that the image names
	Snapshot          string // show this internal snapshot, by ID or name; it needs ReadOnly
	L2CacheSize       int64  // bytes of tables that are kept; 0 chooses by the size of the disk
	RefcountCacheSize int64  // bytes of refcounts that are kept; 0 chooses
	KeepOnDiscard     bool   // discarded clusters stay allocated, so that the image does not become scattered
	FileFault         string // faults to inject below the format

	Offset, Window int64 // the part of it that is the disk; a Window of 0 is up to the end

	Cache         block.CacheMode // file
	Engine        aio.EngineKind  // file
	IgnoreDiscard bool            // file
	Lock          string          // file: on (default), shared or off
	Latency       time.Duration   // null
	ReadZeroes    bool            // null
	Fault         string          // faults to inject, in the language of the fault node
}

// Gate decides whether a path may be opened, and as what. It gives the path to open, which may be another one.
type Gate func(path string, readOnly bool) (string, error)

// AnyPath is the gate for paths that come from the user.
func AnyPath(path string, _ bool) (string, error) { return path, nil }

// Build opens what s describes. gate is asked for each path; without one no path is opened.
func Build(ctx context.Context, s Spec, gate Gate) (block.Node, error) {
	b := &builder{gate: gate}
	n, err := b.build(ctx, s)
	if err != nil {
		return nil, err
	}
	return n, nil
}

type builder struct {
	gate  Gate
	depth int
	chain []os.FileInfo // of the images that the one being opened stands behind
}

// down counts a node; it refuses one too many.
func (b *builder) down() error {
	b.depth++
	if b.depth > maxDepth {
		return fmt.Errorf("build graph: more than %d nodes above one another: %w", maxDepth, block.ErrTooDeep)
	}
	return nil
}

func (b *builder) build(ctx context.Context, s Spec) (block.Node, error) {
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("build graph: %w", err)
	}
	bottom := b.bottom
	if s.Format == FormatQcow2 {
		bottom = func(s Spec) (block.Node, error) { return b.qcow2(ctx, s) }
	}
	n, err := bottom(s)
	if err != nil {
		return nil, err
	}
	if s.Format, err = probe(s, n); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	for _, layer := range []func(Spec, block.Node) (block.Node, error){b.foreign, b.fault, b.window} {
		above, err := layer(s, n)
		if err != nil {
			return nil, errors.Join(err, n.Close())
		}
		n = above
	}
	return n, nil
}

// check refuses what is said twice, to no effect, or not at all.
func (s *Spec) check() error {
	if s.Driver == "" {
		s.Driver = DriverFile
	}
	if s.Format == "" {
		s.Format = FormatRaw
	}
	if s.Lock == "" {
		s.Lock = LockOn
	}
	isFile := s.Driver == DriverFile
	if s.Format != FormatQcow2 && !reflect.DeepEqual(s.ofFormat(), Spec{}) {
		return fmt.Errorf("backing, data file, snapshot, cache sizes and faults below the format are for format=qcow2: %w", syscall.EINVAL)
	}
	switch {
	case s.Growable && (s.Offset != 0 || s.Window != 0):
		return fmt.Errorf("a file that grows has no window: %w", syscall.EINVAL)
	case !isFile && s.Driver != DriverNull && s.Driver != DriverMem:
		return fmt.Errorf("unknown driver %q (want file, null or mem): %w", s.Driver, syscall.EINVAL)
	case s.Format != FormatRaw && s.Format != FormatQcow2 && s.Format != FormatProbe && !foreign.Known(s.Format):
		return fmt.Errorf("unknown format %q (want raw, qcow2, probe, or to read %s): %w", s.Format, strings.Join(foreign.Formats(), ", "), syscall.EINVAL)
	case foreign.Known(s.Format) && !s.ReadOnly:
		return fmt.Errorf("format %s is only read (set readonly): %w", s.Format, syscall.EROFS)
	case foreign.Known(s.Format) && !isFile:
		return fmt.Errorf("format %s stands on a file: %w", s.Format, syscall.EINVAL)
	case foreign.Known(s.Format) && s.Growable:
		return fmt.Errorf("a disk in the format %s does not grow: %w", s.Format, syscall.EINVAL)
	case s.Format == FormatQcow2 && !isFile:
		return fmt.Errorf("format qcow2 stands on a file, not on driver %s: %w", s.Driver, syscall.EINVAL)
	case s.Format == FormatQcow2 && s.Growable:
		return fmt.Errorf("the disk of a qcow2 image does not grow: %w", syscall.EINVAL)
	case s.Snapshot != "" && !s.ReadOnly:
		return fmt.Errorf("snapshot %q is only read (set readonly): %w", s.Snapshot, syscall.EINVAL)
	case s.Lock != LockOn && s.Lock != LockShared && s.Lock != LockOff:
		return fmt.Errorf("unknown lock %q (want on, shared or off): %w", s.Lock, syscall.EINVAL)
	case isFile && s.Path == "":
		return fmt.Errorf("driver file needs a path: %w", syscall.EINVAL)
	case isFile && s.Size != 0:
		return fmt.Errorf("the size of a file is its own (use offset and window to show a part of it): %w", syscall.EINVAL)
	case !isFile && s.Path != "":
		return fmt.Errorf("driver %s takes no path: %w", s.Driver, syscall.EINVAL)
	case !isFile && s.Size <= 0:
		return fmt.Errorf("driver %s needs a size: %w", s.Driver, syscall.EINVAL)
	case !isFile && s.Format == FormatProbe:
		return fmt.Errorf("driver %s has nothing to probe: %w", s.Driver, syscall.EINVAL)
	}
	return nil
}

// ofFormat is s with what only image formats know.
func (s *Spec) ofFormat() Spec {
	return Spec{
		NoBacking: s.NoBacking, Backing: s.Backing, ProbeBacking: s.ProbeBacking, DataFile: s.DataFile, Snapshot: s.Snapshot,
		L2CacheSize: s.L2CacheSize, RefcountCacheSize: s.RefcountCacheSize, KeepOnDiscard: s.KeepOnDiscard, FileFault: s.FileFault,
	}
}

// bottom opens the node that everything stands on.
func (b *builder) bottom(s Spec) (block.Node, error) {
	if err := b.down(); err != nil {
		return nil, err
	}
	switch s.Driver {
	case DriverNull:
		return null.New(null.Options{Size: s.Size, ReadOnly: s.ReadOnly, Latency: s.Latency, ReadZeroes: s.ReadZeroes}), nil
	case DriverMem:
		return mem.New(mem.Options{Size: s.Size, ReadOnly: s.ReadOnly, Growable: s.Growable})
	}
	return b.file(s)
}

func (b *builder) file(s Spec) (block.Node, error) {
	if b.gate == nil {
		return nil, fmt.Errorf("open %q: no path may be opened here: %w", s.Path, syscall.EACCES)
	}
	path, err := b.gate(s.Path, s.ReadOnly)
	if err != nil {
		return nil, fmt.Errorf("open %q: %w", s.Path, err)
	}
	o := file.Options{
		Path: path, ReadOnly: s.ReadOnly, Cache: s.Cache, Engine: s.Engine, IgnoreDiscard: s.IgnoreDiscard,
		Lock: s.Lock == LockOn, LockShared: s.Lock == LockShared, Growable: s.Growable,
	}
	n, err := file.Open(o)
	if err != nil {
		return nil, err
	}
	align := int64(n.Info().Align)
	if o.Cache != block.CacheDefault || !foreign.Known(s.Format) && s.Offset%align == 0 && s.Window%align == 0 {
		return n, nil
	}
	// What is read does not lie on the blocks that direct I/O needs, and nobody asked for direct I/O.
	if err := n.Close(); err != nil {
		return nil, err
	}
	o.Cache = block.CacheWriteback
	return file.Open(o)
}

// foreign puts the format of another house on a file.
func (b *builder) foreign(s Spec, n block.Node) (block.Node, error) {
	if !foreign.Known(s.Format) {
		return n, nil
	}
	if err := b.down(); err != nil {
		return nil, err
	}
	f, ok := n.(foreign.File)
	if !ok {
		return nil, fmt.Errorf("format %s stands on a file: %w", s.Format, syscall.EINVAL)
	}
	return foreign.Open(f, s.Format)
}

func (b *builder) fault(s Spec, n block.Node) (block.Node, error) {
	if s.Fault == "" {
		return n, nil
	}
	if err := b.down(); err != nil {
		return nil, err
	}
	return fault.New(n, s.Fault)
}

func (b *builder) window(s Spec, n block.Node) (block.Node, error) {
	if s.Offset == 0 && s.Window == 0 {
		return n, nil
	}
	if err := b.down(); err != nil {
		return nil, err
	}
	return raw.New(n, &raw.Options{Offset: s.Offset, Size: s.Window})
}
