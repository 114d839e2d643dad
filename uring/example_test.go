// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring_test

import (
	"errors"
	"fmt"
	"log"
	"os"
	"runtime"
	"syscall"
	"time"

	"github.com/sluice-blk/sluice/uring"
)

// Four parts of a file are read with one system call.
func Example() {
	f, err := os.CreateTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := f.WriteString("io_uring is two queues"); err != nil {
		log.Fatal(err)
	}

	runtime.LockOSThread() // NewBest asks for a ring of one thread
	defer runtime.UnlockOSThread()
	ring, err := uring.NewBest(8, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer ring.Close()

	parts := []struct{ off, n int }{{0, 8}, {9, 2}, {12, 3}, {16, 6}}
	bufs := make([][]byte, len(parts))
	for i, p := range parts {
		bufs[i] = make([]byte, p.n)
		sqe := ring.GetSQE() // there is room for 8
		sqe.PrepRead(int(f.Fd()), bufs[i], uint64(p.off))
		sqe.UserData = uint64(i)
	}

	var cqes [8]uring.CQE
	for done := 0; done < len(parts); {
		if _, err := ring.SubmitAndWait(uint32(len(parts)-done), -1); err != nil && !errors.Is(err, syscall.EINTR) {
			log.Fatal(err)
		}
		n := ring.Reap(cqes[:])
		for _, cqe := range cqes[:n] {
			if err := cqe.Err(); err != nil {
				log.Fatalf("read part %d: %v", cqe.UserData, err)
			}
		}
		done += n
	}
	for _, b := range bufs {
		fmt.Printf("%s\n", b)
	}
	// Output:
	// io_uring
	// is
	// two
	// queues
}

// A wait can have a limit, and a signal can end it.
func ExampleRing_SubmitAndWait() {
	ring, err := uring.New(4, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer ring.Close()

	for {
		_, err = ring.SubmitAndWait(1, 10*time.Millisecond)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	fmt.Println(errors.Is(err, syscall.ETIME))
	// Output: true
}

// A write and the fsync after it, as one chain: the second starts when the first has succeeded.
func ExampleSQE_AddFlags() {
	f, err := os.CreateTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	ring, err := uring.New(4, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer ring.Close()

	data := []byte("durable")
	sqe := ring.GetSQE()
	sqe.PrepWrite(int(f.Fd()), data, 0)
	sqe.AddFlags(uring.IOSQE_IO_LINK)
	sqe.UserData = 1
	sqe = ring.GetSQE()
	sqe.PrepFsync(int(f.Fd()), uring.IORING_FSYNC_DATASYNC)
	sqe.UserData = 2

	for done := 0; done < 2; {
		if _, err := ring.SubmitAndWait(1, -1); err != nil && !errors.Is(err, syscall.EINTR) {
			log.Fatal(err)
		}
		for cqe := ring.PeekCQE(); cqe != nil; cqe = ring.PeekCQE() {
			fmt.Println(cqe.UserData, cqe.Res)
			ring.Advance(1)
			done++
		}
	}
	runtime.KeepAlive(data) // the SQE holds no reference that the collector sees
	// Output:
	// 1 7
	// 2 0
}

// A ring that does nothing but read and write, whatever code later gets hold of it.
func ExampleRing_Restrict() {
	ring, err := uring.New(4, &uring.Options{RDisabled: true})
	if err != nil {
		log.Fatal(err)
	}
	defer ring.Close()
	err = ring.Restrict(uring.AllowOp(uring.IORING_OP_READ), uring.AllowOp(uring.IORING_OP_WRITE))
	if err != nil {
		log.Fatal(err)
	}
	if err := ring.Enable(); err != nil {
		log.Fatal(err)
	}

	ring.GetSQE().PrepNop()
	for ring.CQReady() == 0 {
		if _, err := ring.SubmitAndWait(1, -1); err != nil && !errors.Is(err, syscall.EINTR) {
			log.Fatal(err)
		}
	}
	fmt.Println(ring.PeekCQE().Err())
	// Output: permission denied
}
