// SPDX-License-Identifier: Apache-2.0

// Package guestvm boots a real Linux guest under QEMU on disks that somebody serves over vhost-user-blk, runs a shell
// script in it and brings back the script's output and exit status.
//
// It owns the kernel (finding or fetching one), the initramfs (built here, with busybox as user space), the QEMU
// command line, the process and the talk with the guest over two serial lines: ttyS0 carries the kernel console, ttyS1
// nothing but the script's output between two marker lines. It needs no root, no image and no network, and it
// leaves nothing behind: QEMU dies with the context and with this process, temporary files have no name.
//
// It does not know how the disks are served: it is given socket paths. The guest is x86-64, on any host that has
// qemu-system-x86_64. It is ordinary control-plane Go: everything is safe for concurrent use unless its comment says
// otherwise, and nothing of it may run on a loop.
package guestvm
