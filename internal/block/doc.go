// SPDX-License-Identifier: Apache-2.0

// Package block holds the vocabulary of the block graph and the one guard at its door.
//
// A [Node] is something that stores blocks (a file, memory, a window of another node); a [Queue] is a node as one loop
// sees it; [Info] is what a node says about itself. A [Handle] stands before a node for everybody who is not a node:
// it checks the range and the shape of each request, refuses writes to what is read-only, carries unaligned requests
// through aligned memory, splits what is too large, does by other means what the node cannot do (FUA by a flush, zeroes
// by writing them), makes each write durable while the write cache is off, counts, and can be drained.
//
// # Contract of a node
//
// A node never checks bounds, alignment, read-only or limits: requests come through a Handle, or from a node above that
// keeps to what Info says. It completes each request exactly once, on the loop of its queue, and never inside Submit. A
// node that changes nothing on the way back hands the same request on. Info.Size is a multiple of Info.Align, and Align
// and MemAlign are powers of two. Flush makes every write durable that completed before the flush was submitted, on
// whatever loop.
//
// # Threads
//
// The data plane (Submit, Complete) runs on the loop of its queue and takes no lock, with one exception: while writes
// are in flight that cover only a part of an aligned block, all writes of the handle are entered in one table under a
// mutex, since two loops may write to the two halves of one block. A handle whose users send aligned writes never
// gets there.
//
// # What it does not do
//
// It opens nothing (see the node packages and the graph), knows no format, and turns no error into a status that a guest
// or a client understands: errors carry a syscall.Errno up to the export, which alone translates it.
package block
