// SPDX-License-Identifier: Apache-2.0

package hist

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Goal: percentiles within 3 %. Method: random values, sorted, beside it; whole, merged from halves, and as a difference.
func TestPercentilesAreOffByThreePercentAtMost(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, scale := range []uint64{20, 1000, 1e6, 1e9, 6e10} {
		var whole, first, second Hist
		var values []uint64
		for i := range 20000 {
			v := rnd.Uint64N(scale)
			values = append(values, v)
			whole.Add(v)
			if i < 7000 {
				first.Add(v)
			} else {
				second.Add(v)
			}
		}
		late := values[7000:]
		since := whole.Since(&first)
		merged := first
		merged.Merge(&second)
		if merged != whole {
			t.Fatalf("scale %d: two halves merged are not the whole", scale)
		}
		check := func(name string, h *Hist, values []uint64) {
			slices.Sort(values)
			for _, p := range []float64{0, 1, 50, 90, 99, 99.9, 100} {
				at := min(int(p/100*float64(len(values))), len(values)-1)
				got, want := h.Percentile(p), values[at]
				if diff := max(got, want) - min(got, want); float64(diff) > 0.032*float64(want)+1 {
					t.Errorf("%s, scale %d: percentile %v is %d, want %d", name, scale, p, got, want)
				}
			}
			if h.Count() != uint64(len(values)) {
				t.Errorf("%s, scale %d: %d values, want %d", name, scale, h.Count(), len(values))
			}
		}
		sent, err := json.Marshal(whole.Buckets(nil))
		if err != nil {
			t.Fatal(err)
		}
		var got Buckets
		if err := json.Unmarshal(sent, &got); err != nil {
			t.Fatal(err)
		}
		if Restore(got, whole.Sum(), whole.Min(), whole.Max()) != whole {
			t.Errorf("scale %d: what was sent is not what arrived", scale)
		}
		check("since", &since, slices.Clone(late))
		check("whole", &whole, values)
		if whole.Min() != values[0] || whole.Max() != values[len(values)-1] {
			t.Errorf("scale %d: from %d to %d, want %d to %d", scale, whole.Min(), whole.Max(), values[0], values[len(values)-1])
		}
	}
}

func TestEveryValueFallsIntoItsBucket(t *testing.T) {
	for shift := range topBit {
		for _, v := range []uint64{1<<shift - 1, 1 << shift, 1<<shift + 1} {
			if i := index(v); v < low(i) || v >= low(i)+width(i) {
				t.Errorf("%d falls into the bucket from %d, which is %d wide", v, low(i), width(i))
			}
		}
	}
	var h Hist
	h.Add(1 << 50)
	h.AddN(1<<63, 2)
	if h.Percentile(99) > h.Max() || h.Max() != 1<<63 || h.Count() != 3 || h.Buckets(nil)[0].Count != 3 {
		t.Errorf("values beyond the range: %d of them, largest %d, %v", h.Count(), h.Max(), h.Buckets(nil))
	}
}

func TestAnEmptyHistogramAnswersNothing(t *testing.T) {
	var h, other Hist
	h.Merge(&other)
	if h.Percentile(50) != 0 || h.Mean() != 0 || h.Min() != 0 || h.Max() != 0 || len(h.Buckets(nil)) != 0 {
		t.Error("an empty histogram has figures")
	}
	h.AddN(7, 3)
	if h.Mean() != 7 || h.Sum() != 21 || h.Min() != 7 || h.Percentile(50) != 7 {
		t.Error("three sevens are not three sevens")
	}
	if d := h.Since(&h); d != (Hist{}) {
		t.Error("nothing since itself is something")
	}
}

func TestSizesAreCountedInPowersOfTwo(t *testing.T) {
	var s, half Sizes
	for _, n := range []uint64{0, 1, 1, 2, 3, 4, 5, 8, 9, 64, 65} {
		s.Add(n)
		if n < 4 {
			half.Add(n)
		}
	}
	want := Buckets{{1, 2}, {2, 1}, {3, 2}, {5, 2}, {9, 1}, {33, 1}, {65, 1}}
	if d := cmp.Diff(want, s.Buckets(nil)); d != "" {
		t.Errorf("buckets (-want +got):\n%s", d)
	}
	if s.Count() != 10 || s.Sum() != 162 || s.Mean() != 16.2 {
		t.Errorf("%d batches of %d together, mean %v", s.Count(), s.Sum(), s.Mean())
	}
	since := s.Since(&half)
	half.Merge(&since)
	if half != s {
		t.Error("a part and the rest are not the whole")
	}
	s.Add(1 << 40)
	if b := s.Buckets(nil); b[len(b)-1] != (Bucket{32769, 1}) {
		t.Errorf("a huge batch counts as %v", b[len(b)-1])
	}
}

func BenchmarkAdd(b *testing.B) {
	var h Hist
	b.ReportAllocs()
	for i := range b.N {
		h.AddN(uint64(i)&0xfffff, 3)
	}
}
