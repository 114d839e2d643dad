// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/xml"
	"fmt"
	"io"
	"strings"
)

// The chart's measures, in its user units (pixels, unless it is scaled).
const (
	chartWidth  = 1080
	chartMargin = 24
	labelWidth  = 330
	panelGap    = 30
	rowHeight   = 24
	barHeight   = 14
	headHeight  = 52
	figureWidth = 66 // right of the longest bar, for its number
)

// chartStyle holds for light and dark surroundings; a viewer that does not know the question shows the light one. The
// colours of the roles are told apart by those who see few colours, too, and each row is named besides.
const chartStyle = `
    .back { fill: #ffffff } text { fill: #1f2328; font: 12px system-ui, "DejaVu Sans", sans-serif }
    .title { font-size: 17px; font-weight: 600 } .head { font-size: 13px; font-weight: 600 } .dim { fill: #59636e; font-size: 11px }
    .ours { fill: #0969da } .peer { fill: #d4730b } .direct { fill: #6e7781 } .other { fill: #8250df }
    .axis { stroke: #d1d9e0 } .whisker { stroke: #1f2328; stroke-width: 1.4; fill: none }
    @media (prefers-color-scheme: dark) {
      .back { fill: #0d1117 } text { fill: #f0f6fc } .dim { fill: #9198a1 }
      .ours { fill: #4493f8 } .peer { fill: #f0883e } .direct { fill: #9198a1 } .other { fill: #ab7df8 }
      .axis { stroke: #3d444d } .whisker { stroke: #f0f6fc }
    }`

// WriteSVG draws the report: a group of bars for each comparison, requests a second on the left and processor time a
// request on the right, each with the median as the bar and the extremes as whiskers.
func (r *Report) WriteSVG(w io.Writer) error {
	d := &drawing{y: chartMargin + 16}
	d.text("title", chartMargin, d.y, r.Title)
	d.y += 12
	if r.Environment != nil {
		for _, line := range r.Environment.Lines() {
			d.y += 16
			d.text("dim", chartMargin, d.y, line)
		}
	}
	d.y += 24
	d.legend(r.Comparisons)
	for _, c := range r.Comparisons {
		d.comparison(c)
	}
	height := d.y + chartMargin
	_, err := fmt.Fprintf(w, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" viewBox="0 0 %d %d" role="img" aria-label="%s">
  <style>%s
  </style>
  <rect class="back" width="100%%" height="100%%"/>
%s</svg>
`, chartWidth, height, chartWidth, height, escape(r.Title), chartStyle, d.b.String())
	return err
}

// drawing collects what is drawn, from top to bottom.
type drawing struct {
	b strings.Builder
	y int
}

func (d *drawing) add(format string, args ...any) { fmt.Fprintf(&d.b, "  "+format+"\n", args...) }

func (d *drawing) text(class string, x, y int, s string) {
	d.add(`<text class="%s" x="%d" y="%d">%s</text>`, class, x, y, escape(s))
}

func escape(s string) string {
	var b strings.Builder
	if xml.EscapeText(&b, []byte(s)) != nil {
		return "" // a strings.Builder takes everything
	}
	return b.String()
}

// legend names the roles that occur.
func (d *drawing) legend(list []*Comparison) {
	x := chartMargin
	for _, role := range []struct {
		Role
		name string
	}{{Ours, "sluice"}, {Peer, "peer"}, {Direct, "fio on the file itself"}, {Other, "others"}} {
		if !occurs(list, role.Role) {
			continue
		}
		d.add(`<rect class="%s" x="%d" y="%d" width="12" height="12" rx="2"/>`, role.Role, x, d.y-10)
		d.text("", x+18, d.y, role.name)
		x += 40 + 8*len(role.name)
	}
	d.text("dim", x, d.y, "bar: median, whisker: smallest and largest of the rounds")
	d.y += 8
}

func occurs(list []*Comparison, role Role) bool {
	for _, c := range list {
		if c.First(role) >= 0 {
			return true
		}
	}
	return false
}

// panel is one of the two columns of bars.
type panel struct {
	measure Measure
	title   string
	x       int
	scale   float64 // units a figure
}

func (p *panel) number(v float64) string {
	if p.measure == IOPS {
		return short(v)
	}
	return number(v)
}

func (d *drawing) comparison(c *Comparison) {
	width := (chartWidth - 2*chartMargin - labelWidth - panelGap) / 2
	panels := []panel{
		{measure: IOPS, title: "requests a second (more is better)", x: chartMargin + labelWidth},
		{measure: CPU, title: "server CPU, us a request (less is better)", x: chartMargin + labelWidth + width + panelGap},
	}
	d.y += headHeight
	d.text("head", chartMargin, d.y-26, fmt.Sprintf("%s (%d rounds)", c.Title, c.Rounds))
	for i := range panels {
		p := &panels[i]
		d.text("dim", p.x, d.y-6, p.title)
		top := 0.0
		for row := range c.Rows {
			top = max(top, c.Figure(row, p.measure).Max)
		}
		if top > 0 {
			p.scale = float64(width-figureWidth) / top
		}
	}
	from := d.y
	for row := range c.Rows {
		if len(c.Rows[row].Runs) == 0 {
			continue
		}
		d.text("", chartMargin, d.y+barHeight+1, c.Rows[row].Subject.Name)
		for i := range panels {
			d.bar(&panels[i], string(c.Rows[row].Subject.Role), c.Figure(row, panels[i].measure))
		}
		d.y += rowHeight
	}
	for _, p := range panels {
		d.add(`<line class="axis" x1="%d" y1="%d" x2="%d" y2="%d"/>`, p.x, from, p.x, d.y)
	}
}

func (d *drawing) bar(p *panel, class string, f Figure) {
	at := func(v float64) float64 { return float64(p.x) + v*p.scale }
	top, middle := d.y+4, d.y+4+barHeight/2
	d.add(`<rect class="%s" x="%d" y="%d" width="%.1f" height="%d" rx="2"/>`, class, p.x, top, f.Median*p.scale, barHeight)
	if f.Max > f.Min {
		d.add(`<path class="whisker" d="M%.1f %dV%dM%.1f %dH%.1fM%.1f %dV%d"/>`, at(f.Min), middle-4, middle+4,
			at(f.Min), middle, at(f.Max), at(f.Max), middle-4, middle+4)
	}
	d.text("", int(at(max(f.Max, f.Median)))+7, d.y+barHeight+1, p.number(f.Median))
}
