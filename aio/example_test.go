// SPDX-License-Identifier: Apache-2.0

package aio_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"runtime"
	"syscall"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/uring"
)

// hello is a timer's handler that ends the loop.
type hello struct{ end context.CancelFunc }

func (h *hello) HandleTimer(*aio.Timer) {
	fmt.Println("a millisecond has passed")
	h.end()
}

// A loop, and a timer on it.
func Example() {
	loop, err := aio.NewLoop(nil)
	if err != nil {
		log.Fatal(err)
	}
	ctx, end := context.WithCancel(context.Background())
	loop.Timer(time.Millisecond, &hello{end})
	if err := loop.Run(ctx); err != nil {
		log.Fatal(err)
	}
	// Output: a millisecond has passed
}

// reader reads a file in pieces, all of them asked for in one batch.
type reader struct {
	requests [4]aio.Request
	pieces   [4][8]byte
	left     int
	end      context.CancelFunc
}

func (r *reader) start(f *aio.File) {
	r.left = len(r.requests)
	for i := range r.requests {
		q := &r.requests[i]
		*q = aio.Request{
			Op:     aio.OpRead,
			Offset: int64(i * len(r.pieces[i])),
			Length: int64(len(r.pieces[i])),
			Mem:    []aio.IOVec{aio.IOVecOf(r.pieces[i][:])},
			Done:   r,
		}
		f.Submit(q) // stays in the queue; all four leave at the end of the turn
	}
}

func (r *reader) Complete(_ *aio.Request, err error) {
	if err != nil {
		log.Fatal(err)
	}
	if r.left--; r.left == 0 {
		r.end()
	}
}

// Four reads of a file that leave in one submission.
func ExampleFile_Submit() {
	file, err := os.CreateTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.Remove(file.Name())
	defer file.Close()
	if _, err := file.WriteString("one     two     three   four    "); err != nil {
		log.Fatal(err)
	}

	loop, err := aio.NewLoop(nil)
	if err != nil {
		log.Fatal(err)
	}
	f, err := loop.OpenFile(int(file.Fd()), nil)
	if err != nil {
		log.Fatal(err)
	}
	engine := f.Engine()
	ctx, end := context.WithCancel(context.Background())
	r := &reader{end: end}
	loop.Post(func() { r.start(f) })
	if err := loop.Run(ctx); err != nil {
		log.Fatal(err)
	}
	for _, p := range r.pieces {
		fmt.Printf("%s\n", bytes.TrimSpace(p[:]))
	}
	fmt.Println("submissions:", loop.Stats().Engines[engine].Submissions)
	// Output:
	// one
	// two
	// three
	// four
	// submissions: 1
}

type nop struct{ end context.CancelFunc }

func (n *nop) HandleCQE(cqe uring.CQE) {
	fmt.Println("result:", cqe.Res)
	n.end()
}

// An entry of one's own on the loop's ring.
func ExampleLoop_AddSQE() {
	loop, err := aio.NewLoop(nil)
	if err != nil {
		log.Fatal(err)
	}
	ctx, end := context.WithCancel(context.Background())
	err = loop.AddSQE(func(e *uring.SQE) { e.PrepNop() }, &nop{end})
	if errors.Is(err, aio.ErrNotSupported) { // the loop waits in epoll here
		fmt.Println("result: 0")
		end()
	}
	if err := loop.Run(ctx); err != nil {
		log.Fatal(err)
	}
	// Output: result: 0
}

// A foreign loop owns the wait: here an ordinary goroutine, which waits in Go's netpoller.
func ExampleLoop_Prepare() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	loop, err := aio.NewLoop(nil)
	if err != nil {
		log.Fatal(err)
	}
	defer loop.Close()
	fd, err := loop.Fd()
	if err != nil {
		log.Fatal(err)
	}
	if fd, err = syscall.Dup(fd); err != nil { // os.File closes what it is given
		log.Fatal(err)
	}
	if err := syscall.SetNonblock(fd, true); err != nil { // else os.File does without the netpoller
		log.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "loop")
	defer file.Close()
	conn, err := file.SyscallConn()
	if err != nil {
		log.Fatal(err)
	}

	done := false
	go loop.Post(func() { done = true })
	for !done {
		if err := file.SetReadDeadline(time.Time{}); err != nil {
			log.Fatal(err)
		}
		prepared := false
		// Prepare belongs inside Read, which forgets the wake-ups that came before it.
		_ = conn.Read(func(uintptr) (ready bool) {
			if prepared {
				return true
			}
			prepared = true
			timeout, err := loop.Prepare()
			if timeout > 0 {
				_ = file.SetReadDeadline(time.Now().Add(timeout))
			}
			return err != nil || timeout == 0
		})
		if err := loop.Dispatch(); err != nil {
			log.Fatal(err)
		}
	}
	fmt.Println("posted function ran")
	// Output: posted function ran
}
