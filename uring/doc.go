// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package uring drives Linux io_uring from pure Go: no cgo, no allocation on the way of a request, no goroutine.
//
// An io_uring is a pair of queues in memory that the program shares with the kernel. The program writes what it wants
// done into the submission queue (an [SQE] each), tells the kernel of all of them with one system call, and finds the
// outcomes in the completion queue (a [CQE] each), in whatever order they came about. io_uring(7) is the manual of the
// kernel's side.
//
// # Life of a ring
//
//	New / NewBest            make it; or make it disabled (Options.RDisabled), register, restrict, then Enable
//	  Register...            optional: files, buffers, an eventfd, the ring's own descriptor
//	  GetSQE, Prep..., user data      as often as there is room
//	  Submit / SubmitAndWait          hand all of it over, perhaps wait
//	  Reap (or PeekCQE, Advance)      take the outcomes
//	Close                    once nothing is in flight
//
// A Prep method writes the whole entry, so flags and UserData are set after it:
//
//	sqe := ring.GetSQE()
//	if sqe == nil { ... }               // queue full: Submit first
//	sqe.PrepRead(fd, buf, offset)
//	sqe.AddFlags(uring.IOSQE_FIXED_FILE)
//	sqe.UserData = 42                   // comes back in the CQE
//
// UserData is a plain number. Use an index into a table of requests, with a generation in the upper bits where stale
// completions are possible; a pointer hidden in it is invisible to the garbage collector.
//
// # Thread rule
//
// A [Ring] has no locks: its methods must be called by one goroutine at a time. With SINGLE_ISSUER (which [NewBest] asks
// for) the kernel itself insists on one operating system thread, the one that made the ring or, if it was made disabled,
// the one that called [Ring.Enable]: calls from another fail with EEXIST. So lock the goroutine to its thread
// (runtime.LockOSThread) before that call, and keep it locked as long as the ring lives. The same goes for
// [Ring.RegisterRingFD]. Requests belong to the thread that submitted them; when a thread ends (a locked goroutine that
// returns ends its thread), the kernel cancels what that thread had in flight.
//
// # Memory rule
//
// The kernel reads and writes the memory named by an SQE after the call that named it has returned. That memory must
// stay reachable, in place and unused by others until the completion arrives:
//
//   - buffers, iovec arrays, message headers and path names until the CQE of their request; the exceptions (a
//     [Timespec], for one: until the submission) say so;
//   - "reachable" means that the program holds a reference elsewhere, for the SQE holds none that the garbage collector
//     sees: a request table, a mapping outside the heap, a global;
//   - a Go stack moves, so memory on it must never be named. The Prep methods see to that: whatever is handed to one of
//     them is allocated on the heap by the compiler. Addresses written into the fields of an SQE by hand have no such guard.
//
// [Ring.Close] does not wait for requests in flight; their memory may still be written to afterwards. Cancel them and
// reap their completions first.
//
// # What comes back
//
// Calls that submit or wait return the bare errno (EINTR, EAGAIN, EBUSY, ETIME and so on, see [Ring.SubmitAndWait]) and
// retry nothing: whether to wait again is the caller's affair. No entry is ever lost by an error: what the kernel did not
// take stays in the queue, in order, and goes out with the next call. Errors of set-up and registration are wrapped, say
// what would help, and are never EINTR.
//
// # What it does not do
//
// No event loop, no dispatch, no request table, no retry of short reads: package aio has them. No IOPOLL, no provided
// buffer rings, no user-supplied ring memory. Linux 5.10 is the oldest kernel it aims at; everything newer is asked for
// by name, and [Ring.Features], [Ring.Flags] and [Ring.Probe] tell what there is.
package uring
