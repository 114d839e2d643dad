// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
)

// Config says what a daemon serves and on which loops. It is data: nothing is opened before [Daemon.Start].
type Config struct {
	// Loops are the event loops, one thread each. None stands for one with default options.
	Loops []LoopConfig
	// Disks are opened and exported in this order.
	Disks []DiskConfig
	// Control is the path of a UNIX socket for asking the daemon while it runs; empty is none.
	Control string
	// Trace is a file for the requests of the last moments, written when the daemon stops; empty is none.
	Trace string
	// Logger hears what an operator should know. Nil drops it.
	Logger *slog.Logger
}

// LoopConfig describes one event loop.
type LoopConfig struct {
	Poller    aio.PollerKind // the zero value takes the best one that this machine has
	Unbatched bool           // hand each request to the kernel, and tell each completion, by itself: for measuring
	Pin       bool           // run on CPU alone
	CPU       int            // the CPU's number; read when Pin is set
	PollMax   time.Duration  // longest time that the loop polls before it sleeps; 0 is none
	// FixedBuffers pins guest memory where direct requests use it; see aio.LoopOptions.
	FixedBuffers bool
}

// Limits of a configuration. They bound what one command line can ask for, not what the machine can do.
const (
	LoopsMax  = 256 // one thread each
	DisksMax  = 1024
	QueuesMax = 256 // what virtio-blk's front-ends offer at most
	SerialMax = 20  // VIRTIO_BLK_ID_BYTES

	CoalesceMax = 10 * time.Millisecond // a guest that waits longer takes its disk for a slow one
)

// DiskConfig describes one disk and its exports.
type DiskConfig struct {
	Driver string // "file" (or empty), "null" or "mem"
	Path   string // of the file or block device; empty for null and mem
	Format string // "raw" (or empty), "qcow2" or "probe"

	// The next are for Format "qcow2".

	// Backing is "on" (or empty) to open what stands behind the image where the image names its format, "probe" to guess the
	// format where it does not, and "off" to open nothing: what the image does not have reads as zeros then.
	Backing  string
	DataFile string // in place of the external data file that the image names
	Snapshot string // internal snapshot to show, by ID or name; it needs ReadOnly
	// L2CacheSize and RefcountCacheSize are how many bytes of the image's tables are kept in memory. 0 chooses.
	L2CacheSize, RefcountCacheSize int64
	// KeepOnDiscard leaves discarded clusters allocated.
	KeepOnDiscard bool
	// FileFault is a program for a fault node below the format. For tests. Empty is none.
	FileFault string

	// Size is, for null and mem, the size of the disk; for a file a window onto it, 0 being up to its end. Bytes.
	Size int64
	// Offset is where the window onto a file begins. Bytes.
	Offset int64

	ReadOnly bool
	Engine   aio.EngineKind
	Cache    block.CacheMode
	// Lock is "on" (or empty), "off", or "shared": look on without a lock, which needs ReadOnly.
	Lock string
	// NoDiscard keeps the guest from giving space back.
	NoDiscard bool
	// Latency delays each request of a null disk.
	Latency time.Duration
	// Fault is a program for the fault node, put on top of the disk. For tests. Empty is none.
	Fault string

	Serial       string // what the guest reads as the disk's serial number, at most SerialMax bytes
	Queues       int    // offered to the guest; 0 is one a loop
	LogicalBlock int    // the guest's sector size in bytes: 512 (or 0), 1024, 2048 or 4096

	// Coalesce is for how long at most a notification of the guest waits for more completions; 0 is not at all.
	Coalesce time.Duration

	// Loop is the index of the one loop that serves this disk. Nil spreads its queues over all loops.
	Loop *int
	// Groups give the queues, in their order, to certain loops, and add up to Queues. Nil does as Loop says.
	Groups []QueueGroup
	// NoMerge sends requests that lie side by side to the disk one by one.
	NoMerge bool

	Exports []ExportConfig
}

// Name is what messages call the disk.
func (c *DiskConfig) Name() string {
	if c.Path != "" {
		return c.Path
	}
	return c.Driver
}

// ExportConfig describes one way to reach a disk: a vhost-user-blk socket, by its path or ready-made.
type ExportConfig struct {
	// Socket is the path of the UNIX socket to make.
	Socket string
	// Listener takes the place of Socket: a listening UNIX socket. The daemon takes ownership when Start is called.
	Listener net.Listener
	// Name is what messages call the export; empty is the socket's path.
	Name string
}

func (c *ExportConfig) name() string {
	switch {
	case c.Name != "":
		return c.Name
	case c.Listener != nil:
		return c.Listener.Addr().String()
	}
	return c.Socket
}

// Validate answers the first thing that no machine could make of the configuration.
func (c *Config) Validate() error {
	if n := len(c.Loops); n > LoopsMax {
		return fmt.Errorf("configure %d loops: at most %d are possible", n, LoopsMax)
	}
	if n := len(c.Disks); n > DisksMax {
		return fmt.Errorf("configure %d disks: at most %d are possible", n, DisksMax)
	}
	loops := max(1, len(c.Loops))
	sockets := make(map[string]string)
	if c.Control != "" {
		sockets[c.Control] = "(the control socket)"
	}
	for i := range c.Disks {
		d := &c.Disks[i]
		if err := d.validate(loops); err != nil {
			return fmt.Errorf("configure disk %s: %w", d.Name(), err)
		}
		for j := range d.Exports {
			e := &d.Exports[j]
			if e.Listener != nil {
				continue
			}
			if e.Socket == "" {
				return fmt.Errorf("configure disk %s: an export has no socket", d.Name())
			}
			if other, ok := sockets[e.Socket]; ok {
				return fmt.Errorf("configure disk %s: socket %s is already the export of disk %s", d.Name(), e.Socket, other)
			}
			sockets[e.Socket] = d.Name()
		}
	}
	return nil
}

func (c *DiskConfig) validate(loops int) error {
	if err := c.validateSource(); err != nil {
		return err
	}
	switch {
	case len(c.Serial) > SerialMax:
		return fmt.Errorf("serial %q has %d bytes, a guest can read %d", c.Serial, len(c.Serial), SerialMax)
	case c.Coalesce < 0 || c.Coalesce > CoalesceMax:
		return fmt.Errorf("coalesce is %v (want 0 to %v)", c.Coalesce, CoalesceMax)
	}
	if err := c.validateQueues(loops); err != nil {
		return err
	}
	switch c.LogicalBlock {
	case 0, 512, 1024, 2048, 4096:
	default:
		return fmt.Errorf("logical block size is %d (want 512, 1024, 2048 or 4096)", c.LogicalBlock)
	}
	return nil
}

func (c *DiskConfig) validateSource() error {
	if c.Size < 0 || c.Offset < 0 {
		return fmt.Errorf("size %d or offset %d is negative", c.Size, c.Offset)
	}
	switch c.Driver {
	case "", "file":
		if c.Path == "" {
			return fmt.Errorf("no path is given")
		}
		if c.Latency != 0 {
			return fmt.Errorf("latency is for driver=null")
		}
		if err := c.validateFormat(); err != nil {
			return err
		}
		switch c.Lock {
		case "", "on", "off":
		case "shared":
			if !c.ReadOnly {
				return fmt.Errorf("lock=shared looks on without a lock and needs readonly")
			}
		default:
			return fmt.Errorf("unknown lock mode %q (want on, off or shared)", c.Lock)
		}
		return nil
	case "null", "mem":
	default:
		return fmt.Errorf("unknown driver %q (want file, null or mem)", c.Driver)
	}
	switch {
	case c.Path != "":
		return fmt.Errorf("driver=%s takes no path", c.Driver)
	case c.Size == 0:
		return fmt.Errorf("driver=%s needs a size (such as size=1G)", c.Driver)
	case c.Size%512 != 0:
		return fmt.Errorf("size is %d, and a disk is made of sectors of 512 bytes", c.Size)
	case c.Offset != 0:
		return fmt.Errorf("driver=%s takes no offset", c.Driver)
	case c.Format != "":
		return fmt.Errorf("driver=%s takes no format", c.Driver)
	case c.Engine != aio.EngineAuto:
		return fmt.Errorf("driver=%s takes no engine", c.Driver)
	case c.Cache != block.CacheDefault:
		return fmt.Errorf("driver=%s takes no cache mode", c.Driver)
	case c.Lock != "":
		return fmt.Errorf("driver=%s takes no lock", c.Driver)
	case c.Latency != 0 && c.Driver != "null":
		return fmt.Errorf("latency is for driver=null")
	}
	return nil
}

// Limits of the caches of an image's tables: fewer bytes than the least cannot work, more than the most are a slip of the pen.
const (
	tableCacheMin = 4 << 10
	tableCacheMax = 64 << 30
)

func (c *DiskConfig) validateFormat() error {
	switch c.Format {
	case "qcow2":
		return c.validateQcow2()
	case "", "raw", "probe":
	case "vmdk", "vhdx", "vpc", "vdi":
		if !c.ReadOnly {
			return fmt.Errorf("format %s is only read: add readonly", c.Format)
		}
	default:
		return fmt.Errorf("unknown format %q (want raw, qcow2, vmdk, vhdx, vpc, vdi or probe)", c.Format)
	}
	switch {
	case c.Backing != "":
		return fmt.Errorf("backing is for format=qcow2")
	case c.DataFile != "":
		return fmt.Errorf("data-file is for format=qcow2")
	case c.Snapshot != "":
		return fmt.Errorf("snapshot is for format=qcow2")
	case c.L2CacheSize != 0 || c.RefcountCacheSize != 0:
		return fmt.Errorf("caches of tables are for format=qcow2")
	case c.KeepOnDiscard:
		return fmt.Errorf("discard=keep is for format=qcow2")
	case c.FileFault != "":
		return fmt.Errorf("file-fault is for format=qcow2")
	}
	return nil
}

func (c *DiskConfig) validateQcow2() error {
	switch c.Backing {
	case "", "on", "off", "probe":
	default:
		return fmt.Errorf("unknown value %q of backing (want on, off or probe)", c.Backing)
	}
	if c.Snapshot != "" && !c.ReadOnly {
		return fmt.Errorf("snapshot %q is only read: add readonly", c.Snapshot)
	}
	for _, n := range []int64{c.L2CacheSize, c.RefcountCacheSize} {
		if n != 0 && (n < tableCacheMin || n > tableCacheMax) {
			return fmt.Errorf("a cache of tables has %d bytes (want %d to %d)", n, tableCacheMin, int64(tableCacheMax))
		}
	}
	return nil
}
