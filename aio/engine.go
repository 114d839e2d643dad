// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"fmt"

	"github.com/sluice-blk/sluice/internal/hist"
)

// EngineKind names the way in which a file's requests reach the kernel.
type EngineKind uint8

const (
	// EngineAuto asks the file and the machine, and takes the best one that serves it without blocking the loop.
	EngineAuto EngineKind = iota
	// EngineIOUring queues on the loop's own ring. It needs a loop whose poller is io_uring.
	EngineIOUring
	// EngineLinuxAIO queues for io_submit. It is asynchronous for O_DIRECT files and block devices; on other files the
	// submission itself does the work, which is right for memory file systems only.
	EngineLinuxAIO
	// EngineThreads hands each request to a bounded pool of threads.
	EngineThreads
)

var engineNames = [...]string{"auto", "io_uring", "linux-aio", "threads"}

// String is the engine's name as the command line knows it.
func (k EngineKind) String() string {
	if int(k) < len(engineNames) {
		return engineNames[k]
	}
	return fmt.Sprintf("engine(%d)", uint8(k))
}

// ParseEngine is the inverse of String.
func ParseEngine(s string) (EngineKind, error) {
	for i, n := range engineNames {
		if n == s {
			return EngineKind(i), nil
		}
	}
	return 0, fmt.Errorf("unknown engine %q (want auto, io_uring, linux-aio or threads)", s)
}

// engine carries the requests of all files of one loop that chose it: one queue a loop, so that requests to many files
// leave in one submission. Every method is called on the loop.
//
// What every engine owes is tested by one suite (TestEngineConformance): each request completes exactly once, through
// Loop.CompleteLater and so never inside enqueue; short transfers are continued; EAGAIN keeps the queue; a refused
// request fails alone; more requests than the kernel's queue holds wait in order.
type engine interface {
	kind() EngineKind
	// attach makes a file known (registration, probes); detach forgets it. Nothing of the file is in flight at detach.
	attach(f *File) error
	detach(f *File)
	// enqueue takes a request. It never blocks, never fails and never completes anything on the spot. Unless the loop
	// is plugged the caller flushes right after.
	enqueue(r *Request)
	// flush hands what is queued to the kernel, as far as the kernel takes it now. The loop calls it at the end of a
	// turn, when the outermost section is unplugged, and for Loop.Flush.
	flush()
	// reap takes what completed, without a system call where it can, and hands it to Loop.CompleteLater.
	// It answers how many it found.
	reap() int
	// queued counts requests that the kernel has not got yet, inflight those that it has.
	queued() int
	inflight() int
	// close gives back the engine's resources. Nothing is queued or in flight then.
	close()
	counters() *EngineCounters
}

// BatchSizes counts how many came together, in powers of two.
type BatchSizes = hist.Sizes

// EngineCounters counts what an engine did since it was made. They are written on the loop alone and read there, or
// from a copy that Loop.Stats made.
type EngineCounters struct {
	Requests    uint64     // handed to the kernel
	Submissions uint64     // system calls (or, for threads, hand-overs) that carried at least one request
	Resubmits   uint64     // continued short transfers and repeated EINTR/EAGAIN completions
	Again       uint64     // times that the kernel's queue was full
	Errors      uint64     // requests that completed with an error
	Batches     BatchSizes // requests per submission
}
