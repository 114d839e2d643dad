// SPDX-License-Identifier: Apache-2.0

package vhostuser

import (
	"errors"
	"fmt"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
)

// sizeLimit is the largest split ring that virtio has (virtio 1.3, section 2.7).
const sizeLimit = 32768

// kickState tells what the kick descriptor of a ring is good for.
type kickState uint8

const (
	kickNone   kickState = iota // there is none
	kickReady                   // the ring may run
	kickParked                  // GET_VRING_BASE stopped the ring: a new one is awaited
	kickRested                  // parked, and SET_VRING_BASE gave back the very base that was answered: enabling resumes
)

// enabling is what SET_VRING_ENABLE said of a ring.
type enabling uint8

const (
	enableUnsaid enabling = iota // enabled, unless VHOST_USER_F_PROTOCOL_FEATURES is negotiated
	enableOn
	enableOff
)

// ring is one queue as the messages so far describe it. It owns its descriptors.
type ring struct {
	index   int
	size    uint16 // 0: not said yet
	placed  bool   // addr was said
	addr    VringAddr
	based   bool   // base was said, or answered
	base    uint16 // next available entry; while the ring runs the device knows better
	enable  enabling
	kicking kickState
	kick    int // or -1, as the next two
	call    int
	err     int
	running bool // the device has it
}

func newRing(index int) ring {
	return ring{index: index, kick: -1, call: -1, err: -1}
}

// dropKick closes the kick descriptor. The ring does not run.
func (r *ring) dropKick() {
	closeFD(&r.kick)
	r.kicking = kickNone
}

// park makes the ring wait for another kick descriptor. It does not run.
func (r *ring) park() {
	if r.kicking != kickNone {
		r.kicking = kickParked
	}
}

// unrest gives up a kick descriptor from before GET_VRING_BASE: the front-end sets the ring up anew, so a kick that it
// gave for the old set-up must not start it half way.
func (r *ring) unrest() {
	if r.kicking == kickParked || r.kicking == kickRested {
		r.dropKick()
	}
}

// reset forgets what a device reset forgets. The ring does not run.
func (r *ring) reset() {
	r.dropKick()
	*r = ring{index: r.index, kick: -1, call: r.call, err: r.err}
}

// pause is a reset after which GET_VRING_BASE still tells how far the ring came. It does not run before a base is set.
func (r *ring) pause() {
	base := r.base
	r.reset()
	r.base = base
}

// close ends the ring's life. It does not run.
func (r *ring) close() {
	r.dropKick()
	closeFD(&r.call)
	closeFD(&r.err)
}

// bytes are the sizes of the three parts of a split ring, with the event indices (virtio 1.3, section 2.7).
func (r *ring) bytes(eventIdx bool) (desc, avail, used uint64) {
	n := uint64(r.size)
	desc, avail, used = 16*n, 4+2*n, 4+8*n
	if eventIdx {
		avail, used = avail+2, used+2
	}
	return desc, avail, used
}

// within tells why the ring does not lie in the memory, or nil.
func (r *ring) within(m *guestmem.Map, eventIdx bool) error {
	desc, avail, used := r.bytes(eventIdx)
	for _, part := range [...]struct {
		name     string
		at, size uint64
	}{{"descriptor table", r.addr.Desc, desc}, {"available ring", r.addr.Avail, avail}, {"used ring", r.addr.Used, used}} {
		if _, err := m.UserSlice(part.at, part.size); err != nil {
			return fmt.Errorf("place %s at user address %#x, %d bytes: %w", part.name, part.at, part.size, err)
		}
	}
	return nil
}

// checkSize tells whether num is the size of a split ring of at most limit entries.
func checkSize(num uint32, limit int) error {
	if num == 0 || num > uint32(limit) || num&(num-1) != 0 {
		return fmt.Errorf("queue size %d: want a power of two up to %d", num, limit)
	}
	return nil
}

// checkAddr tells whether the parts are aligned as virtio asks (virtio 1.3, section 2.7), and nothing is asked for that
// we lack.
func checkAddr(a VringAddr) error {
	switch {
	case a.Flags != 0:
		return fmt.Errorf("ring flags %#x: logging is not offered", a.Flags)
	case a.Desc%16 != 0 || a.Avail%2 != 0 || a.Used%4 != 0:
		return fmt.Errorf("ring addresses %#x, %#x, %#x are not aligned to 16, 2 and 4", a.Desc, a.Avail, a.Used)
	}
	return nil
}

// checkNotifier refuses everything but eventfds. A device node such as /dev/null is always ready, and so would keep a
// loop busy for ever; a regular file would be written to; and a socket may be the front-end's own end of this very
// conversation, or carry it in its queue, so that its end would never be seen while we hold it.
func checkNotifier(fd int) error {
	if !sys.IsEventfd(fd) {
		return errors.New("descriptor is not an eventfd")
	}
	return nil
}

// closeFD closes *fd unless it is -1, which it becomes. Whatever close says, the descriptor is gone.
func closeFD(fd *int) {
	if *fd >= 0 {
		_ = sys.Close(*fd)
		*fd = -1
	}
}
