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
	w io.Writer

	mu          sync.Mutex
	total, done int64
	told        float64
}

// NewProgress tells on w, beginning with nothing done. The total may be set later.
func NewProgress(w io.Writer) *Progress {
	p := &Progress{w: w}
	p.tell(0)
	return p
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
	if p.total <= 0 {
		return
	}
	percent := min(100*float64(p.done)/float64(p.total), 100)
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
	if p == nil {
		return
	}
	io.WriteString(p.w, "\n")
}

func (p *Progress) tell(percent float64) {
	p.told = percent
	fmt.Fprintf(p.w, "    (%3.2f/100%%)\r", percent)
}
