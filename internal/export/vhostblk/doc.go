// SPDX-License-Identifier: Apache-2.0

// Package vhostblk is the landing where the guest wing meets the storage wing: it serves a block.Handle as a
// virtio-blk device (virtio 1.3, section 5.2) to a vhost-user front-end.
//
// A [Device] is the control-plane face: it implements vhostuser.Device and is called by that conversation's goroutine.
// Each started virtqueue is a [queue] that lives on one loop: kicks arrive there, chains are popped into slots made when
// the queue started, each slot's request goes to the handle, and what came back is published once at the end of the
// turn with at most one notification.
//
// Guest memory is touched in two places only, collect and publish, each under one recover, so that memory which its
// owner truncated stops that queue and nothing else. A request's error becomes a status byte in statusOf and nowhere
// else. The room keeps no order between requests, caches nothing and never blocks a loop.
package vhostblk
