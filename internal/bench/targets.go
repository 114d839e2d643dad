// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"strings"
)

// Bound is one thing that must hold of the first row of ours in an experiment.
type Bound struct {
	Measure Measure
	// Against is whom the figure is divided by: the best of a role in this measure, or with [Ours] the second row of ours.
	// Empty: the figure itself is bounded.
	Against Role
	Limit   float64
}

// holds says whether a value is on the good side.
func (b *Bound) holds(v float64) bool {
	if b.Measure.LessIsBetter() {
		return v <= b.Limit
	}
	return v >= b.Limit
}

// String is the bound as one would say it.
func (b Bound) String() string {
	way := "at least"
	if b.Measure.LessIsBetter() {
		way = "at most"
	}
	switch b.Against {
	case "":
		return fmt.Sprintf("%s %s %g", b.Measure, way, b.Limit)
	case Ours:
		return fmt.Sprintf("%s %s %gx that of the row below", b.Measure, way, b.Limit)
	case Direct:
		return fmt.Sprintf("%s %s %gx fio's best", b.Measure, way, b.Limit)
	}
	return fmt.Sprintf("%s %s %gx the peer's best", b.Measure, way, b.Limit)
}

// Target is a row of what must be reached.
type Target struct {
	ID string
	// Setups are the experiments that it is judged by; each must show it.
	Setups []Setup
	Bounds []Bound
	// Any: one of the bounds is enough.
	Any bool
	// Elsewhere says where a target is shown that no experiment here can show.
	Elsewhere string
}

// Measures that no row of a table has, and that targets bound.
const (
	SysCalls  Measure = "system calls a request"
	Mallocs   Measure = "allocations a request"
	IdleCPU   Measure = "percent of a core"
	DiskMiB   Measure = "MiB a disk"
	AttachMsg Measure = "ms of SET_MEM_TABLE"
)

// Targets is what is to be reached on a machine with two processors, client and server together.
var Targets = []Target{
	{ID: "null-64", Setups: []Setup{{Medium: "null", RW: "randread", Depth: 64}},
		Bounds: []Bound{{IOPS, Peer, 2.5}, {CPU, Peer, 0.4}}},
	{ID: "shm-64", Setups: []Setup{{Medium: "shm", RW: "randread", Depth: 64}, {Medium: "shm", RW: "randwrite", Depth: 64}},
		Bounds: []Bound{{IOPS, Peer, 1.5}, {CPU, Peer, 0.65}, {CPU, Direct, 1.3}}},
	{ID: "shm-1", Setups: []Setup{{Medium: "shm", RW: "randread", Depth: 1}, {Medium: "shm", RW: "randwrite", Depth: 1}},
		Bounds: []Bound{{P50, Peer, 0.8}}},
	{ID: "disk-64", Setups: []Setup{{Medium: "disk", RW: "randread", Depth: 64}, {Medium: "disk", RW: "randwrite", Depth: 64}},
		Bounds: []Bound{{IOPS, Peer, 1}, {IOPS, Direct, 0.95}, {CPU, Peer, 0.65}}},
	{ID: "disk-1", Setups: []Setup{{Medium: "disk", RW: "randread", Depth: 1}, {Medium: "disk", RW: "randwrite", Depth: 1}},
		Bounds: []Bound{{P50, Peer, 1}, {CPU, Peer, 0.8}}},
	{ID: "queues-shm", Setups: []Setup{{Medium: "shm", RW: "randread", Depth: 64, Queues: 4}},
		Bounds: []Bound{{IOPS, Peer, 1.5}, {CPU, Peer, 0.65}}},
	{ID: "queues-disk", Setups: []Setup{{Medium: "disk", RW: "randread", Depth: 64, Queues: 4}},
		Bounds: []Bound{{IOPS, Peer, 1}, {CPU, Peer, 0.65}}},
	{ID: "batching", Setups: []Setup{{Medium: "null", RW: "randread", Depth: 64, Batch: true, Alone: true}, {Medium: "disk", RW: "randread", Depth: 64, Batch: true, Alone: true}},
		Bounds: []Bound{{IOPS, Ours, 1.4}, {CPU, Ours, 0.5}}, Any: true},
	{ID: "steady", Setups: []Setup{{Medium: "null", RW: "randread", Depth: 64}, {Medium: "shm", RW: "randread", Depth: 64}, {Medium: "disk", RW: "randread", Depth: 64}},
		Bounds: []Bound{{SysCalls, "", 0.1}}},
	{ID: "mallocs", Bounds: []Bound{{Mallocs, "", 0.001}}},
	{ID: "idle-100", Bounds: []Bound{{IdleCPU, "", 0.2}, {DiskMiB, "", 2}}},
	{ID: "attach-16g", Bounds: []Bound{{AttachMsg, "", 50}}},
	{ID: "guest", Elsewhere: "in a booted guest, with both servers: go test -tags bench -run Series -v ./tests/guest"},
}

// Checks guard against losing what was won. The bounds are wide, so that a noisy machine does not cry wolf. All are of
// processor time: IOPS of a null disk depend on whether driver and server sleep in turns, which the machine decides.
var Checks = []Target{
	{ID: "null-64", Setups: []Setup{{Medium: "null", RW: "randread", Depth: 64}}, Bounds: []Bound{{CPU, Peer, 1}}},
	{ID: "shm-64", Setups: []Setup{{Medium: "shm", RW: "randread", Depth: 64}}, Bounds: []Bound{{CPU, Peer, 0.85}}},
	{ID: "disk-64", Setups: []Setup{{Medium: "disk", RW: "randread", Depth: 64}}, Bounds: []Bound{{CPU, Peer, 1}}},
}

// Outcome is what became of one bound.
type Outcome struct {
	Target  string  `json:"target"`
	Where   string  `json:"where"` // the experiment
	Bound   string  `json:"bound"`
	Limit   float64 `json:"limit"`
	Value   float64 `json:"value"` // a ratio, or the figure itself
	Low     float64 `json:"low"`   // the interval that it lies in; both equal Value where there is none
	High    float64 `json:"high"`
	Figures string  `json:"figures"` // ours and whom it was compared with
	Reached bool    `json:"reached"`
	Sure    bool    `json:"sure"`     // the spread allows the verdict
	OneOf   bool    `json:"one_of"`   // another bound of the target makes up for it
	NotHere string  `json:"not_here"` // why it was not judged
}

// ratioOfBound is false for a bound without a ratio, or without somebody to compare with.
func (c *Comparison) ratioOfBound(b *Bound) (Ratio, bool) {
	first, to := c.First(Ours), c.against(b)
	if first < 0 || to < 0 {
		return Ratio{}, false
	}
	return c.Ratio(first, to, b.Measure), true
}

func (c *Comparison) against(b *Bound) int {
	switch b.Against {
	case "":
		return -1
	case Ours:
		first := c.First(Ours)
		for i := first + 1; i < len(c.Rows); i++ {
			if c.Rows[i].Subject.Role == Ours {
				return i
			}
		}
		return -1
	}
	return c.Best(b.Against, b.Measure)
}

// Judge holds a target against an experiment that was made for it.
func (c *Comparison) Judge(t *Target) (list []Outcome) {
	any := false
	for _, b := range t.Bounds {
		o := c.judge(t, &b)
		any = any || o.Reached
		list = append(list, o)
	}
	for i := range list {
		list[i].OneOf = t.Any && any
	}
	return list
}

func (c *Comparison) judge(t *Target, b *Bound) Outcome {
	o := Outcome{Target: t.ID, Where: c.ID, Bound: b.String(), Limit: b.Limit}
	if b.Against == "" {
		first := c.First(Ours)
		if first < 0 || b.Measure != SysCalls {
			o.NotHere = "not measured"
			return o
		}
		n, source := c.Rows[first].SysCallsPerIO()
		if source == "" {
			o.NotHere = "system calls were not counted"
			return o
		}
		o.Value, o.Low, o.High, o.Sure = n, n, n, true
		o.Figures = fmt.Sprintf("%.3f, counted by the %s", n, source)
		o.Reached = b.holds(n)
		return o
	}
	r, ok := c.ratioOfBound(b)
	if !ok {
		o.NotHere = "nobody to compare with"
		return o
	}
	first, to := c.First(Ours), c.against(b)
	o.Value, o.Low, o.High = r.Median, r.Low, r.High
	o.Figures = fmt.Sprintf("%s against %s (%s)", number(c.Figure(first, b.Measure).Median), number(c.Figure(to, b.Measure).Median), c.Rows[to].Subject.Name)
	o.Reached, o.Sure = b.holds(r.Median), r.Sure(b.Limit)
	return o
}

// JudgeValue holds a bound of a target against a figure that was measured by other means.
func (t *Target) JudgeValue(m Measure, value float64, how string) (Outcome, bool) {
	for _, b := range t.Bounds {
		if b.Measure == m {
			return Outcome{Target: t.ID, Where: how, Bound: b.String(), Limit: b.Limit, Value: value, Low: value, High: value,
				Figures: number(value), Reached: b.holds(value), Sure: true}, true
		}
	}
	return Outcome{}, false
}

// Lost says whether the bound does not hold for sure: a machine with too much noise for a verdict is none.
func (o *Outcome) Lost() bool { return o.NotHere == "" && !o.Reached && o.Sure && !o.OneOf }

// Word is the verdict.
func (o *Outcome) Word() string {
	word := "not reached"
	switch {
	case o.NotHere != "":
		return "not judged: " + o.NotHere
	case o.Reached:
		word = "reached"
	case o.OneOf:
		return "not reached, made up for by the other bound"
	}
	if !o.Sure {
		word += " (the spread allows no verdict)"
	}
	return word
}

// number writes a figure with as many digits as it is worth.
func number(v float64) string {
	switch {
	case v >= 1000:
		return fmt.Sprintf("%.0f", v)
	case v >= 100:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", v), ".0")
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	default:
		return fmt.Sprintf("%.2f", v)
	}
}
