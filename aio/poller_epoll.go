// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/sluice-blk/sluice/internal/sys"
)

// epollAtOnce is how many events one wait takes. What is beyond is taken by the next one; the kernel goes round, so
// nobody is left out.
const epollAtOnce = 128

// epollPoller waits in epoll, level-triggered. An event names a watch by its place in Loop.watches and the generation of
// that place, so that an event of a watch that was closed meanwhile, whose place may have another user, is known.
type epollPoller struct {
	l       *Loop
	epfd    int
	events  [epollAtOnce]sys.EpollEvent
	coarse  bool // the kernel has no epoll_pwait2: milliseconds
	scratch sys.EpollEvent
}

func newEpollPoller(l *Loop) (poller, error) {
	epfd, err := l.opts.seams.epollCreate()
	if err != nil {
		return nil, fmt.Errorf("make epoll: %w (raise the limit on open files, ulimit -n, if it is EMFILE)", err)
	}
	return &epollPoller{l: l, epfd: epfd}, nil
}

func (p *epollPoller) kind() PollerKind { return PollerEpoll }
func (p *epollPoller) start() error     { return nil }
func (p *epollPoller) submit() error    { return nil }
func (p *epollPoller) look() error      { return p.wait(0) }
func (p *epollPoller) pending() bool    { return false }
func (p *epollPoller) fd() (int, error) { return p.epfd, nil }
func (p *epollPoller) close() error     { return sys.Close(p.epfd) }

func (p *epollPoller) set(w *Watch) error {
	op := sys.EPOLL_CTL_MOD
	switch {
	case w.want == 0:
		// epoll would go on telling errors and hang-ups, again and again.
		p.drop(w)
		return nil
	case w.armed == 0:
		op = sys.EPOLL_CTL_ADD
	}
	p.scratch = sys.EpollEvent{Events: uint32(w.want), Fd: w.index, Pad: int32(w.gen)}
	if err := sys.EpollCtl(p.epfd, op, w.fd, &p.scratch); err != nil {
		return err
	}
	w.armed = w.want
	return nil
}

// drop cannot fail in a way that matters: where the descriptor is closed already, the kernel has forgotten it.
func (p *epollPoller) drop(w *Watch) {
	if w.armed != 0 {
		_ = sys.EpollCtl(p.epfd, sys.EPOLL_CTL_DEL, w.fd, nil)
		w.armed = 0
	}
}

func (p *epollPoller) wait(timeout int64) error {
	p.l.counters.SysCalls++
	n, err := p.pwait(timeout)
	if err != nil {
		if err == syscall.EINTR { // a bare errno: the wrapper promises it
			return nil
		}
		return fmt.Errorf("wait in epoll: %w", err)
	}
	for i := range p.events[:n] {
		ev := &p.events[i]
		if w := p.l.watchAt(ev.Fd, uint32(ev.Pad)); w != nil {
			p.l.found(w, Events(ev.Events))
		}
	}
	return nil
}

func (p *epollPoller) pwait(timeout int64) (int, error) {
	if !p.coarse {
		n, err := p.l.opts.seams.epollPwait2(p.epfd, p.events[:], timeout)
		if !errors.Is(err, syscall.ENOSYS) {
			return n, err
		}
		p.coarse = true
	}
	return sys.EpollPwait(p.epfd, p.events[:], millis(timeout))
}

// millis rounds up, so that a timer is due when the wait for it ends and the loop does not turn in vain meanwhile.
func millis(nsec int64) int {
	if nsec < 0 {
		return -1
	}
	const day = int64(24 * time.Hour)
	return int((min(nsec, day) + int64(time.Millisecond) - 1) / int64(time.Millisecond))
}

// watchAt is the watch at a place of the table, if it is still the one of that generation.
func (l *Loop) watchAt(index int32, gen uint32) *Watch {
	if index < 0 || int(index) >= len(l.watches) {
		return nil
	}
	if w := l.watches[index]; w != nil && w.gen == gen {
		return w
	}
	return nil
}
