// SPDX-License-Identifier: Apache-2.0

// Package create writes new qcow2 images.
//
// It lays an image out, header, refcount table and blocks, L1 table, L2 tables and data, each as large as the geometry
// demands, and writes it front to back over a Store; the header comes last, after everything else is durable, so that an
// image which was not finished is no image. It keeps no state, probes nothing, and opens neither a backing file nor a
// data file: names are written as they are given. Not safe for concurrent use on one Store.
package create

// Store is the file that the image is written to. All of it is overwritten.
type Store interface {
	Write(p []byte, off int64) error // all of p, or an error; grows the file
	Zero(off, n int64) error         // reads as zeros afterwards
	Flush() error                    // everything written before is durable
	Truncate(n int64) error
}

// Allocator is what a Store may be able to do besides: give [off, off+n) blocks that no later write has to find, without
// writing them. They read as zeros. Preallocation by Falloc needs it.
type Allocator interface {
	Allocate(off, n int64) error
}
