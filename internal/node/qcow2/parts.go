// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"github.com/sluice-blk/sluice/internal/block"
)

// maxParts is how many pieces of one request are on their way at the same time.
const maxParts = 16

// part is one of several child requests that a routine has on its way at the same time.
type part struct {
	c    *routine
	req  block.Request
	iov  []block.IOVec
	busy bool
}

// send hands the next n bytes of the job's memory to q, without waiting for the outcome: see join. It waits only for a free
// part. After a failure it sends nothing more.
func (c *routine) send(q *block.HandleQueue, op block.Op, flags block.Flags, off, n int64) {
	p := c.freePart()
	p.iov = c.mem.take(p.iov[:0], n)
	c.submit(p, q, op, flags, off, n)
}

func (c *routine) submit(p *part, q *block.HandleQueue, op block.Op, flags block.Flags, off, n int64) {
	if c.failed != nil {
		clear(p.iov)
		return
	}
	r := &p.req
	r.Op, r.Flags, r.Offset, r.Length, r.Mem = op, flags, off, n, p.iov
	r.ForgetTimes()
	p.busy = true
	c.flying++
	q.Submit(r)
}

func (c *routine) freePart() *part {
	for {
		for i := range c.parts {
			if !c.parts[i].busy {
				return &c.parts[i]
			}
		}
		c.joins, c.all = true, false
		c.suspend()
	}
}

// join waits for all that was sent, and gives the first failure since the last join.
func (c *routine) join() error {
	for c.flying > 0 {
		c.joins, c.all = true, true
		c.suspend()
	}
	err := c.failed
	c.failed = nil
	return err
}

// Complete brings the outcome of a part.
func (p *part) Complete(r *block.Request, err error) {
	c := p.c
	if err != nil && c.failed == nil {
		c.failed = err
	}
	if c.job.r != nil {
		c.job.r.AdoptTimes(r)
	}
	clear(p.iov) // it may point to a guest's memory, which may be unmapped by and by
	r.Mem = nil
	p.busy = false
	c.flying--
	if c.joins && (!c.all || c.flying == 0) {
		c.joins = false
		c.h.run(c)
	}
}
