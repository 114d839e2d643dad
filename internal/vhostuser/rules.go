// SPDX-License-Identifier: Apache-2.0

package vhostuser

import (
	"errors"
	"fmt"

	"github.com/sluice-blk/sluice/internal/guestmem"
)

// replyKind tells whether a message is answered by its own reply, which rules out an acknowledgement.
type replyKind uint8

const (
	replyAck replyKind = iota
	replyOwn
)

// rule is how one message is obeyed.
type rule struct {
	do     func(s *session, m *message) error // nil: not offered. An error of a replyOwn message ends the session
	needs  uint64                             // protocol features
	reply  replyKind
	refuse func(s *session, m *message) error // answers when needs were not negotiated; nil: an error does
}

// rules has every message that is known. What is not in it, and what has no do, is refused. Those with replyOwn and no
// do make the front-end wait for more than an acknowledgement could say, so that only the end of the session tells it.
var rules = map[Request]*rule{
	GetFeatures:         {do: (*session).getFeatures, reply: replyOwn},
	SetFeatures:         {do: (*session).setFeatures},
	SetOwner:            {do: func(*session, *message) error { return nil }},
	ResetOwner:          {do: (*session).resetOwner},
	SetMemTable:         {do: (*session).setMemTable},
	SetVringNum:         {do: (*session).setVringNum},
	SetVringAddr:        {do: (*session).setVringAddr},
	SetVringBase:        {do: (*session).setVringBase},
	GetVringBase:        {do: (*session).getVringBase, reply: replyOwn},
	SetVringKick:        {do: (*session).setVringKick},
	SetVringCall:        {do: (*session).setVringCall},
	SetVringErr:         {do: (*session).setVringErr},
	GetProtocolFeatures: {do: (*session).getProtocolFeatures, reply: replyOwn},
	SetProtocolFeatures: {do: (*session).setProtocolFeatures},
	GetQueueNum:         {do: (*session).getQueueNum, reply: replyOwn}, // allowed once MQ has been offered
	SetVringEnable:      {do: (*session).setVringEnable},
	GetConfig:           {do: (*session).getConfig, needs: ProtocolConfig, reply: replyOwn, refuse: (*session).noConfig},
	SetConfig:           {do: (*session).setConfig, needs: ProtocolConfig},
	ResetDevice:         {do: (*session).resetDevice, needs: ProtocolResetDevice},
	GetMaxMemSlots:      {do: (*session).getMaxMemSlots, needs: ProtocolConfigureMemSlots, reply: replyOwn},
	AddMemReg:           {do: (*session).addMemReg, needs: ProtocolConfigureMemSlots},
	RemMemReg:           {do: (*session).remMemReg, needs: ProtocolConfigureMemSlots},
	SetStatus:           {do: (*session).setStatus, needs: ProtocolStatus},
	GetStatus:           {do: (*session).getStatus, needs: ProtocolStatus, reply: replyOwn},

	IOTLBMsg:            {reply: replyOwn},
	CreateCryptoSession: {reply: replyOwn},
	PostcopyAdvise:      {reply: replyOwn},
	PostcopyEnd:         {reply: replyOwn},
	GetInflightFD:       {reply: replyOwn},
	GetSharedObject:     {reply: replyOwn},
	SetDeviceStateFD:    {reply: replyOwn},
	CheckDeviceState:    {reply: replyOwn},
	GetShmemConfig:      {reply: replyOwn},
}

// ruleUnknown is the rule of what is in no list: without knowing whether it has a reply, an acknowledgement is due.
var ruleUnknown = &rule{}

func ruleOf(r Request) *rule {
	if known := rules[r]; known != nil {
		return known
	}
	return ruleUnknown
}

func (s *session) getFeatures(m *message) error { return s.replyU64(m, s.offered) }

func (s *session) setFeatures(m *message) error {
	features, err := ParseU64(m.body)
	switch {
	case err != nil:
		return err
	case features&FeatureVersion1 == 0:
		return fatal(ErrLegacy)
	case features&^s.offered != 0:
		return fmt.Errorf("feature bits %#x were not offered", features&^s.offered)
	case s.anyRunning() && features == s.features:
		return nil
	}
	s.stopAll()
	s.acked = false
	if err := s.dev.SetFeatures(features &^ FeatureProtocolFeatures); err != nil {
		return err
	}
	s.features, s.acked = features, true
	return s.startAll()
}

// resetOwner disables all rings, which is one of the two things that the document allows. A front-end that cannot enable
// them starts them by a new kick descriptor.
func (s *session) resetOwner(*message) error {
	s.stopAll()
	for i := range s.rings {
		r := &s.rings[i]
		if s.features&FeatureProtocolFeatures != 0 {
			r.enable = enableOff
		} else {
			r.park()
		}
	}
	return nil
}

func (s *session) getProtocolFeatures(m *message) error { return s.replyU64(m, ProtocolOffered) }

func (s *session) setProtocolFeatures(m *message) error {
	protocol, err := ParseU64(m.body)
	switch {
	case err != nil:
		return err
	case protocol&^ProtocolOffered != 0:
		return fmt.Errorf("protocol feature bits %#x were not offered", protocol&^ProtocolOffered)
	}
	s.protocol = protocol
	return nil
}

func (s *session) getQueueNum(m *message) error { return s.replyU64(m, uint64(len(s.rings))) }

// want checks how many descriptors came.
func (m *message) want(fds int) error {
	if len(m.fds) != fds {
		return fmt.Errorf("%d descriptors came, want %d: %w", len(m.fds), fds, ErrMalformed)
	}
	return nil
}

func (s *session) setMemTable(m *message) error {
	regions, err := ParseMemTable(m.body)
	if err != nil {
		return err
	}
	if err := m.want(len(regions)); err != nil {
		return err
	}
	for i := range regions {
		regions[i].FD = m.fds[i] // stays the message's
	}
	mem, err := guestmem.NewMap(regions)
	if err != nil {
		return err
	}
	s.changed(s.setMem(mem))
	return nil
}

// changed logs what a new table could not bring to life. The table itself was accepted.
func (s *session) changed(err error) {
	if err != nil {
		s.log.Warn("queues wait for a part of the memory table", "err", err)
	}
}

func (s *session) getMaxMemSlots(m *message) error { return s.replyU64(m, guestmem.MaxRegions) }

func (s *session) addMemReg(m *message) error {
	region, err := ParseMemReg(m.body)
	if err != nil {
		return err
	}
	if err := m.want(1); err != nil {
		return err
	}
	region.FD = m.fds[0] // stays the message's
	var mem *guestmem.Map
	if s.mem == nil {
		mem, err = guestmem.NewMap([]guestmem.Region{region})
	} else {
		mem, err = s.mem.Add(region)
	}
	if err != nil {
		return err
	}
	s.changed(s.setMem(mem))
	return nil
}

// remMemReg takes no notice of a descriptor, which some front-ends send; the message's end closes it.
func (s *session) remMemReg(m *message) error {
	region, err := ParseMemReg(m.body)
	switch {
	case err != nil:
		return err
	case s.mem == nil:
		return errors.New("there is no memory table")
	}
	mem, err := s.mem.Remove(region.GuestAddr, region.Size, region.UserAddr)
	if err != nil {
		return err
	}
	s.changed(s.setMem(mem))
	return nil
}

func (s *session) getConfig(m *message) error {
	c, err := ParseConfig(m.body, false)
	if err == nil {
		data := make([]byte, c.Size)
		if err = s.dev.ReadConfig(c.Offset, data); err == nil {
			c.Data = data
			return s.reply(m, c.Append(make([]byte, 0, configHead+len(data))))
		}
	}
	s.refused(fmt.Errorf("%v: %w", m.Request, err))
	return s.reply(m, nil)
}

// noConfig tells a front-end that did not negotiate CONFIG that there is none.
func (s *session) noConfig(m *message) error { return s.reply(m, nil) }

func (s *session) setConfig(m *message) error {
	c, err := ParseConfig(m.body, true)
	switch {
	case err != nil:
		return err
	case c.Flags > 1:
		return fmt.Errorf("config space flags %#x: %w", c.Flags, ErrMalformed)
	}
	return s.dev.WriteConfig(c.Offset, c.Data)
}

func (s *session) resetDevice(*message) error {
	s.reset()
	return nil
}

// statusFeaturesOK is the bit that a device takes back when it cannot live with the features (virtio 1.3, 3.1.1).
const statusFeaturesOK = 8

func (s *session) setStatus(m *message) error {
	status, err := ParseU64(m.body)
	switch {
	case err != nil:
		return err
	case status > 0xff:
		return fmt.Errorf("device status %#x: %w", status, ErrMalformed)
	case status == 0:
		s.pause()
		return nil
	}
	s.status = uint8(status)
	if !s.acked {
		s.status &^= statusFeaturesOK
	}
	return nil
}

func (s *session) getStatus(m *message) error { return s.replyU64(m, uint64(s.status)) }
