// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"github.com/sluice-blk/sluice/internal/laio"
	"github.com/sluice-blk/sluice/internal/sys"
)

// notifier calls the guest. It borrows its eventfd, which the front-end shares: its flags must stay as they are, and
// whatever the front-end does with the counter must not make the loop wait.
type notifier struct {
	fd       int     // -1: nobody wants to be called
	blocking *ringer // for a descriptor without O_NONBLOCK
}

// newNotifier looks at the descriptor once. bell is opened and used for blocking descriptors only, which are rare: QEMU's
// are not. Control plane.
func newNotifier(fd int, bell *ringer) (notifier, error) {
	if fd < 0 {
		return notifier{fd: -1}, nil
	}
	if !sys.IsEventfd(fd) {
		return notifier{}, errors.New("it is not an eventfd")
	}
	flags, err := sys.FcntlGetfl(fd)
	if err != nil {
		return notifier{}, fmt.Errorf("read its flags: %w", err)
	}
	if flags&syscall.O_NONBLOCK != 0 {
		bell = nil
	} else {
		bell.open()
	}
	return notifier{fd: fd, blocking: bell}, nil
}

// signal adds one to the counter. A full counter is no error: whoever reads it will find that it was called.
func (n *notifier) signal() error {
	switch {
	case n.fd < 0:
		return nil
	case n.blocking != nil:
		return n.blocking.ring(n.fd)
	}
	if err := sys.EventfdWrite(n.fd, 1); err != nil && !errors.Is(err, syscall.EAGAIN) {
		return fmt.Errorf("write the call descriptor: %w", err)
	}
	return nil
}

// ringer signals blocking eventfds without ever waiting. A write(2) to one whose counter is full sleeps until its reader
// comes, and a look before the write is a race that a hostile front-end can win; but the kernel itself may signal an
// eventfd at the completion of an AIO request, which only saturates. So the ringer submits a read of nothing that
// completes at once. That costs about 0.6 microseconds where a write costs 0.2.
//
// It is opened by the first notifier that needs it: a context takes a share of fs.aio-max-nr, and a descriptor. What open
// makes is seen by the loop because the notifier comes to it later.
type ringer struct {
	once sync.Once
	ctx  *laio.Context // nil: no AIO to be had, look before each write
	zero *os.File
	cb   laio.IOCB
	cbs  [1]*laio.IOCB
	seen [4]laio.Event
}

// ringAttempts bounds the tries of one signal: an interrupted submission is worth a second one, and the completion of
// the last has left room by then.
const ringAttempts = 3

func (r *ringer) open() {
	r.once.Do(func() {
		r.cbs[0] = &r.cb
		zero, err := os.Open("/dev/zero")
		if err != nil {
			return
		}
		ctx, err := laio.New(len(r.seen), nil)
		if err != nil {
			_ = zero.Close() // nothing was written to it
			return
		}
		r.zero, r.ctx = zero, ctx
		laio.PrepRead(&r.cb, int(zero.Fd()), sys.IOVec{}, 0)
	})
}

func (r *ringer) ring(fd int) error {
	if r.ctx == nil {
		if !sys.EventfdHasRoom(fd) {
			return nil
		}
		return sys.EventfdWrite(fd, 1)
	}
	laio.Signal(&r.cb, fd)
	var err error
	for range ringAttempts {
		_, err = r.ctx.Submit(r.cbs[:])
		r.ctx.Reap(r.seen[:])
		if err == nil {
			return nil
		}
	}
	return fmt.Errorf("signal the call descriptor: %w", err)
}

func (r *ringer) close() error {
	if r.ctx == nil {
		return nil
	}
	return errors.Join(r.ctx.Close(), r.zero.Close())
}
