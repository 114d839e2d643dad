// SPDX-License-Identifier: Apache-2.0

package vhostuser

import (
	"errors"
	"fmt"
	"math"
)

// errRunning refuses what would pull the ground from under a ring. A front-end stops it first, by GET_VRING_BASE or
// SET_VRING_ENABLE; the kernel's vhost answers EBUSY here.
var errRunning = errors.New("the queue is running")

// stateOf reads a vring state description and finds its ring.
func (s *session) stateOf(m *message) (*ring, uint32, error) {
	v, err := ParseVringState(m.body)
	if err != nil {
		return nil, 0, err
	}
	r, err := s.ringOf(v.Index)
	return r, v.Num, err
}

func (s *session) setVringNum(m *message) error {
	r, num, err := s.stateOf(m)
	if err != nil {
		return err
	}
	if err := checkSize(num, s.limit); err != nil {
		return err
	}
	if r.running {
		if r.size == uint16(num) {
			return nil
		}
		return errRunning
	}
	r.unrest()
	r.size = uint16(num)
	return s.start(r)
}

// setVringAddr moves a ring even while it runs, as the kernel's vhost does.
func (s *session) setVringAddr(m *message) error {
	a, err := ParseVringAddr(m.body)
	if err != nil {
		return err
	}
	r, err := s.ringOf(a.Index)
	if err != nil {
		return err
	}
	if err := checkAddr(a); err != nil {
		return err
	}
	if r.running && a == r.addr {
		return nil
	}
	s.stop(r)
	r.unrest()
	r.addr, r.placed = a, true
	return s.start(r)
}

func (s *session) setVringBase(m *message) error {
	r, num, err := s.stateOf(m)
	switch {
	case err != nil:
		return err
	case num > math.MaxUint16:
		return fmt.Errorf("base %#x: a split ring counts in 16 bits: %w", num, ErrMalformed)
	case r.running:
		return errRunning
	}
	if r.kicking == kickParked && uint16(num) == r.base {
		r.kicking = kickRested
	} else {
		r.unrest()
	}
	r.base, r.based = uint16(num), true
	return s.start(r)
}

// getVringBase stops the ring and nothing else. It has no answer that tells of a failure.
func (s *session) getVringBase(m *message) error {
	r, _, err := s.stateOf(m)
	if err != nil {
		return err
	}
	s.stop(r)
	r.park()
	return s.reply(m, VringState{Index: uint32(r.index), Num: uint32(r.base)}.Append(make([]byte, 0, stateSize)))
}

// fileOf reads the payload of SET_VRING_KICK, CALL and ERR, and finds the ring and the descriptor, -1 for none, which
// stays the message's until it is taken.
func (s *session) fileOf(m *message) (*ring, int, error) {
	index, hasFD, err := ParseVringFile(m.body)
	if err != nil {
		return nil, -1, err
	}
	r, err := s.ringOf(uint32(index))
	if err != nil || !hasFD {
		return r, -1, err
	}
	if err := m.want(1); err != nil {
		return nil, -1, err
	}
	return r, m.fds[0], checkNotifier(m.fds[0])
}

func (s *session) setVringKick(m *message) error {
	r, fd, err := s.fileOf(m)
	if err != nil {
		return err
	}
	if fd < 0 {
		return fmt.Errorf("queue %d without a kick descriptor: polling is not offered", r.index)
	}
	s.stop(r)
	r.dropKick()
	r.kick, r.kicking = m.take(0), kickReady
	return s.start(r)
}

func (s *session) setVringCall(m *message) error {
	r, fd, err := s.fileOf(m)
	if err != nil {
		return err
	}
	if r.running {
		if err := s.dev.SetCall(r.index, fd); err != nil {
			return fmt.Errorf("replace call descriptor of queue %d: %w", r.index, err)
		}
	}
	closeFD(&r.call)
	if fd >= 0 {
		r.call = m.take(0)
	}
	return nil
}

// setVringErr restarts a ring that runs: the descriptor is used so rarely that no device swaps it in flight.
func (s *session) setVringErr(m *message) error {
	r, fd, err := s.fileOf(m)
	if err != nil {
		return err
	}
	s.stop(r)
	closeFD(&r.err)
	if fd >= 0 {
		r.err = m.take(0)
	}
	return s.start(r)
}

// setVringEnable is obeyed whether VHOST_USER_F_PROTOCOL_FEATURES is negotiated or not: QEMU 7.2 sends it for block
// devices without acknowledging the bit.
func (s *session) setVringEnable(m *message) error {
	r, num, err := s.stateOf(m)
	if err != nil {
		return err
	}
	switch num {
	case 0:
		s.stop(r)
		r.enable = enableOff
		return nil
	case 1:
		if r.enable == enableOff && r.kicking == kickRested {
			r.kicking = kickReady
		}
		r.enable = enableOn
		return s.start(r)
	}
	return fmt.Errorf("queue %d enabled with %d, want 0 or 1: %w", r.index, num, ErrMalformed)
}
