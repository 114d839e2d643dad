// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"math/rand/v2"
	"testing"
)

func TestFigures(t *testing.T) {
	if f := figureOf([]float64{3, 1}); f != (Figure{2, 1, 3, 2}) || f.Spread() != 100 {
		t.Errorf("got %+v with a spread of %v", f, f.Spread())
	}
	if f := figureOf(nil); f != (Figure{}) || f.Spread() != 0 {
		t.Errorf("figures of no runs: %+v", f)
	}
}

// Goal: the interval of a ratio holds the true median as often as it says. Method: many draws from a lopsided
// distribution whose median is known.
func TestIntervalHoldsTheMedian(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	for _, n := range []int{5, 6, 8, 11, 15, 25} {
		const trials = 4000
		held := 0
		for range trials {
			a, b := make([]float64, n), make([]float64, n)
			for i := range a {
				u := random.Float64()
				a[i], b[i] = 2*(0.5+u*u*u*4)/(0.5+0.125*4), 1 // the median of u³ is 1/8
			}
			r := ratioOf(a, b)
			if r.Low <= 2 && 2 <= r.High {
				held++
			}
		}
		if share := float64(held) / trials; share < confidence-0.02 {
			t.Errorf("%d values: the interval holds the median in %.3f of all cases", n, share)
		}
	}
	for n, want := range map[int]int{0: 0, 1: 0, 4: 0, 5: 0, 7: 0, 8: 1, 11: 2, 13: 3} {
		if got := orderOfInterval(n); got != want {
			t.Errorf("of %d values %d are left out at either end, want %d", n, got, want)
		}
	}
}

func TestVerdicts(t *testing.T) {
	for _, c := range []struct {
		a    []float64
		want string
	}{
		{nil, "not measured"},
		{[]float64{2, 2, 2, 2}, "too few rounds for a verdict"},
		{[]float64{2, 2, 2, 1.1, 2}, "higher"},
		{[]float64{0.5, 0.9, 0.5, 0.5, 0.5}, "lower"},
		{[]float64{0.99, 1.01, 1, 1.02, 0.98}, "alike"},
		{[]float64{0.9, 1.2, 1, 1.02, 0.98}, "undecided"},
	} {
		ones := []float64{1, 1, 1, 1, 1}
		r := ratioOf(c.a, ones)
		if got := r.Verdict(); got != c.want || r.decided() != (c.want == "higher" || c.want == "lower" || c.want == "alike") {
			t.Errorf("%v: %q, want %q", c.a, got, c.want)
		}
	}
	if r := ratioOf([]float64{1, 2}, []float64{0, 1}); r.N != 1 || r.Median != 2 {
		t.Errorf("a round without a figure counts: %+v", r)
	}
}
