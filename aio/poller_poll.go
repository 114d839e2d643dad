// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/sys"
)

// pollPoller waits in ppoll. It is what remains where neither io_uring nor epoll can be had, and needs nothing from the
// kernel that could be refused.
type pollPoller struct {
	l   *Loop
	fds []sys.PollFd // negative Fd: quiet
	ws  []*Watch     // whose each is
}

func newPollPoller(l *Loop) (poller, error) { return &pollPoller{l: l}, nil }

func (p *pollPoller) kind() PollerKind { return PollerPoll }
func (p *pollPoller) start() error     { return nil }
func (p *pollPoller) submit() error    { return nil }
func (p *pollPoller) look() error      { return p.wait(0) }
func (p *pollPoller) pending() bool    { return false }
func (p *pollPoller) close() error     { return nil }

func (p *pollPoller) fd() (int, error) {
	return -1, fmt.Errorf("a descriptor of poller poll: %w (it has none; take epoll or io_uring)", ErrNotSupported)
}

// set keeps a watch's place in w.slot, counted from 1.
func (p *pollPoller) set(w *Watch) error {
	if w.slot == 0 {
		p.fds = append(p.fds, sys.PollFd{})
		p.ws = append(p.ws, w)
		w.slot = uint64(len(p.fds))
	}
	w.want &^= EventEdge // poll(2) knows states only
	e := &p.fds[w.slot-1]
	*e = sys.PollFd{Fd: int32(w.fd), Events: int16(w.want)}
	if w.want == 0 {
		e.Fd = -1
	}
	return nil
}

func (p *pollPoller) drop(w *Watch) {
	last := len(p.fds) - 1
	i := int(w.slot - 1)
	p.fds[i], p.ws[i] = p.fds[last], p.ws[last]
	p.ws[i].slot = w.slot
	p.ws[last] = nil
	p.fds, p.ws = p.fds[:last], p.ws[:last]
	w.slot = 0
}

func (p *pollPoller) wait(timeout int64) error {
	p.l.counters.SysCalls++
	n, err := p.l.opts.seams.ppoll(p.fds, timeout)
	if err != nil {
		if err == syscall.EINTR || err == syscall.EAGAIN { // bare errnos; EAGAIN is a passing lack of memory
			return nil
		}
		return fmt.Errorf("wait in ppoll: %w", err)
	}
	for i := 0; n > 0 && i < len(p.fds); i++ {
		if ev := p.fds[i].Revents; ev != 0 {
			n--
			p.found(i, Events(uint16(ev)))
		}
	}
	return nil
}

func (p *pollPoller) found(i int, ev Events) {
	w := p.ws[i]
	if ev&sys.POLLNVAL != 0 {
		// The owner closed the descriptor before the watch. Say it once; poll would say it for ever.
		p.fds[i].Fd = -1
		w.stopped = true
		ev = always
	}
	p.l.found(w, ev)
}
