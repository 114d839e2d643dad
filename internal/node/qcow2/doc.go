// SPDX-License-Identifier: Apache-2.0

// Package qcow2 is the node of the qcow2 image format: a disk whose clusters lie where tables say, in the node below.
//
// It owns the way of a request through an open image. A request that lies in one run of host clusters, and whose tables are
// in memory, gets another offset and is handed to the node below in the same turn; nothing is allocated for it. Everything
// else (tables to be read, clusters to be found and filled, zeroes, discards, flushes) is straight-line code on a pooled
// coroutine of the loop's own thread. What the tables are and in which order they reach the disk is package metadata's.
//
// # Threads
//
// An image has one home: the loop of its first queue. Queues on other loops are refused while there is one, and Info says
// SingleLoop. Open, SetBacking, SetDataFile, Close, Map and Stats are control plane and safe for concurrent use; they must
// not be called on a loop. While no queue is open they use a loop of their own. Completions run on the loop's own stack and
// never inside a coroutine, so that coroutines do not nest, also where several images of a chain live on one loop.
//
// # Below
//
// The image file is a node that grows (block.Growable), or a device of a fixed size. What stands behind an image (its
// backing node) is read through a guard of its own and may have any size and alignment; only an image's own file decides
// how requests must be aligned.
//
// # What it does not do
//
// It opens no file: package graph does, by the names that the image has, through a gate. It knows no encryption, and takes
// no snapshots of a disk in use.
package qcow2
