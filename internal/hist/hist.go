// SPDX-License-Identifier: Apache-2.0

// Package hist counts latencies and batch sizes in fixed memory.
//
// [Hist] is for nanoseconds, [Sizes] for how many things came together. Both are plain arrays that belong to one thread;
// adding costs a few nanoseconds and allocates nothing. Who wants them elsewhere copies the whole value on that thread.
// The room knows no clock and prints nothing.
package hist

import (
	"encoding/json"
	"math/bits"
	"strconv"
)

const (
	stepBits = 5
	steps    = 1 << stepBits
	// topBit is where the range ends: 2^36 ns are 68 seconds. What takes longer counts as just that long; Max tells the
	// truth.
	topBit  = 36
	buckets = (topBit - stepBits + 1) * steps
)

// Hist is a log-linear histogram of nanoseconds: 32 steps to each power of two, so that a figure is off by 3 % at most, up
// to 68 seconds. The zero value is empty. It is not safe for concurrent use.
type Hist struct {
	bucket   [buckets]uint64
	n        uint64
	sum      uint64
	min, max uint64
}

// Bucket is one step of a histogram that is not empty: the least value that falls into it, and how many did.
type Bucket struct{ Low, Count uint64 }

// Buckets are steps in order. In JSON they are pairs, [[low,count],...], since there are many of them.
type Buckets []Bucket

// MarshalJSON is made for reports that are asked for often: it allocates once.
func (b Buckets) MarshalJSON() ([]byte, error) {
	const pair = 24 // bytes that most take
	out := append(make([]byte, 0, 2+pair*len(b)), '[')
	for i := range b {
		if i > 0 {
			out = append(out, ',')
		}
		out = strconv.AppendUint(append(out, '['), b[i].Low, 10)
		out = strconv.AppendUint(append(out, ','), b[i].Count, 10)
		out = append(out, ']')
	}
	return append(out, ']'), nil
}

// UnmarshalJSON reads what MarshalJSON wrote.
func (b *Buckets) UnmarshalJSON(p []byte) error {
	var pairs [][2]uint64
	if err := json.Unmarshal(p, &pairs); err != nil {
		return err
	}
	*b = make(Buckets, len(pairs))
	for i := range pairs {
		(*b)[i] = Bucket{pairs[i][0], pairs[i][1]}
	}
	return nil
}

// Restore makes the histogram that Buckets, Sum, Min and Max were taken from.
func Restore(buckets Buckets, sum, minimum, maximum uint64) Hist {
	h := Hist{sum: sum, min: minimum, max: maximum}
	for _, b := range buckets {
		h.bucket[index(b.Low)] += b.Count
		h.n += b.Count
	}
	return h
}

func index(v uint64) int {
	if v < steps {
		return int(v)
	}
	if v >= 1<<topBit {
		return buckets - 1
	}
	e := bits.Len64(v) - 1 - stepBits
	return (e+1)*steps + int(v>>e)&(steps-1)
}

// low and width are the range of bucket i.
func low(i int) uint64 {
	if i < steps {
		return uint64(i)
	}
	return uint64(steps+i%steps) << (i/steps - 1)
}

func width(i int) uint64 {
	if i < steps {
		return 1
	}
	return 1 << (i/steps - 1)
}

// Add counts one value.
func (h *Hist) Add(v uint64) { h.AddN(v, 1) }

// AddN counts n times the same value, at the price of one.
func (h *Hist) AddN(v, n uint64) {
	h.bucket[index(v)] += n
	if h.n == 0 || v < h.min {
		h.min = v
	}
	h.n += n
	h.sum += v * n
	if v > h.max {
		h.max = v
	}
}

// Merge adds what o counted.
func (h *Hist) Merge(o *Hist) {
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

// Since is what was counted after old was copied from the same histogram. The extremes of that time are not known: they
// are the bounds of the outermost buckets.
func (h *Hist) Since(old *Hist) Hist {
	d := Hist{n: h.n - old.n, sum: h.sum - old.sum}
	first := true
	for i := range h.bucket {
		n := h.bucket[i] - old.bucket[i]
		if n == 0 {
			continue
		}
		d.bucket[i] = n
		if first {
			d.min, first = max(low(i), h.min), false
		}
		d.max = min(low(i)+width(i)-1, h.max)
		if i == buckets-1 {
			d.max = h.max
		}
	}
	return d
}

// Count is how many values there are.
func (h *Hist) Count() uint64 { return h.n }

// Sum is what all values add up to.
func (h *Hist) Sum() uint64 { return h.sum }

// Min is the least value, 0 when there is none.
func (h *Hist) Min() uint64 { return h.min }

// Max is the greatest value, 0 when there is none.
func (h *Hist) Max() uint64 { return h.max }

// Mean is the average, 0 when there is none.
func (h *Hist) Mean() uint64 {
	if h.n == 0 {
		return 0
	}
	return h.sum / h.n
}

// Percentile answers the value below which p percent lie, 0 when there is none.
func (h *Hist) Percentile(p float64) uint64 {
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
			return max(min(low(i)+width(i)/2, h.max), h.min)
		}
	}
	return h.max
}

// Buckets appends the steps that are not empty to into, the least first.
func (h *Hist) Buckets(into Buckets) Buckets {
	for i, n := range h.bucket {
		if n > 0 {
			into = append(into, Bucket{low(i), n})
		}
	}
	return into
}
