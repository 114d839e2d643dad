// SPDX-License-Identifier: Apache-2.0

// Package vhostuser holds the back-end's side of the vhost-user conversation, for any virtio device.
//
// It owns the socket of a session, the descriptors that come over it, the table of guest memory, and the state of each
// ring as the messages describe it. It knows nothing of requests in a ring, and never reads or writes guest memory. A
// [Device] hears of a queue when everything that it needs is there, in whatever order the messages came, and of its end
// before anything that it uses is taken away.
//
// Thread rule: a session is one ordinary goroutine that blocks on its socket and calls the Device; nothing here belongs
// on a loop. One front-end is served at a time, further ones wait in the listener's backlog.
//
// # How a message is answered
//
// A message with a reply of its own gets that reply and no other. Any other message is acknowledged with one number, 0
// for success, when REPLY_ACK is negotiated and the message asks for it. A message that cannot be obeyed is refused: it
// changes nothing, the acknowledgement, if asked for, is 1, and the session goes on; the log says why. That includes
// messages that are unknown or belong to a protocol feature that was not negotiated. The connection is closed where
// nothing else is left: when the stream cannot be understood any more (version, size, a reply where a request should
// be), when descriptors were lost, when a message that must be answered has no answer that tells a failure, and when
// the front-end does not negotiate VIRTIO_F_VERSION_1. A GET_CONFIG that fails is answered without payload.
//
// # Rings
//
// A ring runs when features are acknowledged, it has a size, addresses, a base and a kick descriptor, there is a table
// of memory, and it is enabled (which it is by itself unless VHOST_USER_F_PROTOCOL_FEATURES is negotiated). The base is
// waited for because to begin at a wrong one would be to do old requests again. The message
// that completes it starts it, and is the one that is refused when it cannot be started; the values stay, so that a
// later message that mends them starts it. GET_VRING_BASE stops it until it is given a kick descriptor again, or, for
// front-ends that only pause, until it is disabled and enabled again with the very base that was answered and nothing
// else changed. SET_VRING_ENABLE 0 stops it and keeps everything.
//
// RESET_OWNER disables all rings. RESET_DEVICE, and a SET_STATUS of 0, forget features and rings, and keep memory, call
// and error descriptors and protocol features: front-ends do not send those again. A SET_STATUS of 0 also keeps the bases
// and what the driver chose of the device, since QEMU sends one when a machine is merely paused.
//
// Not offered, and refused: logging of writes (migration), in-flight tracking, back-end requests, in-band notification,
// polling in place of a kick descriptor, postcopy, IOMMU, packed rings.
//
// Source: the vhost-user protocol document of QEMU, docs/interop/vhost-user.rst; virtio 1.3.
package vhostuser
