// SPDX-License-Identifier: Apache-2.0

// Package check looks through a whole qcow2 image, counts every reference to every cluster, compares that with the
// refcounts, and repairs what can be repaired.
//
// It works on an image that nobody else uses, over a Store, and keeps nothing open. What it finds is counted as
// `qemu-img check` counts it, so that both say the same of an image; texts of the most usual findings are those that
// scripts look for. It never touches guest data. Not safe for concurrent use on one Store.
//
// # What it costs
//
// Time: each table is read once, however many snapshots share it, and those of the active disk a second time for their
// COPIED flags. Memory: one refcount, as wide as the image's, for each cluster of the file that is in use, in pieces of
// 4 KiB; some forty bytes for each L2 table; the refcount table; and a few clusters. Nothing that an image says makes it
// use more than its length allows.
//
// # What a repair does
//
// Leaks are counted down, too small counts are counted up, where they are. Where the refcount structures themselves are
// not sound, or have no room for a cluster that is in use, new ones are written behind everything else and become
// valid with one small write to the header: a crash leaves the old ones or the new ones. COPIED flags are then made to
// say what the refcounts say. What nobody can know, such as where a misaligned entry should have pointed, stays.
package check

// Store is the file that holds the image.
type Store interface {
	Read(p []byte, off int64) error  // fills p whole; bytes beyond the end of the file are zero
	Write(p []byte, off int64) error // all of p, or an error; grows the file
	Flush() error                    // everything written before is durable
	Size() (int64, error)            // length of the file in bytes
	Truncate(n int64) error
}

// Repair tells what Run may change.
type Repair uint8

const (
	Nothing    Repair = 0
	Leaks      Repair = 1 // refcounts that are too large
	Errors     Repair = 2 // everything else that can be repaired
	Everything        = Leaks | Errors
)

// Options of a check. The zero value looks and changes nothing.
type Options struct {
	Repair Repair
	// Report is told each thing that is found, in the order of finding; nil tells nobody.
	Report func(Finding)
	// Progress is told how many of all tables have been looked at; nil tells nobody.
	Progress func(done, total int64)
}

// Finding is one thing that is not as it should be.
type Finding struct {
	Kind  Kind
	Fixed bool
	Text  string // one line
}

// Kind of a finding.
type Kind uint8

const (
	Corruption Kind = iota // the image is damaged
	Leak                   // a cluster is counted and not used: space is lost, nothing else
	Failure                // something could not be looked at
)

// Result is what was found, by the names that `qemu-img check --output=json` gives to it. Counts are of findings that are
// left; those that were repaired are counted apart.
type Result struct {
	ImageEndOffset     int64 `json:"image-end-offset"` // behind the last cluster in use
	TotalClusters      int64 `json:"total-clusters"`   // of the virtual disk
	AllocatedClusters  int64 `json:"allocated-clusters"`
	FragmentedClusters int64 `json:"fragmented-clusters"`
	CompressedClusters int64 `json:"compressed-clusters"`
	CheckErrors        int64 `json:"check-errors"`
	Corruptions        int64 `json:"corruptions"`
	Leaks              int64 `json:"leaks"`
	CorruptionsFixed   int64 `json:"corruptions-fixed"`
	LeaksFixed         int64 `json:"leaks-fixed"`
}

// Clean tells whether nothing is left to complain about.
func (r *Result) Clean() bool { return r.CheckErrors == 0 && r.Corruptions == 0 && r.Leaks == 0 }
