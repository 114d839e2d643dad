// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"cmp"
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strings"
)

// CommandLine returns the arguments of QEMU, its name first, for a boot of c on a settled accelerator with the
// initramfs in file initrd and the script's serial line written to file output. Nothing is run and nothing is looked
// up; c.Kernel must be set. Safe for concurrent use.
func (c *Config) CommandLine(accel Accel, initrd, output string) []string {
	mem := fmt.Sprintf("%dM", cmp.Or(c.MemMiB, defaultMemMiB))
	args := []string{
		cmp.Or(c.QEMU, defaultQEMU),
		"-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
		// A vhost-user server maps the guest's memory: it must be a shared file.
		"-machine", "q35,memory-backend=mem",
		"-object", "memory-backend-memfd,id=mem,size=" + mem + ",share=on",
		"-accel", accel.qemu(), "-cpu", accel.cpu(),
		"-smp", fmt.Sprint(cmp.Or(c.CPUs, defaultCPUs)), "-m", mem,
		"-serial", "stdio",
		"-chardev", "file,id=output,path=" + escape(output), "-serial", "chardev:output",
		"-kernel", c.Kernel.Image, "-initrd", initrd, "-append", c.kernelCommandLine(),
	}
	for i := range c.Disks {
		args = append(args, c.Disks[i].args(i, c.reconnectMS)...)
	}
	return append(args, c.Args...)
}

func (d *Disk) args(i int, reconnectMS bool) []string {
	id := fmt.Sprintf("disk%d", i)
	socket := "socket,id=" + id + ",path=" + escape(d.Socket)
	if d.Reconnect > 0 && reconnectMS {
		socket += fmt.Sprintf(",reconnect-ms=%d000", d.Reconnect)
	} else if d.Reconnect > 0 {
		socket += fmt.Sprintf(",reconnect=%d", d.Reconnect)
	}
	// num-queues is always said: QEMU's default is one for each CPU, and it stops when the server has fewer.
	device := fmt.Sprintf("vhost-user-blk-pci,chardev=%s,num-queues=%d,queue-size=%d",
		id, cmp.Or(d.Queues, 1), cmp.Or(d.QueueSize, defaultQueueSize))
	if d.ConfigWCE != nil {
		device += ",config-wce=" + map[bool]string{true: "on", false: "off"}[*d.ConfigWCE]
	}
	return []string{"-chardev", socket, "-device", device}
}

var qemuVersion = regexp.MustCompile(`version (\d+)\.(\d+)`)

// adaptToQEMU asks QEMU for its version where that matters: 9.2 brought reconnect-ms, 11 takes reconnect away.
func (c *Config) adaptToQEMU(ctx context.Context) error {
	if !slices.ContainsFunc(c.Disks, func(d Disk) bool { return d.Reconnect > 0 }) {
		return nil
	}
	out, err := exec.CommandContext(ctx, c.QEMU, "--version").Output()
	if err != nil {
		return fmt.Errorf("ask %s for its version: %w", c.QEMU, err)
	}
	c.reconnectMS = countsMilliseconds(string(out))
	return nil
}

func countsMilliseconds(version string) bool {
	m := qemuVersion.FindStringSubmatch(version)
	return m != nil && compareVersions(m[1]+"."+m[2], "9.2") >= 0
}

// kernelCommandLine: panic=-1 with -no-reboot makes a panic end QEMU at once; no_timer_check keeps a starved host from
// failing the boot on a timer that did not tick in time; nr_uarts makes sure of ttyS1.
func (c *Config) kernelCommandLine() string {
	return strings.TrimSpace("console=ttyS0 quiet panic=-1 no_timer_check 8250.nr_uarts=4 " + c.Append)
}

// escape doubles commas, as QEMU's option syntax asks.
func escape(value string) string { return strings.ReplaceAll(value, ",", ",,") }
