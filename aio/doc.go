// SPDX-License-Identifier: Apache-2.0

// Package aio is an event loop for asynchronous file I/O: a loop turn is a batch.
//
// A [Loop] is one operating system thread that goes round. In each turn it takes everything that arrived (completions,
// readiness, posted functions, due timers), calls back for each, does the end-of-turn work once for each that asked
// ([Loop.AtTurnEnd]), and hands everything that this caused to the kernel together. On io_uring the call that hands over
// is also the call that waits: thirty-two reads from one callback are one io_uring_enter.
//
//	l, err := aio.NewLoop(nil)
//	f, err := l.OpenFile(fd, nil)           // before Run, or on the loop
//	go l.Run(ctx)
//	l.Post(func() { f.Submit(request) })    // request.Done hears of the outcome, on the loop
//
// # What there is
//
// [Loop.Watch] calls back while a descriptor is ready, [Loop.Timer] when a time has come, [Loop.Post] runs a function of
// another goroutine on the loop. [Loop.OpenFile] gives a [File] whose requests are carried by one of three engines:
// io_uring on the loop's own ring, Linux AIO, or a bounded pool of threads, chosen by asking the file. [Loop.AddSQE] puts
// entries of the caller's own on the ring. [Loop.Attend] has a loop that polls ([LoopOptions.PollMax]) look at memory where
// work shows, so that nobody need be woken for it. [Loop.Plug] and [Loop.Unplug] make a batch outside a turn.
//
// The loop waits in io_uring, epoll or poll, whichever can be set up first; [Loop.Poller] says which, and why not the
// better one. They behave alike: readiness is level-triggered on all three. A program that has a loop of its own keeps it
// and drives this one through [Loop.Fd], [Loop.Prepare] and [Loop.Dispatch].
//
// # Thread rule
//
// A loop has no locks. Everything must be called on the loop, that is in one of its callbacks, or by the goroutine that
// sets the loop up before Run; [Loop.Post], [Loop.Call], [Loop.Stats] and what says so may be called from any goroutine.
// Builds with the tag invariants check it. No callback ever runs inside a call of this package, so that a caller's state
// does not change under its hands.
//
// A callback must not block: no channel, no lock that is held for long, no file or network call that waits. Everything on
// the loop waits with it.
//
// # The Go runtime
//
// A loop that wakes needs a processor of the Go scheduler. With GOMAXPROCS goroutines busy it waits for one, up to ten
// milliseconds. Programs that run loops should set GOMAXPROCS to the number of processors plus the number of loops plus
// one, once, before the loops run: the ones in reserve cost nothing while the loops sleep. A turn allocates nothing
// by itself, so that a garbage collection hardly notices a loop; GOGC of 200 to 400 suits programs whose heap is small.
//
// # What it does not do
//
// It neither opens nor closes descriptors that are not its own, keeps no order among requests that overlap, does not
// align or split what a file with O_DIRECT would refuse, and gives sockets readiness and ring entries only.
package aio
