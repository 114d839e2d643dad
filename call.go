// SPDX-License-Identifier: Apache-2.0

package sluice

import (
	"sync"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
)

// call carries one request from a goroutine to a loop and its outcome back. Calls are used again and again, and so are
// their channel and their bound function: a request allocates nothing.
type call struct {
	req  block.Request
	mem  [1]aio.IOVec
	face *block.HandleQueue
	post func()
	done chan error // holds one, so that the loop never waits for the goroutine
}

var calls = sync.Pool{New: func() any {
	c := &call{done: make(chan error, 1)}
	c.req.Done = c
	c.post = c.submit
	return c
}}

// run hands a request to the loop of face and waits for the outcome.
func run(face *block.HandleQueue, what aio.Op, off, length int64, p []byte, flags aio.Flags) error {
	c := calls.Get().(*call)
	c.face = face
	c.req.Op, c.req.Flags, c.req.Offset, c.req.Length, c.req.Mem = what, flags, off, length, nil
	if what == aio.OpRead || what == aio.OpWrite {
		c.mem[0] = aio.IOVecOf(p)
		c.req.Mem = c.mem[:]
	}
	face.Loop().Post(c.post)
	err := <-c.done
	c.face, c.mem[0], c.req.Mem = nil, aio.IOVec{}, nil
	calls.Put(c)
	return err
}

// submit runs on the loop.
func (c *call) submit() { c.face.Submit(&c.req) }

// Complete runs on the loop.
func (c *call) Complete(_ *block.Request, err error) { c.done <- err }
