// SPDX-License-Identifier: Apache-2.0

// Package sparse holds what the codecs of disk images that are only read have in common: the words for where the bytes of
// a disk lie in its file, a table of equal blocks, and the two ways in which an image is refused.
//
// It does no I/O. Values are safe for concurrent use once they are built.
//
// # Bounds
//
// A Table has room only for the blocks that its image's own table tells something about: 8 bytes for an entry of 4 or 8
// bytes that stands in the file, in pages, and pages that say nothing are not kept. The codecs read a table only where it
// lies inside the file, so a Table takes at most a little more than twice the size of the file, whatever the image claims.
package sparse
