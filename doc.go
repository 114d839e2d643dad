// SPDX-License-Identifier: Apache-2.0

// Package sluice opens virtual disks and serves them to virtual machines.
//
// [Open] opens a raw image or a block device, [OpenMemory] a disk that is gone when it is closed, [Create] makes an
// image. A [Disk] is read and written at byte offsets by any number of goroutines; beneath it runs an event loop that
// hands over to the kernel at once whatever came together. A [Server] offers a disk to a guest's virtio-blk driver over
// vhost-user, as `sluice serve` does.
//
// An image is locked as QEMU locks it, so that neither two programs that use this package nor QEMU and one of them write
// the same image.
//
// The loops and engines beneath are packages of their own, aio and uring, for programs that want asynchronous file I/O
// and no disk. This package knows raw images only, resizes nothing, and cancels nothing: a call that has begun returns
// when the kernel has answered.
package sluice
