// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"time"
	"unsafe"
)

// Options say what kind of ring [New] makes. The zero value asks for a plain ring, which every kernel has.
type Options struct {
	// CQEntries is the size of the completion queue, rounded up to a power of two; 0 is twice the submission queue.
	CQEntries uint32

	// SingleIssuer promises that one thread alone uses the ring (Linux 6.0). The kernel then refuses all others.
	SingleIssuer bool
	// DeferTaskrun puts off completion work until the ring's thread enters the kernel to wait or to get events (6.1).
	// It needs SingleIssuer. Completions then appear only after a call that gets events; see [Ring.SubmitAndGetEvents].
	DeferTaskrun bool
	// CoopTaskrun does without the interrupt that would run completion work at once (5.19).
	CoopTaskrun bool
	// TaskrunFlag makes pending completion work visible through [Ring.NeedsEnter] (5.19). It needs CoopTaskrun or
	// DeferTaskrun.
	TaskrunFlag bool

	// SQPoll has a kernel thread take entries without a system call. It keeps a processor busy.
	SQPoll bool
	// SQPollIdle is how long that thread looks for work before it sleeps; 0 is the kernel's second. It is rounded
	// down to milliseconds.
	SQPollIdle time.Duration
	// SQPollPinned pins that thread to processor SQPollCPU.
	SQPollPinned bool
	SQPollCPU    uint32

	// NoSQArray does without the indirection array of the submission queue (6.6).
	NoSQArray bool
	// SQE128 makes entries of 128 bytes, which some commands need (5.19); see [Ring.Cmd].
	SQE128 bool
	// CQE32 makes completions of 32 bytes (5.19); see [Ring.PeekExtra].
	CQE32 bool
	// Clamp has the kernel cut sizes that are too large down to its limits instead of refusing them.
	Clamp bool
	// AttachWQ shares the kernel workers of that ring; nil is a set of its own.
	AttachWQ *Ring
	// RDisabled makes the ring disabled: it can be registered with and restricted, and runs after [Ring.Enable].
	RDisabled bool
	// SubmitAll has the kernel go on with a batch after an entry that it refuses (5.18). The refused entry has its
	// CQE either way; without SubmitAll the rest of the batch waits for the next call.
	SubmitAll bool

	// Enter stands between the ring and io_uring_enter(2), for tests of programs that use rings: it can answer EINTR,
	// EAGAIN or EBUSY, take fewer entries than it was offered, or count. It calls [KernelEnter] for what the kernel
	// shall do. Nil is the kernel itself.
	Enter EnterFunc
}

// EnterFunc has the shape of io_uring_enter(2). It returns the number of entries taken; the error is a bare
// syscall.Errno. It must not keep arg.
type EnterFunc func(fd int, toSubmit, minComplete, flags uint32, arg unsafe.Pointer, argSize uintptr) (int, error)

// flags are the set-up flags that the options ask for.
func (o *Options) flags() SetupFlags {
	var f SetupFlags
	for _, b := range []struct {
		on   bool
		flag SetupFlags
	}{
		{o.CQEntries != 0, SetupCQSize},
		{o.SingleIssuer, SetupSingleIssuer},
		{o.DeferTaskrun, SetupDeferTaskrun},
		{o.CoopTaskrun, SetupCoopTaskrun},
		{o.TaskrunFlag, SetupTaskrunFlag},
		{o.SQPoll, SetupSQPoll},
		{o.SQPoll && o.SQPollPinned, SetupSQAff},
		{o.NoSQArray, SetupNoSQArray},
		{o.SQE128, SetupSQE128},
		{o.CQE32, SetupCQE32},
		{o.Clamp, SetupClamp},
		{o.AttachWQ != nil, SetupAttachWQ},
		{o.RDisabled, SetupRDisabled},
		{o.SubmitAll, SetupSubmitAll},
	} {
		if b.on {
			f |= b.flag
		}
	}
	return f
}

// bestFlags are what NewBest adds to the caller's options, best first: each line is what the next older kernels lack.
// TASKRUN_FLAG costs nothing that could be measured, and lets a loop poll in user space.
var bestFlags = []SetupFlags{
	SetupSubmitAll | SetupSingleIssuer | SetupDeferTaskrun | SetupTaskrunFlag | SetupNoSQArray, // 6.6
	SetupSubmitAll | SetupSingleIssuer | SetupDeferTaskrun | SetupTaskrunFlag,                  // 6.1
	SetupSubmitAll | SetupSingleIssuer | SetupCoopTaskrun | SetupTaskrunFlag,                   // 6.0
	SetupSubmitAll | SetupCoopTaskrun | SetupTaskrunFlag,                                       // 5.19
	SetupSubmitAll, // 5.18
	0,
}
