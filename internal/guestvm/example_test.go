// SPDX-License-Identifier: Apache-2.0

package guestvm_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/sluice-blk/sluice/internal/guestvm"
)

// A guest writes to a disk that a vhost-user-blk server offers on a socket.
func ExampleRun() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	result, err := guestvm.Run(ctx, guestvm.Config{
		Disks:  []guestvm.Disk{{Socket: "/run/disk.sock", Queues: 4}},
		CPUs:   4,
		Script: "mke2fs /dev/vda && mount /dev/vda /mnt && date >/mnt/date && umount /mnt",
	})
	if err != nil {
		log.Fatal(err) // the guest failed
	}
	fmt.Printf("exit status %d: %s", result.Status, result.Output) // the script may have
}

// fio is packed with its libraries, and a static Go program with a file for it.
func ExampleInitramfs() {
	ctx := context.Background()
	kernel, err := guestvm.EnsureKernel(ctx, "")
	if err != nil {
		log.Fatal(err)
	}
	image := guestvm.Initramfs{
		Kernel:   kernel,
		Binaries: []string{"/usr/bin/fio"},
		Files: []guestvm.File{
			{Path: "/usr/bin/uring.test", Source: "build/uring.test"}, // CGO_ENABLED=0 go test -c ./uring
			{Path: "/data/input", Data: []byte("input\n")},
		},
	}
	if err := image.WriteFile(ctx, "build/guest.cpio"); err != nil {
		log.Fatal(err)
	}
	result, err := guestvm.Run(ctx, guestvm.Config{
		Kernel: kernel, Initrd: []string{"build/guest.cpio"}, Script: "fio --version && uring.test -test.v",
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s", result.Output)
}

// A crash: QEMU is killed as soon as the script says that it is writing.
func ExampleGuest_Kill() {
	ctx := context.Background()
	guest, err := guestvm.Boot(ctx, guestvm.Config{
		Disks:  []guestvm.Disk{{Socket: "/run/disk.sock"}},
		Script: "echo writing; dd if=/dev/zero of=/dev/vda bs=4k oflag=direct",
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := guest.WaitOutput(ctx, "writing\n"); err != nil {
		log.Fatal(err)
	}
	guest.Kill()
}
