// SPDX-License-Identifier: Apache-2.0

package img

import "context"

// CompareRequest is what a person asks of compare.
type CompareRequest struct {
	Sources  [2]Source // read-only
	Cache    Cache
	Strict   bool
	Say      func(text string)
	Progress *Progress
}

// Run opens both images and compares them; see [Compare.Run] for what it answers.
func (r *CompareRequest) Run(ctx context.Context) (outcome int, err error) {
	loops, err := StartLoops(len(r.Sources))
	if err != nil {
		return CompareOpenFailed, err
	}
	defer loops.Stop()
	var disks [2]*Disk
	defer func() { err = closeAll(err, disks[:]...) }()
	for i, src := range r.Sources {
		if disks[i], err = OpenDisk(ctx, loops.At(i), src, DiskOptions{Cache: r.Cache}); err != nil {
			return CompareOpenFailed, err
		}
	}
	c := &Compare{A: disks[0], B: disks[1], Strict: r.Strict, Say: r.Say, Progress: r.Progress}
	return c.Run(ctx)
}
