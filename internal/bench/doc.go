// SPDX-License-Identifier: Apache-2.0

// Package bench is the built-in guest driver as a load generator: it plays the virtio-blk driver and the VMM over a
// vhost-user socket, ours or anybody's, and measures what comes back.
//
// Workloads and figures have fio's names. Each job is one virtqueue driven by one thread of its own, as a guest's CPU
// drives it: it keeps so many requests outstanding, kicks when the device asks for it, and sleeps on the call eventfd
// unless told to poll. With Verify each 8-byte word written tells its place and generation, each read is compared, and at
// the end everything written is read once more.
//
// The room knows nothing of how the disk is served. It measures from the driver's side only; what a server counted is
// for its owner to add to the [Result].
package bench
