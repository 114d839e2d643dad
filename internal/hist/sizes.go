// SPDX-License-Identifier: Apache-2.0

package hist

import "math/bits"

// sizeBuckets are 1, 2, 3-4, 5-8 and so on; the last takes all above 32768, more than any queue holds.
const sizeBuckets = 17

// Sizes is a histogram of how many things came together, in powers of two. The zero value is empty. It is not safe for
// concurrent use.
type Sizes struct {
	bucket [sizeBuckets]uint64
	n      uint64
	sum    uint64
}

// Add counts a batch of size things; a batch of none is no batch.
func (s *Sizes) Add(size uint64) {
	if size == 0 {
		return
	}
	s.bucket[min(bits.Len64(size-1), sizeBuckets-1)]++
	s.n++
	s.sum += size
}

// Merge adds what o counted.
func (s *Sizes) Merge(o *Sizes) {
	s.n += o.n
	s.sum += o.sum
	for i := range s.bucket {
		s.bucket[i] += o.bucket[i]
	}
}

// Since is what was counted after old was copied from the same histogram.
func (s *Sizes) Since(old *Sizes) Sizes {
	d := Sizes{n: s.n - old.n, sum: s.sum - old.sum}
	for i := range s.bucket {
		d.bucket[i] = s.bucket[i] - old.bucket[i]
	}
	return d
}

// Count is how many batches there were.
func (s *Sizes) Count() uint64 { return s.n }

// Sum is how many things were in all of them.
func (s *Sizes) Sum() uint64 { return s.sum }

// Mean is the average size, 0 without any.
func (s *Sizes) Mean() float64 {
	if s.n == 0 {
		return 0
	}
	return float64(s.sum) / float64(s.n)
}

// Buckets appends the sizes that occurred to into, the least first: Low is the least size of each step.
func (s *Sizes) Buckets(into Buckets) Buckets {
	for i, n := range s.bucket {
		if n > 0 {
			into = append(into, Bucket{lowSize(i), n})
		}
	}
	return into
}

func lowSize(i int) uint64 {
	if i == 0 {
		return 1
	}
	return 1<<(i-1) + 1
}
