// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"errors"
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

// register makes one io_uring_register call and wraps its error: what names what is registered.
func (r *Ring) register(what string, opcode uint32, arg unsafe.Pointer, nr uint32) (int, error) {
	if r.closed {
		return 0, fmt.Errorf("%s: %w (the ring is closed)", what, syscall.EBADF) // -1 has a meaning of its own to the kernel
	}
	address(arg) // keep it, and above all buffers that it names, off the stack
	n, err := sys.IOUringRegister(r.fd, opcode, arg, nr)
	for errors.Is(err, syscall.EINTR) { // older kernels wait for requests when a table is dropped, and leave it whole if cut short
		n, err = sys.IOUringRegister(r.fd, opcode, arg, nr)
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w%s", what, err, registerRemedy(err, opcode))
	}
	return n, nil
}

// registerRemedy says, in brackets, what would help, where that is known.
func registerRemedy(err error, opcode uint32) string {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return ""
	}
	switch {
	case errno == syscall.ENOMEM && (opcode == sys.IORING_REGISTER_BUFFERS || opcode == sys.IORING_REGISTER_BUFFERS_UPDATE):
		return " (registered buffers count as locked memory: raise the memlock limit, ulimit -l)"
	case errno == syscall.EMFILE:
		return " (more files than the process may open: raise its limit, ulimit -n)"
	case errno == syscall.EBUSY && opcode == sys.IORING_REGISTER_RING_FDS:
		return " (a thread can register 16 rings)"
	case errno == syscall.EEXIST:
		return " (the ring belongs to another thread)"
	case errno == syscall.EINVAL:
		return " (the kernel may be too old for it)"
	case errno == syscall.EACCES:
		return " (the ring's restrictions forbid it)"
	}
	return ""
}

// Enable starts a ring made with Options.RDisabled. With SINGLE_ISSUER the calling thread becomes the ring's.
func (r *Ring) Enable() error {
	_, err := r.register("enable ring", sys.IORING_REGISTER_ENABLE_RINGS, nil, 0)
	return err
}

// RegisterFiles makes a table of files that requests name by index, with [IOSQE_FIXED_FILE]; -1 leaves a place empty for
// [Ring.UpdateFiles]. The ring keeps the files open. There is one table, EBUSY if it is made already; it cannot grow.
func (r *Ring) RegisterFiles(fds []int32) error {
	_, err := r.register(fmt.Sprintf("register %d files", len(fds)), sys.IORING_REGISTER_FILES,
		unsafe.Pointer(unsafe.SliceData(fds)), uint32(len(fds)))
	return err
}

// RegisterFilesSparse makes a table of n empty places.
func (r *Ring) RegisterFilesSparse(n uint32) error {
	fds := make([]int32, n)
	for i := range fds {
		fds[i] = -1
	}
	return r.RegisterFiles(fds)
}

// UpdateFiles replaces the places from off on; -1 empties one. It returns how many it replaced, which is fewer than asked
// for when a descriptor in the middle is bad. Requests in flight keep the file they have.
func (r *Ring) UpdateFiles(off uint32, fds []int32) (int, error) {
	if len(fds) == 0 {
		return 0, nil
	}
	// SAFETY: fds is on the heap (address) and kept alive until after the call.
	u := sys.IOUringRsrcUpdate{Offset: off, Data: address(unsafe.Pointer(unsafe.SliceData(fds)))}
	n, err := r.register(fmt.Sprintf("update %d files from %d", len(fds), off), sys.IORING_REGISTER_FILES_UPDATE,
		unsafe.Pointer(&u), uint32(len(fds)))
	runtime.KeepAlive(fds)
	return n, err
}

// UnregisterFiles drops the table. On some kernels it waits for requests that use it.
func (r *Ring) UnregisterFiles() error {
	_, err := r.register("unregister files", sys.IORING_UNREGISTER_FILES, nil, 0)
	return err
}

// RegisterBuffers pins memory that requests then name by index ([SQE.PrepReadFixed]), at most 1 GiB each. The zero IOVec
// leaves a place empty for [Ring.UpdateBuffers] (Linux 5.13). There is one table, EBUSY if it is made already. The memory
// must stay mapped while it is registered.
func (r *Ring) RegisterBuffers(v []IOVec) error {
	_, err := r.register(fmt.Sprintf("register %d buffers", len(v)), sys.IORING_REGISTER_BUFFERS,
		unsafe.Pointer(unsafe.SliceData(v)), uint32(len(v)))
	return err
}

// RegisterBuffersSparse makes a table of n empty places (Linux 5.13).
func (r *Ring) RegisterBuffersSparse(n uint32) error { return r.RegisterBuffers(make([]IOVec, n)) }

// UpdateBuffers replaces the places from off on (Linux 5.13); the zero IOVec empties one. It returns how many it replaced.
// Requests in flight keep the buffer they have.
func (r *Ring) UpdateBuffers(off uint32, v []IOVec) (int, error) {
	if len(v) == 0 {
		return 0, nil
	}
	// SAFETY: v is on the heap (address) and kept alive until after the call.
	u := sys.IOUringRsrcUpdate2{Offset: off, NR: uint32(len(v)), Data: address(unsafe.Pointer(unsafe.SliceData(v)))}
	n, err := r.register(fmt.Sprintf("update %d buffers from %d", len(v), off), sys.IORING_REGISTER_BUFFERS_UPDATE,
		unsafe.Pointer(&u), uint32(unsafe.Sizeof(u)))
	runtime.KeepAlive(v)
	return n, err
}

// UnregisterBuffers drops the table. On some kernels it waits for requests that use it.
func (r *Ring) UnregisterBuffers() error {
	_, err := r.register("unregister buffers", sys.IORING_UNREGISTER_BUFFERS, nil, 0)
	return err
}

// RegisterEventfd has the kernel add 1 to an eventfd at each completion. It may do so more or less often than there are
// completions: read the queue until it is empty.
func (r *Ring) RegisterEventfd(fd int) error {
	efd := int32(fd)
	_, err := r.register("register eventfd", sys.IORING_REGISTER_EVENTFD, unsafe.Pointer(&efd), 1)
	return err
}

// RegisterEventfdAsync is RegisterEventfd without the completions that came about during the submission.
func (r *Ring) RegisterEventfdAsync(fd int) error {
	efd := int32(fd)
	_, err := r.register("register eventfd", sys.IORING_REGISTER_EVENTFD_ASYNC, unsafe.Pointer(&efd), 1)
	return err
}

// UnregisterEventfd ends the notifications.
func (r *Ring) UnregisterEventfd() error {
	_, err := r.register("unregister eventfd", sys.IORING_UNREGISTER_EVENTFD, nil, 0)
	return err
}

// SetMaxWorkers limits the kernel workers that this thread's requests may use (Linux 5.15): bounded for regular files and
// block devices, unbounded for the rest. 0 leaves a limit as it is. It returns the limits there were.
func (r *Ring) SetMaxWorkers(bounded, unbounded uint32) (wasBounded, wasUnbounded uint32, err error) {
	v := [2]uint32{bounded, unbounded}
	if _, err = r.register("limit workers", sys.IORING_REGISTER_IOWQ_MAX_WORKERS, unsafe.Pointer(&v), 2); err != nil {
		return 0, 0, err
	}
	return v[0], v[1], nil
}

// RegisterRingFD enters the ring into a table of the calling thread, which spares a lookup at each call (Linux 5.18). From
// then on that thread alone may use the ring. The table has 16 places (EBUSY); [Ring.UnregisterRingFD], or Close on the
// same thread, frees this one. EEXIST if it is registered already.
func (r *Ring) RegisterRingFD() error {
	if r.ringTid != 0 {
		return fmt.Errorf("register ring descriptor: %w", syscall.EEXIST)
	}
	u := sys.IOUringRsrcUpdate{Offset: ^uint32(0), Data: uint64(r.fd)}
	if _, err := r.register("register ring descriptor", sys.IORING_REGISTER_RING_FDS, unsafe.Pointer(&u), 1); err != nil {
		return err
	}
	r.enterFd, r.enterBit, r.ringTid = int(u.Offset), IORING_ENTER_REGISTERED_RING, sys.Gettid()
	return nil
}

// UnregisterRingFD undoes RegisterRingFD. It must be called on the same thread, else it fails with EEXIST.
func (r *Ring) UnregisterRingFD() error {
	switch r.ringTid {
	case 0:
		return fmt.Errorf("unregister ring descriptor: %w", syscall.ENOENT)
	case sys.Gettid():
		return r.unregisterRingFD()
	}
	return fmt.Errorf("unregister ring descriptor: %w (it is registered with another thread)", syscall.EEXIST)
}

func (r *Ring) unregisterRingFD() error {
	u := sys.IOUringRsrcUpdate{Offset: uint32(r.enterFd)}
	_, err := r.register("unregister ring descriptor", sys.IORING_UNREGISTER_RING_FDS, unsafe.Pointer(&u), 1)
	r.enterFd, r.enterBit, r.ringTid = r.fd, 0, 0
	return err
}
