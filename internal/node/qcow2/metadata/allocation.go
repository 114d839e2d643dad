// SPDX-License-Identifier: Apache-2.0

package metadata

// Allocation is room for one write, from BeginWrite or BeginCompressed to Link or Abort. It is the caller's, is used again
// as often as he likes, and must not be copied or touched while it is in use. While it is, its guest clusters are its
// own: other writers of them, and Zero and Discard, wait.
type Allocation struct {
	// Offset and Length are the guest bytes that this is for: what was asked for, or the first part of it. They lie in
	// clusters that are contiguous on the host.
	Offset, Length int64
	// Host is where the byte at Offset goes, in the image or in the external data file.
	Host int64
	// InPlace says that nothing was allocated: the caller writes to Host, and Link and Abort do nothing.
	InPlace bool
	// Head and Tail are how many bytes before Offset and behind Offset+Length the caller must fill too, at Host-Head and
	// Host+Length: with what a read of the guest gives there now. Until Link such a read finds the old data. Bytes at or
	// behind the end of the disk are filled with zeros.
	Head, Tail int64
	// Fresh says that the host range, head and tail included, has never been written and lies beyond what the file held:
	// where the filling would be zeros it may be left out.
	Fresh bool

	// what Link does
	m           *Image
	slice       *slice // pinned
	first, last int64  // guest clusters, last included
	clusters    int64  // host clusters taken, 0 when those of the old entries are used
	hostStart   int64  // of the first cluster
	compressed  int    // bytes, 0 for an ordinary write
	next, prev  *Allocation
	inUse       bool
}
