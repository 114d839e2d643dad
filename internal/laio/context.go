// SPDX-License-Identifier: Apache-2.0

package laio

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/sluice-blk/sluice/internal/sys"
)

// IOCB describes one request. See the kernel's linux/aio_abi.h for the fields.
type IOCB = sys.IOCB

// Event is one completion.
type Event = sys.IOEvent

// Kernel is the seam between a Context and the system calls, so that tests can have the kernel answer as they like.
// The functions are those of package sys, under the same rules.
type Kernel struct {
	Setup     func(nr uint32) (unsafe.Pointer, error)
	Destroy   func(ctx unsafe.Pointer) error
	Submit    func(ctx unsafe.Pointer, iocbs []*IOCB) (int, error)
	Getevents func(ctx unsafe.Pointer, minNr int, events []Event) (int, error)
}

// SystemKernel is the kernel that runs us.
func SystemKernel() *Kernel {
	return &Kernel{Setup: sys.IoSetup, Destroy: sys.IoDestroy, Submit: sys.IoSubmit, Getevents: sys.IoGetevents}
}

// Limits of the completion ring, from fs/aio.c: the number by which it can be told, the one feature set that exists,
// and a bound on its size that no kernel reaches (aio-max-nr is a count of requests; a ring has about twice as many
// events) and that keeps a foreign number from sending us out of the mapping.
const (
	ringMagic    = 0xa10a10a1
	ringCompat   = 1
	ringIncompat = 0
	ringMax      = 1 << 24
)

// Context is one Linux AIO context. It must not be used by two goroutines at once.
type Context struct {
	kernel *Kernel
	id     unsafe.Pointer
	ring   *sys.AIORing // nil: completions are taken by io_getevents
	nr     uint32       // events in the ring
	events unsafe.Pointer
	closed bool
}

// New makes a context for up to events requests in flight. A nil kernel is the real one.
//
// The error carries the errno. EAGAIN means that fs.aio-max-nr, one budget for the whole machine, is used up; the text
// says what it is and how to raise it. Control plane; may be called from any goroutine.
func New(events int, kernel *Kernel) (*Context, error) {
	if kernel == nil {
		kernel = SystemKernel()
	}
	if events < 1 {
		return nil, fmt.Errorf("set up Linux AIO for %d events: %w", events, syscall.EINVAL)
	}
	id, err := kernel.Setup(uint32(events))
	if err != nil {
		return nil, setupError(events, err)
	}
	c := &Context{kernel: kernel, id: id}
	c.adoptRing()
	return c, nil
}

func setupError(events int, err error) error {
	const what = "set up Linux AIO for %d events: %w (%s)"
	switch {
	case errors.Is(err, syscall.EAGAIN):
		maxNr := procNumber("/proc/sys/fs/aio-max-nr")
		used := procNumber("/proc/sys/fs/aio-nr")
		return fmt.Errorf(what, events, err, fmt.Sprintf("fs.aio-max-nr is %d and %d are in use: sysctl -w fs.aio-max-nr=%d",
			maxNr, used, max(2*maxNr, used+2*int64(events))))
	case errors.Is(err, syscall.ENOSYS):
		return fmt.Errorf(what, events, err, "this kernel has no Linux AIO: it was built without CONFIG_AIO, or a seccomp profile hides io_setup")
	case errors.Is(err, syscall.EPERM), errors.Is(err, syscall.EACCES):
		return fmt.Errorf(what, events, err, "a seccomp profile or a security module forbids io_setup")
	}
	return fmt.Errorf("set up Linux AIO for %d events: %w", events, err)
}

// procNumber reads a file that holds one number; 0 when it cannot be read, as it is told to a person only.
func procNumber(path string) int64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	n, _ := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n
}

// adoptRing decides whether completions can be taken from the mapped ring.
func (c *Context) adoptRing() {
	// SAFETY: a context id is the address of the ring's mapping, which lives until io_destroy.
	r := (*sys.AIORing)(c.id)
	if r == nil || r.Magic != ringMagic || r.CompatFeatures != ringCompat || r.IncompatFeatures != ringIncompat ||
		r.NR == 0 || r.NR > ringMax || uintptr(r.HeaderLengthOfRing) != unsafe.Sizeof(*r) {
		return
	}
	c.ring, c.nr = r, r.NR
	// SAFETY: the events follow the header inside the same mapping.
	c.events = unsafe.Add(c.id, unsafe.Sizeof(*r))
}

// UserRing tells whether completions are taken without a system call.
func (c *Context) UserRing() bool { return c.ring != nil }

// Submit hands requests to the kernel in their order and answers how many it took. An error is about the first one, a
// bare errno, and only given when none was taken. io_submit may sleep; this is one system call, and no retry.
//
// The kernel has copied what it took; the memory that the requests point to must stay until they complete, and the
// caller keeps it alive.
func (c *Context) Submit(iocbs []*IOCB) (int, error) {
	if c.closed {
		return 0, syscall.EBADF
	}
	return c.kernel.Submit(c.id, iocbs)
}

// Ready tells whether a completion waits in the ring, without a system call. Without a user ring it cannot know and
// answers true.
func (c *Context) Ready() bool {
	if c.closed {
		return false
	}
	return c.ring == nil || atomic.LoadUint32(&c.ring.Head) != atomic.LoadUint32(&c.ring.Tail)
}

// Reap moves completions into events, at most len(events), and answers how many. It never waits.
func (c *Context) Reap(events []Event) int {
	switch {
	case c.closed || len(events) == 0:
		return 0
	case c.ring == nil:
		return c.getevents(events)
	}
	// Head is ours: the kernel reads it to learn what it may overwrite.
	head := c.ring.Head
	// Pairs with the write barrier between the event and the tail in the kernel's aio_complete: what is below the tail
	// that we see is whole.
	tail := atomic.LoadUint32(&c.ring.Tail)
	if head >= c.nr || tail >= c.nr {
		return c.getevents(events) // not as we know it; the kernel sorts it out
	}
	n := 0
	for head != tail && n < len(events) {
		// SAFETY: head < nr, and nr events of this size lie behind the header.
		events[n] = *(*Event)(unsafe.Add(c.events, uintptr(head)*unsafe.Sizeof(Event{})))
		n++
		if head++; head == c.nr {
			head = 0
		}
	}
	// The events are copied before the kernel may use their places again: a releasing store.
	atomic.StoreUint32(&c.ring.Head, head)
	return n
}

// getevents asks the kernel for completions without waiting.
func (c *Context) getevents(events []Event) int {
	n, err := c.kernel.Getevents(c.id, 0, events)
	if err != nil {
		return 0 // EINTR: nothing was taken, and the caller looks again
	}
	return n
}

// Close ends the context and waits for what is in flight, so that afterwards the kernel touches no memory of its
// requests. Their completions are lost: reap first. A second Close does no harm.
func (c *Context) Close() error {
	if c.closed {
		return nil
	}
	c.closed = true
	c.ring = nil
	if err := c.kernel.Destroy(c.id); err != nil {
		return fmt.Errorf("destroy Linux AIO context: %w", err)
	}
	return nil
}
