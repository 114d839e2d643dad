// SPDX-License-Identifier: Apache-2.0

package block

// Counters counts what one queue of a handle did since it was made, or the sum over queues. Requests are counted by
// operation when they pass the door, bytes with them; Errors when they come back.
type Counters struct {
	Reads, Writes, Flushes, Discards, WriteZeroes uint64
	ReadBytes, WriteBytes                         uint64 // as asked for by the user of the handle
	Errors                                        uint64 // requests that completed with an error, refused ones included
	Refused                                       uint64 // requests that were wrong in themselves
	Bounced                                       uint64 // carried through aligned memory
	Merged                                        uint64 // blocks that were read to write a part of them
	Split                                         uint64 // requests that took more than one transfer for their size
	EmulatedFUA                                   uint64 // flushes that stood for an FUA
	EmulatedZeroes                                uint64 // writes of zeroes done by writing zeros
	Waited                                        uint64 // requests that waited for a slot, bounce memory or a block
	Held                                          uint64 // requests that waited at the door of a drained handle
}

func (c *Counters) add(d *Counters) {
	c.Reads += d.Reads
	c.Writes += d.Writes
	c.Flushes += d.Flushes
	c.Discards += d.Discards
	c.WriteZeroes += d.WriteZeroes
	c.ReadBytes += d.ReadBytes
	c.WriteBytes += d.WriteBytes
	c.Errors += d.Errors
	c.Refused += d.Refused
	c.Bounced += d.Bounced
	c.Merged += d.Merged
	c.Split += d.Split
	c.EmulatedFUA += d.EmulatedFUA
	c.EmulatedZeroes += d.EmulatedZeroes
	c.Waited += d.Waited
	c.Held += d.Held
}

// admitted counts a request that passed the checks. Must be called on the loop.
func (c *Counters) admitted(r *Request) {
	switch r.Op {
	case OpRead:
		c.Reads++
		c.ReadBytes += uint64(r.Length)
	case OpWrite:
		c.Writes++
		c.WriteBytes += uint64(r.Length)
	case OpFlush:
		c.Flushes++
	case OpDiscard:
		c.Discards++
	case OpWriteZeroes:
		c.WriteZeroes++
	}
}
