// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"time"
)

// Defaults of a Config.
const (
	defaultQEMU      = "qemu-system-x86_64"
	defaultCPUs      = 1 // boots fastest under software emulation
	defaultMemMiB    = 1024
	defaultQueueSize = 128 // QEMU's own
	// defaultTimeout and silenceTCG allow for a machine with 20 runnable threads a CPU: boots of 94 s were seen on one
	// where a quiet boot takes 4 s.
	defaultTimeout = 180 * time.Second
	silenceTCG     = 120 * time.Second
	silenceKVM     = 30 * time.Second
	// defaultDeviceWait is in guest time.
	defaultDeviceWait = 60 * time.Second

	maxDisks = 24 // slots on the root bus of q35 that are free
)

// A Disk is one vhost-user-blk device.
type Disk struct {
	Socket    string // path of the vhost-user socket that a server listens on
	Queues    int    // request queues; 0 means 1. QEMU stops when the server has fewer.
	QueueSize int    // descriptors a queue, a power of two; 0 means 128
	ConfigWCE *bool  // offer the guest to switch the write cache; nil is QEMU's default (on)
	// Reconnect is the number of seconds between attempts to connect again when the server has gone away; 0: never.
	Reconnect int
}

// A Config describes one boot. The zero value boots a guest without disks that runs an empty script.
type Config struct {
	QEMU   string  // program; empty means qemu-system-x86_64 in PATH
	Kernel *Kernel // nil means EnsureKernel's
	// Initrd are files that hold the initramfs, in the order in which the kernel unpacks them; later ones win. Build
	// the first with Initramfs; none at all means an Initramfs with nothing added.
	Initrd []string
	Files  []File // packed for this boot only, over Initrd
	Script string // run by busybox sh in /tmp with nothing on stdin; its stdout and stderr are Result.Output

	CPUs   int // 0 means 1
	MemMiB int // 0 means 1024
	Disks  []Disk
	// Devices are paths that the script waits for, besides the disks (/dev/vda, /dev/vdb and so on, in their order).
	Devices []string
	Append  string   // more words for the kernel command line
	Args    []string // more arguments for QEMU

	Accel   Accel         // empty means auto
	Timeout time.Duration // from start to power-off; 0 means 3 minutes
	// Silence is how long the guest may run before the first sign of life; 0 means 2 minutes, with KVM 30 s.
	Silence time.Duration
	// Console receives all that the guest prints, kernel and script, as it comes, and Output the script's part alone;
	// nil means nobody. They are never called at once; a slow one slows the guest, and none may call a method of the Guest.
	Console io.Writer
	Output  io.Writer

	deviceWait  time.Duration // whole seconds; 0 means 60
	reconnectMS bool          // this QEMU counts the time to reconnect in milliseconds
}

// DiskDevice returns the guest's path of the i-th disk: 0 is /dev/vda.
func DiskDevice(i int) string {
	name := ""
	for ; i >= 0; i = i/26 - 1 {
		name = string(rune('a'+i%26)) + name
	}
	return "/dev/vd" + name
}

func (c *Config) validate() error {
	if c.CPUs < 0 || c.MemMiB < 0 || c.Timeout < 0 || c.Silence < 0 {
		return errors.New("boot guest: negative number of CPUs, memory size or time")
	}
	if len(c.Disks) > maxDisks {
		return fmt.Errorf("boot guest: %d disks (limit %d)", len(c.Disks), maxDisks)
	}
	for i, d := range c.Disks {
		if err := d.validate(); err != nil {
			return fmt.Errorf("boot guest: disk %d: %w", i, err)
		}
	}
	for _, d := range c.Devices {
		if strings.ContainsAny(d, " \t\n'\"\\$`") || !strings.HasPrefix(d, "/") {
			return fmt.Errorf("boot guest: device %q is not a plain absolute path", d)
		}
	}
	return nil
}

func (d *Disk) validate() error {
	size := d.QueueSize
	switch {
	case d.Socket == "":
		return errors.New("no socket is named")
	case d.Queues < 0 || d.Queues > 1024:
		return fmt.Errorf("%d queues (1 to 1024)", d.Queues)
	case size != 0 && (size < 2 || size > 1024 || size&(size-1) != 0):
		return fmt.Errorf("queue size %d (a power of two from 2 to 1024)", size)
	case d.Reconnect < 0:
		return fmt.Errorf("reconnect after %d seconds", d.Reconnect)
	}
	return nil
}

// devices returns the paths that init waits for.
func (c *Config) devices() []string {
	var devices []string
	for i := range c.Disks {
		devices = append(devices, DiskDevice(i))
	}
	return append(devices, c.Devices...)
}
