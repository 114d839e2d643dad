// SPDX-License-Identifier: Apache-2.0

package block

import "github.com/sluice-blk/sluice/aio"

// The words of a request come from aio, so that a request made here is the one that an engine gets.
type (
	// Request is one I/O; see [aio.Request] for who owns it when.
	Request = aio.Request
	// Completer hears the outcome of a request.
	Completer = aio.Completer
	// Op is what a request asks for.
	Op = aio.Op
	// Flags modify an operation.
	Flags = aio.Flags
	// IOVec is one memory segment.
	IOVec = aio.IOVec
)

// Operations and flags, as in aio.
const (
	OpRead        = aio.OpRead
	OpWrite       = aio.OpWrite
	OpFlush       = aio.OpFlush
	OpDiscard     = aio.OpDiscard
	OpWriteZeroes = aio.OpWriteZeroes

	FlagFUA     = aio.FlagFUA
	FlagUnmap   = aio.FlagUnmap
	FlagZeroEOF = aio.FlagZeroEOF
)

// Node stores blocks. Its methods are control plane and safe for concurrent use; it is shared by any number of loops.
type Node interface {
	// Info tells what the node can do. It is cheap, and constant for as long as the node is open.
	Info() Info
	// Queue makes the node's face for one loop. Must be called on the loop.
	Queue(l *aio.Loop) (Queue, error)
	// Close gives back what the node holds, and closes the nodes below it. All queues are closed then.
	Close() error
}

// Queue is one loop's face of a node.
type Queue interface {
	// Submit takes a request; see the contract of a node in the package comment. Must be called on the loop.
	Submit(r *Request)
	// Close gives back what the queue holds. Nothing is in flight then. Must be called on the loop.
	Close() error
}

// Filter is a node that stands before one other node, of which it changes little.
type Filter interface {
	Node
	// Below is the node behind it, borrowed.
	Below() Node
}
