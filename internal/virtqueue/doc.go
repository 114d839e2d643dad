// SPDX-License-Identifier: Apache-2.0

// Package virtqueue is the device side of a split virtqueue (virtio 1.3, section 2.7): it takes descriptor chains from
// the available ring, checks them, and puts them into the used ring. It is pure memory: no descriptor of the kernel, no
// eventfd, no socket, no idea of what a request is.
//
// # Threads
//
// One thread owns a [Queue] and calls all of its methods; the driver is the only other party, in another process or
// virtual machine, and writes the memory at any time. Each index is read once and each descriptor is copied once to a
// local before it is checked (the Go memory model forbids the compiler to read a local again from where it came from).
//
// # Batches
//
// The work of a loop turn, so that no wake-up is lost and one notification serves the whole batch:
//
//	for {
//		q.DisableKicks()
//		for ok, err := q.Pop(c); ok; ok, err = q.Pop(c) { start(c) } // until empty; err stops the queue
//		if !q.EnableKicks() { break }                                // something came in between: again
//	}
//	for each completion { q.Push(head, written) }
//	if q.Publish() { notify the driver }
//
// # What a faulty driver gets
//
// A chain with a fault in its contents is returned by [Queue.Pop] with Chain.Err set, and the queue goes on: the ring
// and the head are sound, so the device can complete it. Chain.Readable is then empty, and Chain.Writable holds the
// last device-writable byte alone, where there is one in memory: a device that answers by a status in that place can
// tell the failure. It completes with a used length of 0, because that length counts from the first writable byte
// (section 2.7.8.2).
//
// A fault in the structure breaks the queue: Pop returns a [BrokenError] then and ever after. Where an index or a link
// is wrong it cannot be known which buffers the driver meant, and to complete a chain with no status written lets the
// driver read an old one. What is in flight may still be pushed and published. Only the driver can mend it, by a reset.
//
//	fault                                                           answer        rule (virtio 1.3)
//	avail.idx more than the queue size ahead, or moved back         broken        2.7.13.1: at most one entry a buffer
//	head not below the queue size                                   broken        2.7.6
//	head that is in flight already                                  broken        2.7.13: descriptors in use are not reused
//	next not below the size of its table                            broken        2.7.5
//	more links than the table has entries, that is, a loop          broken        2.7.5.2: no loops
//	INDIRECT without the feature                                    broken        2.7.5.3.1
//	INDIRECT together with NEXT                                     broken        2.7.5.3.1
//	INDIRECT inside an indirect table                               broken        2.7.5.3.1
//	indirect table of 0 bytes, or of no multiple of 16              broken        2.7.5.3
//	indirect table of more than MaxSize entries                     broken        2.7.5.3.1, with our own limit
//	indirect table not wholly in one region of memory               ErrAddress    the region may just have been removed
//	buffer outside of memory, or wrapping, or across a gap          ErrAddress    as above
//	device-readable descriptor behind a device-writable one         ErrOrder      2.7.4.2
//	more segments than Config.MaxSegments or the Chain has room for ErrTooLong    the device told its limit
//	more than 2^32-1 bytes in one direction                         ErrTooLong    2.7.5.2, less one byte
//	descriptor of 0 bytes                                           skipped       nothing forbids it, its address says nothing
//	WRITE on a descriptor that refers to an indirect table          ignored       2.7.5.3.2
//	direct descriptors before an indirect one                       accepted      2.7.5.3.2
//	chain longer than the queue by way of an indirect table         accepted      drivers do it; MaxSegments bounds it
//	unknown flag bits in a descriptor or a ring                     ignored       reserved bits
//
// # Faults of memory
//
// The file behind the memory may be truncated while the queue runs; the next access to it is a SIGBUS. Pop, Publish and
// the others let that go through as a panic of the kind that [sys.IsFault] knows, rather than pay for a guard on each
// call. Whoever calls them sets [sys.SetPanicOnFault] in the goroutine and recovers around a whole batch; the queue is
// then in an undefined state, and its memory is gone: it is to be closed, and no method but Close may be called.
package virtqueue
