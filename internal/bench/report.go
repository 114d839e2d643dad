// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// Report is a set of comparisons with where they took place.
type Report struct {
	Title       string
	Environment *Environment
	Comparisons []*Comparison
	Outcomes    []Outcome // of targets, if some were judged
	Notes       []string  // what was left out, and why
}

// Formats that [Report.Write] knows.
var Formats = []string{"text", "markdown", "json"}

// Write prints the report in one of [Formats].
func (r *Report) Write(w io.Writer, format string) error {
	switch format {
	case "text":
		return r.write(w, textStyle)
	case "markdown":
		return r.write(w, markdownStyle)
	case "json":
		return r.writeJSON(w)
	}
	return fmt.Errorf("unknown format %q (want %s)", format, strings.Join(Formats, ", "))
}

// style is how headings, lists and tables look.
type style struct {
	heading func(level int, s string) string
	item    string
	table   func(rows [][]string) string
}

var (
	textStyle = style{
		heading: func(level int, s string) string {
			rule := "="
			if level > 1 {
				rule = "-"
			}
			return s + "\n" + strings.Repeat(rule, utf8.RuneCountInString(s)) + "\n"
		},
		item:  "  ",
		table: func(rows [][]string) string { return align(rows, "", "  ", "") },
	}
	markdownStyle = style{
		heading: func(level int, s string) string { return strings.Repeat("#", level+1) + " " + s + "\n" },
		item:    "- ",
		table: func(rows [][]string) string {
			rule := make([]string, len(rows[0]))
			for i := range rule {
				rule[i] = "---"
			}
			return align(append([][]string{rows[0], rule}, rows[1:]...), "| ", " | ", " |")
		},
	}
)

// align pads the cells of each column to one width.
func align(rows [][]string, left, between, right string) string {
	width := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			width[i] = max(width[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	for _, row := range rows {
		line := left
		for i, cell := range row {
			if i > 0 {
				line += between
			}
			line += cell + strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell))
		}
		b.WriteString(strings.TrimRight(line+right, " ") + "\n")
	}
	return b.String()
}

func (r *Report) write(w io.Writer, s style) error {
	var b strings.Builder
	b.WriteString(s.heading(1, r.Title) + "\n")
	if r.Environment != nil {
		for _, line := range r.Environment.Lines() {
			b.WriteString(s.item + line + "\n")
		}
		b.WriteString("\n")
	}
	for _, c := range r.Comparisons {
		b.WriteString(s.heading(2, c.Title) + "\n")
		b.WriteString(s.table(c.table()) + "\n")
		for _, line := range c.verdicts() {
			b.WriteString(s.item + line + "\n")
		}
		b.WriteString("\n")
	}
	if len(r.Outcomes) > 0 {
		b.WriteString(s.heading(2, "Targets") + "\n" + s.table(outcomeTable(r.Outcomes)) + "\n")
	}
	for _, line := range r.Notes {
		b.WriteString(s.item + line + "\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// table is the comparison with one row a subject.
func (c *Comparison) table() [][]string {
	rows := [][]string{{"server", "IOPS", "spread", "ratio", "CPU us/req", "spread", "ratio", "p50 us", "p99", "p99.9",
		"syscalls/req", "req/submission", "req/kick", "req/call", "limited by"}}
	for i := range c.Rows {
		row := &c.Rows[i]
		if len(row.Runs) == 0 {
			continue
		}
		iops, cpu := c.Figure(i, IOPS), c.Figure(i, CPU)
		rows = append(rows, []string{
			row.Subject.Name, number(iops.Median), percent(iops.Spread()), c.ratioText(i, IOPS),
			number(cpu.Median), percent(cpu.Spread()), c.ratioText(i, CPU),
			number(c.Figure(i, P50).Median), number(c.Figure(i, P99).Median), number(c.Figure(i, P999).Median),
			sysCallText(row),
			perText(row, func(r *Result) float64 { return serverRatio(r, (*ServerCounters).PerSubmission) }),
			perText(row, func(r *Result) float64 { return ratio(r.IOs(), r.Kicks) }),
			perText(row, func(r *Result) float64 { return ratio(r.IOs(), r.Calls) }),
			row.limits().Cause(),
		})
	}
	return rows
}

func serverRatio(r *Result, of func(*ServerCounters) float64) float64 {
	if r.Server == nil {
		return 0
	}
	return of(r.Server)
}

func percent(v float64) string { return fmt.Sprintf("%.0f %%", v) }

func perText(r *Row, of func(*Result) float64) string {
	v, ok := r.per(of)
	if !ok {
		return "-"
	}
	return number(v)
}

// sysCallText marks a count of our own, which is of the loop alone.
func sysCallText(r *Row) string {
	n, source := r.SysCallsPerIO()
	switch source {
	case "kernel":
		return fmt.Sprintf("%.3f", n)
	case "server":
		return fmt.Sprintf("%.3f (own count)", n)
	}
	return "-"
}

func (c *Comparison) ratioText(row int, m Measure) string {
	r := c.Ratio(row, c.reference(m), m)
	if r.N == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", r.Median)
}

// verdicts are the sentences below a table.
func (c *Comparison) verdicts() (lines []string) {
	first := c.First(Ours)
	for _, against := range []struct {
		role Role
		name string
		of   []Measure
	}{{Peer, "the peer's best", []Measure{IOPS, CPU, P50}}, {Direct, "fio's best", []Measure{IOPS, CPU}}} {
		for _, m := range against.of {
			best := c.Best(against.role, m)
			if first < 0 || best < 0 {
				continue
			}
			r := c.Ratio(first, best, m)
			lines = append(lines, fmt.Sprintf("%s of %s: %.2f of %s, %s (%.2f to %.2f in %d rounds): %s",
				m, c.Rows[first].Subject.Name, r.Median, against.name, c.Rows[best].Subject.Name, r.Low, r.High, r.N, r.Verdict()))
		}
	}
	for i := range c.Rows {
		if why := c.Rows[i].Dropped; why != "" {
			lines = append(lines, fmt.Sprintf("%s: not measured further, %s", c.Rows[i].Subject.Name, why))
		}
	}
	for i := range c.Rows {
		killed := 0
		for _, r := range c.Rows[i].Runs {
			if r.Killed {
				killed++
			}
		}
		if killed > 0 {
			lines = append(lines, fmt.Sprintf("%s: did not end at SIGTERM in %d of %d rounds, and was killed", c.Rows[i].Subject.Name, killed, len(c.Rows[i].Runs)))
		}
	}
	return lines
}

func outcomeTable(list []Outcome) [][]string {
	rows := [][]string{{"target", "where", "bound", "measured", "interval", "figures", "verdict"}}
	for i := range list {
		o := &list[i]
		value, interval := number(o.Value), fmt.Sprintf("%s to %s", number(o.Low), number(o.High))
		if o.NotHere != "" {
			value = "-"
		}
		if o.Low == o.High {
			interval = "-"
		}
		rows = append(rows, []string{o.Target, o.Where, o.Bound, value, interval, o.Figures, o.Word()})
	}
	return rows
}

// Record is a report as data.
type Record struct {
	Title       string             `json:"title"`
	Environment *Environment       `json:"environment"`
	Experiments []ExperimentRecord `json:"experiments"`
	Targets     []Outcome          `json:"targets,omitempty"`
	Notes       []string           `json:"notes,omitempty"`
}

// ExperimentRecord is one table as data.
type ExperimentRecord struct {
	ID       string      `json:"id"`
	Title    string      `json:"title"`
	Medium   Medium      `json:"medium"`
	Workload string      `json:"workload"`
	Runtime  float64     `json:"runtime_s"`
	Rounds   int         `json:"rounds"`
	Rows     []RowRecord `json:"rows"`
	Verdicts []string    `json:"verdicts"`
}

// RowRecord is one row as data. Runs are the figures of each round, in their order.
type RowRecord struct {
	Subject
	Dropped    string                `json:"dropped,omitempty"`
	Figures    map[Measure]Figure    `json:"figures"`
	Runs       map[Measure][]float64 `json:"runs"`
	Ratios     map[Measure]Ratio     `json:"ratios"` // to the peer's best
	SysCalls   float64               `json:"syscalls_per_request"`
	SysCallsBy string                `json:"syscalls_counted_by,omitempty"`
	Submission float64               `json:"requests_per_submission,omitempty"`
	Kick       float64               `json:"requests_per_kick,omitempty"`
	Call       float64               `json:"requests_per_call,omitempty"`
	Limits     *Limits               `json:"limits,omitempty"`
	LimitedBy  string                `json:"limited_by,omitempty"`
}

var measures = []Measure{IOPS, CPU, P50, P99, P999}

// Record is the report as data.
func (r *Report) Record() *Record {
	out := &Record{Title: r.Title, Environment: r.Environment, Targets: r.Outcomes, Notes: r.Notes}
	for _, c := range r.Comparisons {
		x := ExperimentRecord{ID: c.ID, Title: c.Title, Medium: c.Medium, Workload: c.Workload.String(),
			Runtime: c.Workload.Runtime.Seconds(), Rounds: c.Rounds, Verdicts: c.verdicts()}
		for i := range c.Rows {
			x.Rows = append(x.Rows, c.rowRecord(i))
		}
		out.Experiments = append(out.Experiments, x)
	}
	return out
}

func (c *Comparison) rowRecord(i int) RowRecord {
	row := &c.Rows[i]
	x := RowRecord{Subject: row.Subject, Dropped: row.Dropped, Figures: map[Measure]Figure{}, Runs: map[Measure][]float64{}, Ratios: map[Measure]Ratio{}}
	for _, m := range measures {
		if len(row.Runs) == 0 {
			continue
		}
		x.Figures[m], x.Runs[m] = c.Figure(i, m), c.values(i, m)
		if best := c.Best(Peer, m); best >= 0 {
			x.Ratios[m] = c.Ratio(i, best, m)
		}
	}
	x.SysCalls, x.SysCallsBy = row.SysCallsPerIO()
	x.Submission, _ = row.per(func(r *Result) float64 { return serverRatio(r, (*ServerCounters).PerSubmission) })
	x.Kick, _ = row.per(func(r *Result) float64 { return ratio(r.IOs(), r.Kicks) })
	x.Call, _ = row.per(func(r *Result) float64 { return ratio(r.IOs(), r.Calls) })
	if x.Limits = row.limits(); x.Limits != nil {
		x.LimitedBy = x.Limits.Cause()
	}
	return x
}

func (r *Report) writeJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r.Record())
}
