// SPDX-License-Identifier: Apache-2.0

package vhostuser

import "github.com/sluice-blk/sluice/internal/guestmem"

// Device is a virtio device as the conversation sees it. Its methods are called by the session's goroutine, one at a
// time, and may block; an error refuses the message that led to the call.
type Device interface {
	// Features is the bits of the device type that are offered. The session adds VERSION_1, RING_INDIRECT_DESC,
	// RING_EVENT_IDX and VHOST_USER_F_PROTOCOL_FEATURES. Asked once a session.
	Features() uint64

	// NumQueues is how many queues there are, at most 256. Asked once a session.
	NumQueues() int

	// SetFeatures tells what was negotiated, a part of what was offered, without VHOST_USER_F_PROTOCOL_FEATURES. It is
	// called while no queue runs: before the first starts, and again whenever the front-end changes its mind.
	SetFeatures(negotiated uint64) error

	// ReadConfig fills p from the config space at offset; an error when they lie outside of it, or the device is gone.
	ReadConfig(offset uint32, p []byte) error

	// WriteConfig writes p to the config space at offset; an error when they lie outside of it or may not be written.
	WriteConfig(offset uint32, p []byte) error

	// StartQueue starts a queue that does not run. After an error the queue has not started, and nothing of v is used.
	// The queue may already hold requests, whose kick is long gone.
	StartQueue(v Vring) error

	// StopQueue stops a queue that runs. It returns when nothing of the queue is in flight and its loop touches it no
	// more, with or without an error, and tells the index of the next available entry that would have been taken.
	StopQueue(index int) (lastAvail uint16, err error)

	// SetMem replaces the table of guest memory while queues run. It returns when every loop uses m. The session keeps
	// the old one alive until then; requests in flight that use it must hold a reference of their own. All rings that
	// run lie in m at the same user addresses. After an error the session stops the queues and starts them with m.
	SetMem(m *guestmem.Map) error

	// SetCall replaces the call descriptor of a queue that runs; -1: there is none. It returns when the old one is no
	// longer used, or, with an error, when the new one is not.
	SetCall(index int, fd int) error

	// Reset tells that the front-end is gone or has reset the device. All queues have been stopped.
	Reset()
}

// Vring is a queue that is whole: inside Mem, of a legal size and alignment, acknowledged and enabled.
type Vring struct {
	Index int
	Size  uint16 // entries, a power of two

	Desc, Avail, Used uint64 // addresses of the front-end's own, see guestmem.Map.UserSlice

	Base uint16 // index of the next entry of the available ring to take

	Mem *guestmem.Map // borrowed until SetMem or StopQueue returns

	// Descriptors, borrowed until StopQueue, or SetCall for Call, returns. They are shared with the front-end, so their
	// status flags must stay as they are: any of them may block. Kick, and the others where they are not -1, is an
	// eventfd.
	Kick, Call, Err int

	EventIdx, Indirect bool // what was negotiated
}
