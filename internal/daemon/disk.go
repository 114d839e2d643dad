// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/export/vhostblk"
	"github.com/sluice-blk/sluice/internal/graph"
	"github.com/sluice-blk/sluice/internal/node/foreign"
	"github.com/sluice-blk/sluice/internal/vhostuser"
)

// Disk is an open disk: a graph of nodes with a guard before it, and the loops that may serve it.
// Safe for concurrent use.
type Disk struct {
	config DiskConfig
	handle *block.Handle
	loops  []*aio.Loop
	loopOf []int                // for each queue of the configuration the index of its loop; nil: in turn
	faces  []*block.HandleQueue // held open so that a disk which no loop can serve is found out at once
}

// OpenDisk opens what c describes for use on loops, which must be running and outlive the disk. It makes the disk known
// to each loop, so that an engine that cannot serve it is an error here and not at the first guest's. A disk that must be on
// one loop takes the first.
func OpenDisk(ctx context.Context, c *DiskConfig, loops []*aio.Loop) (*Disk, error) {
	return openDisk(ctx, c, loops, 0)
}

// openDisk is OpenDisk where a disk that must be on one loop takes the home-th, counted around.
func openDisk(ctx context.Context, c *DiskConfig, loops []*aio.Loop, home int) (*Disk, error) {
	node, err := graph.Build(ctx, c.spec(), graph.AnyPath)
	if err != nil {
		return nil, fmt.Errorf("open disk %s: %w", c.Name(), err)
	}
	if node.Info().SingleLoop {
		home %= len(loops)
		loops = loops[home : home+1]
	}
	d := &Disk{config: *c, loops: loops, handle: block.NewHandle(node, &block.HandleOptions{
		ReadOnly: c.ReadOnly, LogicalBlockSize: c.LogicalBlock, IgnoreDiscard: c.NoDiscard, Cache: c.Cache,
	})}
	if err := d.open(ctx); err != nil {
		_ = d.Close(context.Background()) // the first error is the one that tells
		return nil, fmt.Errorf("open disk %s: %w", c.Name(), err)
	}
	return d, nil
}

// spec describes the graph below the handle. Write-through is the handle's doing, so that the guest can switch it.
func (c *DiskConfig) spec() graph.Spec {
	cache := c.Cache
	if cache == block.CacheWritethrough {
		cache = block.CacheWriteback
	}
	s := graph.Spec{
		Driver: c.Driver, Path: c.Path, Size: c.Size, Format: c.Format, ReadOnly: c.ReadOnly, Cache: cache, Engine: c.Engine,
		IgnoreDiscard: c.NoDiscard, Lock: c.Lock, Latency: c.Latency, Fault: c.Fault,
	}
	if c.Path != "" {
		s.Size, s.Offset, s.Window = 0, c.Offset, c.Size
	}
	if c.Format == graph.FormatQcow2 {
		s.NoBacking, s.ProbeBacking = c.Backing == "off", c.Backing == "probe"
		s.DataFile, s.Snapshot, s.FileFault = c.DataFile, c.Snapshot, c.FileFault
		s.L2CacheSize, s.RefcountCacheSize, s.KeepOnDiscard = c.L2CacheSize, c.RefcountCacheSize, c.KeepOnDiscard
	}
	return s
}

func (d *Disk) open(ctx context.Context) error {
	for _, l := range d.loops {
		err := l.Call(ctx, func() error {
			q, err := d.handle.Queue(l)
			if err == nil {
				d.faces = append(d.faces, q)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	const sector = 512
	if size := d.handle.Info().Size; size < sector {
		return fmt.Errorf("it has %d bytes, and a disk has at least one sector of %d (give it a size with truncate -s)", size, sector)
	}
	return nil
}

// Name is what messages call the disk.
func (d *Disk) Name() string { return d.config.Name() }

// Handle is the guard before the disk. It is borrowed.
func (d *Disk) Handle() *block.Handle { return d.handle }

// Loops are those that serve the disk. The slice is not the caller's to change.
func (d *Disk) Loops() []*aio.Loop { return d.loops }

// Faces are the disk's queues, one for each of Loops, for those who use it in this process.
func (d *Disk) Faces() []*block.HandleQueue { return d.faces }

// DeviceOptions say how a disk looks to a guest. The zero value works.
type DeviceOptions struct {
	Serial string // at most SerialMax bytes
	Queues int    // at most QueuesMax; 0: one a loop

	loopOf []int // for each queue the index of its loop; nil: in turn
}

// newDevice makes a virtio-blk device of the disk.
func (d *Disk) newDevice(o *DeviceOptions, log *slog.Logger) (*vhostblk.Device, error) {
	return vhostblk.New(d.handle, &vhostblk.Options{
		Serial: o.Serial, Queues: o.Queues, Loops: d.loops, LoopOf: o.loopOf, LogicalBlock: d.config.LogicalBlock,
		NoMerge: d.config.NoMerge, Coalesce: d.config.Coalesce,
		OnBroken: func(queue int, err error) {
			log.Error("queue stopped: it can no longer be trusted, the others go on", "queue", queue, "err", err)
		},
	})
}

// ServeVhostUser serves the disk to the front-ends that connect to l, one after the other, until ctx has ended and what
// is in flight is finished. The listener stays the caller's.
func (d *Disk) ServeVhostUser(ctx context.Context, l net.Listener, o *DeviceOptions, log *slog.Logger) error {
	device, err := d.newDevice(o, log)
	if err != nil {
		return fmt.Errorf("serve disk %s: %w", d.Name(), err)
	}
	err = vhostuser.NewServer(l, device, &vhostuser.ServerOptions{Logger: log}).Serve(ctx)
	return errors.Join(err, device.Close())
}

// describe logs what was opened and what is promised.
func (d *Disk) describe(log *slog.Logger) {
	i := d.handle.Info()
	log.Info("disk is open", "disk", d.Name(), "size", i.Size, "readonly", i.ReadOnly, "engine", i.Engine,
		"cache", d.config.Cache.String(), "write_cache", i.WriteCache, "durability", i.Durability,
		"logical_block", i.LogicalBlock, "physical_block", i.PhysicalBlock, "align", d.handle.Node().Info().Align,
		"discard", i.Discard.String(), "write_zeroes", i.WriteZeroes.String())
}

// warn tells of bytes that the guest will see otherwise than the file has them.
func (d *Disk) warn(log *slog.Logger) {
	i := d.handle.Info()
	if _, isImage := d.handle.Node().(*foreign.Node); isImage || d.config.Path == "" || d.config.Format == graph.FormatQcow2 {
		return
	}
	if d.config.Format == "" && d.config.Offset == 0 {
		if format, err := graph.Recognise(d.config.Path, graph.AnyPath); err == nil && format != graph.FormatRaw {
			log.Warn("the file begins as an image, and is served as the raw bytes that it has (name its format; format=raw if that is right)",
				"disk", d.Name(), "format", format)
		}
	}
	if st, err := os.Stat(d.config.Path); err == nil && st.Mode().IsRegular() && d.config.Size == 0 && st.Size()-d.config.Offset < i.Size {
		log.Warn("the file ends inside a sector of 512 bytes: the disk is larger, and reads zeros there", "disk", d.Name(),
			"file", st.Size()-d.config.Offset, "size", i.Size)
	}
	if b := int64(i.LogicalBlock); b > 512 && i.Size%b != 0 {
		log.Warn("the size is no whole number of logical blocks: the guest cannot use the end of the disk", "disk", d.Name(),
			"size", i.Size, "logical_block", b)
	}
}

func (d *Disk) stats(ctx context.Context) (DiskStats, error) {
	c, err := d.handle.Stats(ctx)
	return DiskStats{Name: d.Name(), Info: d.handle.Info(), Block: c}, err
}

// Close waits for what is in flight and closes the disk, and with it its image lock. Devices made of it are closed
// before. Must not be called on a loop.
func (d *Disk) Close(ctx context.Context) error {
	if err := d.handle.Drain(ctx); err != nil {
		return fmt.Errorf("close disk %s: %w", d.Name(), err)
	}
	for len(d.faces) > 0 {
		q := d.faces[0]
		if err := q.Loop().Call(ctx, q.Close); err != nil {
			return fmt.Errorf("close disk %s: %w", d.Name(), err)
		}
		d.faces = d.faces[1:]
	}
	if err := d.handle.Close(); err != nil {
		return fmt.Errorf("close disk %s: %w", d.Name(), err)
	}
	return nil
}
