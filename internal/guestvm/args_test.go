// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestCommandLine(t *testing.T) {
	on, off := true, false
	c := Config{
		Kernel: &Kernel{Image: "/k/vmlinuz"}, CPUs: 2, MemMiB: 512, Append: "loglevel=7", Args: []string{"-S"},
		Disks: []Disk{
			{Socket: "/s/a,b"},
			{Socket: "/s/c", Queues: 4, QueueSize: 256, ConfigWCE: &off, Reconnect: 1},
			{Socket: "/s/d", ConfigWCE: &on},
		},
	}
	want := []string{
		"qemu-system-x86_64", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none",
		"-machine", "q35,memory-backend=mem", "-object", "memory-backend-memfd,id=mem,size=512M,share=on",
		"-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "512M",
		"-serial", "stdio", "-chardev", "file,id=output,path=out,,put", "-serial", "chardev:output",
		"-kernel", "/k/vmlinuz", "-initrd", "initrd",
		"-append", "console=ttyS0 quiet panic=-1 no_timer_check 8250.nr_uarts=4 loglevel=7",
		"-chardev", "socket,id=disk0,path=/s/a,,b", "-device", "vhost-user-blk-pci,chardev=disk0,num-queues=1,queue-size=128",
		"-chardev", "socket,id=disk1,path=/s/c,reconnect=1", "-device", "vhost-user-blk-pci,chardev=disk1,num-queues=4,queue-size=256,config-wce=off",
		"-chardev", "socket,id=disk2,path=/s/d", "-device", "vhost-user-blk-pci,chardev=disk2,num-queues=1,queue-size=128,config-wce=on",
		"-S",
	}
	if diff := cmp.Diff(want, c.CommandLine(AccelTCG, "initrd", "out,put")); diff != "" {
		t.Error(diff)
	}
}

func TestCommandLineDefaults(t *testing.T) {
	c := Config{Kernel: &Kernel{Image: "/k/vmlinuz"}, QEMU: "/opt/qemu"}
	line := strings.Join(c.CommandLine(AccelKVM, "i", "o"), " ")
	for _, want := range []string{"/opt/qemu ", " -accel kvm -cpu host ", " -smp 1 -m 1024M ", "size=1024M,share=on"} {
		if !strings.Contains(line, want) {
			t.Errorf("%q is missing in %s", want, line)
		}
	}
	if strings.Contains(line, "vhost") {
		t.Errorf("a disk that nobody asked for: %s", line)
	}
}

func TestReconnectFollowsQEMUsVersion(t *testing.T) {
	for version, want := range map[string]bool{
		"QEMU emulator version 7.2.22 (Debian 1:7.2)": false, "QEMU emulator version 9.1.0": false, "QEMU emulator version 9.2.0": true,
		"QEMU emulator version 10.0.2 (Debian)": true, "QEMU emulator version 11.0.50": true, "?": false,
	} {
		if got := countsMilliseconds(version); got != want {
			t.Errorf("%s: got %v", version, got)
		}
	}
	d := Disk{Socket: "s", Reconnect: 2}
	if got := d.args(0, true)[1]; got != "socket,id=disk0,path=s,reconnect-ms=2000" {
		t.Errorf("got %s", got)
	}
}

func TestConfigRefuses(t *testing.T) {
	for name, c := range map[string]Config{
		"no socket":           {Disks: []Disk{{}}},
		"negative queues":     {Disks: []Disk{{Socket: "s", Queues: -1}}},
		"odd queue size":      {Disks: []Disk{{Socket: "s", QueueSize: 100}}},
		"large queue":         {Disks: []Disk{{Socket: "s", QueueSize: 2048}}},
		"negative reconnect":  {Disks: []Disk{{Socket: "s", Reconnect: -1}}},
		"too many disks":      {Disks: make([]Disk, 25)},
		"negative memory":     {MemMiB: -1},
		"negative timeout":    {Timeout: -time.Second},
		"device with a quote": {Devices: []string{"/dev/x'; reboot"}},
		"relative device":     {Devices: []string{"vda"}},
	} {
		if _, err := Boot(t.Context(), c); err == nil || !strings.HasPrefix(err.Error(), "boot guest: ") {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestDiskDevice(t *testing.T) {
	for i, want := range map[int]string{0: "/dev/vda", 25: "/dev/vdz", 26: "/dev/vdaa", 27: "/dev/vdab", 702: "/dev/vdaaa"} {
		if got := DiskDevice(i); got != want {
			t.Errorf("disk %d: got %s, want %s", i, got, want)
		}
	}
}

func TestOverlayCarriesScriptAndDevices(t *testing.T) {
	c := Config{Script: "echo 'any $text'", Disks: make([]Disk, 2), Devices: []string{"/dev/nbd0"}, Files: []File{{Path: "/x"}}}
	files := c.overlayFiles("abc")
	want := []File{
		{Path: "/sluice/boot.conf", Data: []byte("nonce=abc\ndevices='/dev/vda /dev/vdb /dev/nbd0'\ndevice_wait=60\n")},
		{Path: "/sluice/script", Data: []byte("echo 'any $text'")},
		{Path: "/x"},
	}
	if diff := cmp.Diff(want, files); diff != "" {
		t.Error(diff)
	}
}
