// SPDX-License-Identifier: Apache-2.0

package img

import (
	"fmt"
	"io"
	"sync"
)

// progressStep is how many percent have to be done before they are told again.
const progressStep = 1.0

// Progress tells how far a verb has got, in the form that people and scripts know from qemu-img. A nil *Progress tells
// nothing. Safe for concurrent use.
type Progress struct {
	w io.Writer // nil: only who asks is told

	mu          sync.Mutex
	total, done int64
	told        float64
}

// NewProgress tells on w, beginning with nothing done; without w it tells only who asks. The total may be set later.
func NewProgress(w io.Writer) *Progress {
	p := &Progress{w: w}
	p.tell(0)
	return p
}

// Shown tells whether somebody looks on.
func (p *Progress) Shown() bool { return p != nil && p.w != nil }

// Ask writes how far the verb has got, on a line of its own.
func (p *Progress) Ask(w io.Writer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(w, "    (%3.2f/100%%)\n", p.percent())
}

func (p *Progress) percent() float64 {
	if p.total <= 0 {
		return 0
	}
	return min(100*float64(p.done)/float64(p.total), 100)
}

// Expect says how much there is to do in all.
func (p *Progress) Expect(total int64) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.total = total
}

// Advance says that n more is done.
func (p *Progress) Advance(n int64) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done += n
	percent := p.percent()
	if percent >= p.told+progressStep || percent == 100 && p.told < 100 {
		p.tell(percent)
	}
}

// Done says that all is done.
func (p *Progress) Done() {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tell(100)
}

// End ends the line. It comes after success and after failure.
func (p *Progress) End() {
	if p == nil || p.w == nil {
		return
	}
	io.WriteString(p.w, "\n")
}

func (p *Progress) tell(percent float64) {
	p.told = percent
	if p.w == nil {
		return
	}
	fmt.Fprintf(p.w, "    (%3.2f/100%%)\r", percent)
}
