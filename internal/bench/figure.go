// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"slices"
)

// Figure is the median of some runs and the spread around it.
type Figure struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	N      int     `json:"n"`
}

// figureOf sums up values; it changes their order.
func figureOf(v []float64) Figure {
	if len(v) == 0 {
		return Figure{}
	}
	slices.Sort(v)
	return Figure{medianOf(v), v[0], v[len(v)-1], len(v)}
}

// medianOf expects them sorted.
func medianOf(v []float64) float64 {
	m := v[len(v)/2]
	if len(v)%2 == 0 {
		m = (v[len(v)/2-1] + m) / 2
	}
	return m
}

// Spread is the distance of the extremes in percent of the median.
func (f Figure) Spread() float64 {
	if f.Median == 0 {
		return 0
	}
	return (f.Max - f.Min) / f.Median * 100
}

// Measure is one thing that a run gives a figure for.
type Measure string

// The measures.
const (
	IOPS Measure = "iops"
	CPU  Measure = "cpu" // microseconds of the server a request
	P50  Measure = "p50" // microseconds
	P99  Measure = "p99"
	P999 Measure = "p99.9"
)

// LessIsBetter says in which direction the measure is good.
func (m Measure) LessIsBetter() bool { return m != IOPS }

// of is what one run gave.
func (m Measure) of(r *Result) float64 {
	switch m {
	case CPU:
		return r.ServerCPUPerIO()
	case P50:
		return us(r.Main().P50)
	case P99:
		return us(r.Main().P99)
	case P999:
		return us(r.Main().P999)
	}
	return r.IOPS()
}

// Ratio is the relation of two subjects in one measure: the median over rounds of the quotient within a round, so that
// what the machine did besides falls on both, and the interval in which the true median lies.
type Ratio struct {
	Median float64 `json:"median"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
	N      int     `json:"n"`
}

// confidence is how often the interval of a Ratio is to hold the true median.
const confidence = 0.9

// ratioOf pairs the rounds of a and b. A round without a figure for b says nothing.
func ratioOf(a, b []float64) Ratio {
	var q []float64
	for i := range min(len(a), len(b)) {
		if b[i] > 0 {
			q = append(q, a[i]/b[i])
		}
	}
	if len(q) == 0 {
		return Ratio{}
	}
	slices.Sort(q)
	k := orderOfInterval(len(q))
	return Ratio{medianOf(q), q[k], q[len(q)-1-k], len(q)}
}

// orderOfInterval is how many values may be left out at either end so that what remains still holds the median with
// [confidence]: how many of n values lie below it is a binomial count, whatever the distribution. With fewer than five
// values not even the extremes are sure enough; they are what there is.
func orderOfInterval(n int) int {
	below, term := 0.0, 1.0 // the sum of the binomial coefficients so far, and the next
	total := 1.0
	for range n {
		total *= 2
	}
	k := 0
	for i := 0; i < n/2; i++ {
		below += term
		if 1-2*below/total < confidence {
			break
		}
		k = i
		term = term * float64(n-i) / float64(i+1)
	}
	return k
}

// MinRounds is how many rounds a verdict needs: with fewer, the extremes hold the median less often than [confidence].
const MinRounds = 5

// Sure says whether the interval lies on one side of bound: then more rounds would change nothing.
func (r Ratio) Sure(bound float64) bool {
	return r.N >= MinRounds && (r.Low >= bound || r.High <= bound)
}

// same is how near to each other two subjects may be and count as alike.
const same = 0.03

// Verdict tells in a word how the first stands to the second.
func (r Ratio) Verdict() string {
	switch {
	case r.N == 0:
		return "not measured"
	case r.N < MinRounds:
		return "too few rounds for a verdict"
	case r.Low > 1-same && r.High < 1+same:
		return "alike"
	case r.Low > 1:
		return "higher"
	case r.High < 1:
		return "lower"
	}
	return "undecided"
}

// decided says whether more rounds could change the verdict.
func (r Ratio) decided() bool {
	v := r.Verdict()
	return v == "alike" || v == "higher" || v == "lower"
}

// MarshalJSON adds the spread.
func (f Figure) MarshalJSON() ([]byte, error) {
	type plain Figure
	return json.Marshal(struct {
		plain
		Spread float64 `json:"spread_percent"`
	}{plain(f), f.Spread()})
}
