// SPDX-License-Identifier: Apache-2.0

package bench

import "math/bits"

// hist is a log-linear histogram of nanoseconds: 32 steps to each power of two, so that a figure is off by 3 % at most.
// It belongs to one thread; add costs a few nanoseconds and allocates nothing.
type hist struct {
	bucket   [64 * histSteps]uint64
	n        uint64
	sum      uint64
	min, max uint64
}

const (
	histBits  = 5
	histSteps = 1 << histBits
)

func histIndex(v uint64) int {
	if v < histSteps {
		return int(v)
	}
	e := bits.Len64(v) - 1 - histBits
	return (e+1)*histSteps + int(v>>e)&(histSteps-1)
}

// histValue is the middle of a bucket.
func histValue(i int) uint64 {
	if i < histSteps {
		return uint64(i)
	}
	e := i/histSteps - 1
	low := uint64(histSteps+i%histSteps) << e
	return low + (1<<e)/2
}

func (h *hist) add(v uint64) {
	h.bucket[histIndex(v)]++
	h.n++
	h.sum += v
	if v > h.max {
		h.max = v
	}
	if h.n == 1 || v < h.min {
		h.min = v
	}
}

func (h *hist) merge(o *hist) {
	if o.n == 0 {
		return
	}
	if h.n == 0 || o.min < h.min {
		h.min = o.min
	}
	h.max = max(h.max, o.max)
	h.n += o.n
	h.sum += o.sum
	for i := range h.bucket {
		h.bucket[i] += o.bucket[i]
	}
}

// percentile answers the value below which p percent lie.
func (h *hist) percentile(p float64) uint64 {
	if h.n == 0 {
		return 0
	}
	want := uint64(p / 100 * float64(h.n))
	if want >= h.n {
		return h.max
	}
	var seen uint64
	for i := range h.bucket {
		if seen += h.bucket[i]; seen > want {
			return min(histValue(i), h.max)
		}
	}
	return h.max
}
