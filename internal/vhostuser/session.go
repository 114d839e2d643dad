// SPDX-License-Identifier: Apache-2.0

package vhostuser

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/sluice-blk/sluice/internal/guestmem"
)

// maxQueues is how many queues the messages can name: SET_VRING_KICK has eight bits for the index.
const maxQueues = 256

// maxRefusals is how many refused messages of a session are logged: a peer must not be able to fill the log.
const maxRefusals = 32

// ErrLegacy ends the session of a front-end that does not negotiate VIRTIO_F_VERSION_1.
var ErrLegacy = errors.New("front-end negotiates a legacy device without VIRTIO_F_VERSION_1 " +
	"(with QEMU: -global virtio-mmio.force-legacy=false, or disable-legacy=on for the PCI device; " +
	"the guest's driver must know virtio 1.0)")

// fatalError ends the session after the message that caused it has been acknowledged.
type fatalError struct{ error }

func (e fatalError) Unwrap() error { return e.error }

func fatal(err error) error { return fatalError{err} }

// session is one front-end's conversation. Only its own goroutine touches it.
type session struct {
	dev   Device
	conn  Conn
	log   *slog.Logger
	stats *Stats
	limit int // entries of a queue, at most

	offered  uint64 // features
	features uint64 // negotiated
	acked    bool   // features are negotiated
	protocol uint64 // protocol features negotiated
	status   uint8  // virtio device status (virtio 1.3, section 2.1)

	mem   *guestmem.Map // nil: no table yet
	rings []ring
	out   []byte // the reply that is being written

	refusals int // logged so far
}

// ServeConn holds the conversation with one front-end until it leaves, ctx ends, or there is nothing to say any more.
// In any case all queues have been stopped, the memory released, the descriptors closed and the device reset when it
// returns. It takes ownership of conn.
//
// It returns nil when the front-end left between two messages or ctx ended, and else what ended the session:
// [ErrMalformed], [ErrLegacy], or an error of the socket, wrapped.
// May be called from any goroutine, one at a time for a device.
func ServeConn(ctx context.Context, conn Conn, dev Device, o *ServerOptions) error {
	stop := context.AfterFunc(ctx, func() {
		// Wakes the session wherever it waits for the front-end. A failure means that the socket is closed already.
		_ = conn.SetDeadline(time.Unix(1, 0))
	})
	defer stop()
	s := newSession(conn, dev, o)
	s.stats.Sessions.Add(1)
	err := s.run()
	s.end()
	if errors.Is(err, io.EOF) || ctx.Err() != nil {
		return nil
	}
	s.stats.Broken.Add(1)
	return err
}

func newSession(conn Conn, dev Device, o *ServerOptions) *session {
	s := &session{dev: dev, conn: conn, log: o.logger(), stats: o.stats(), limit: o.maxQueueSize()}
	s.offered = dev.Features() | FeatureVersion1 | FeatureIndirectDesc | FeatureEventIdx | FeatureProtocolFeatures
	s.rings = make([]ring, min(max(dev.NumQueues(), 0), maxQueues))
	for i := range s.rings {
		s.rings[i] = newRing(i)
	}
	return s
}

// run reads and obeys messages until one of the two ends it.
func (s *session) run() error {
	in := newReceiver(s.conn)
	for {
		m, err := in.next()
		if err != nil {
			return err
		}
		s.stats.Messages.Add(1)
		err = s.handle(&m)
		m.close()
		if err != nil {
			return err
		}
	}
}

// end gives everything back, in the order in which it is safe to.
func (s *session) end() {
	s.stopAll()
	for i := range s.rings {
		s.rings[i].close()
	}
	s.dev.Reset()
	if s.mem != nil {
		s.mem.Release()
		s.mem = nil
	}
	if err := s.conn.Close(); err != nil {
		s.log.Debug("close vhost-user connection", "err", err)
	}
}

// handle obeys one message and answers it. An error ends the session.
func (s *session) handle(m *message) error {
	if m.Flags&FlagReply != 0 {
		return fmt.Errorf("%v: reply flag in a request: %w", m.Request, ErrMalformed)
	}
	// Whoever turns REPLY_ACK on or off with this message may count on either rule, and waits if it asked.
	ackable := s.protocol
	r := ruleOf(m.Request)
	err := s.obey(r, m)
	if err != nil {
		err = fmt.Errorf("%v: %w", m.Request, err)
	}
	if r.reply == replyOwn {
		return err // the reply was written by the rule, or there is none to be had
	}
	var end fatalError
	if err != nil && !errors.As(err, &end) {
		s.refused(err)
	}
	ackable |= s.protocol
	if m.Flags&FlagNeedReply != 0 && ackable&ProtocolReplyAck != 0 {
		ack := uint64(0)
		if err != nil {
			ack = 1
		}
		if werr := s.replyU64(m, ack); werr != nil {
			return werr
		}
	}
	if end.error != nil {
		return err
	}
	return nil
}

// refused counts and logs a message that was refused.
func (s *session) refused(err error) {
	s.stats.Refused.Add(1)
	if s.refusals++; s.refusals > maxRefusals {
		return
	}
	s.log.Warn("vhost-user message refused", "err", err)
	if s.refusals == maxRefusals {
		s.log.Warn("further refused vhost-user messages of this session are not logged")
	}
}

// obey looks at what the message must have before its rule sees it.
func (s *session) obey(r *rule, m *message) error {
	switch {
	case r.do == nil && r.reply == replyOwn:
		return errors.New("not offered, and the front-end waits for an answer that tells no failure")
	case r.do == nil:
		return errors.New("not offered or unknown")
	case s.protocol&r.needs != r.needs:
		if r.refuse != nil {
			return r.refuse(s, m)
		}
		return errors.New("belongs to a protocol feature that was not negotiated")
	}
	return r.do(s, m)
}

// reply answers m with a payload.
func (s *session) reply(m *message, payload []byte) error {
	s.out = AppendMessage(s.out[:0], m.Request, FlagReply, payload)
	if _, err := s.conn.Write(s.out); err != nil {
		return fatal(fmt.Errorf("write reply to %v: %w", m.Request, err))
	}
	return nil
}

func (s *session) replyU64(m *message, v uint64) error {
	return s.reply(m, AppendU64(make([]byte, 0, u64Size), v))
}

// ringOf checks the index of a queue.
func (s *session) ringOf(index uint32) (*ring, error) {
	if uint64(index) >= uint64(len(s.rings)) {
		return nil, fmt.Errorf("queue %d: the device has %d", index, len(s.rings))
	}
	return &s.rings[index], nil
}

// whole tells whether the ring has everything that it needs to run.
func (s *session) whole(r *ring) bool {
	enabled := r.enable == enableOn || r.enable == enableUnsaid && s.features&FeatureProtocolFeatures == 0
	return s.acked && s.mem != nil && enabled && r.size != 0 && r.placed && r.based &&
		r.kicking == kickReady
}

// start starts the ring when it is whole and does not run. An error means that it is whole and yet cannot run.
func (s *session) start(r *ring) error {
	if r.running || !s.whole(r) {
		return nil
	}
	eventIdx := s.features&FeatureEventIdx != 0
	if err := r.within(s.mem, eventIdx); err != nil {
		return fmt.Errorf("start queue %d: %w", r.index, err)
	}
	err := s.dev.StartQueue(Vring{
		Index: r.index, Size: r.size, Desc: r.addr.Desc, Avail: r.addr.Avail, Used: r.addr.Used, Base: r.base,
		Mem: s.mem, Kick: r.kick, Call: r.call, Err: r.err,
		EventIdx: eventIdx, Indirect: s.features&FeatureIndirectDesc != 0,
	})
	if err != nil {
		return fmt.Errorf("start queue %d: %w", r.index, err)
	}
	r.running = true
	s.log.Debug("queue started", "queue", r.index, "size", r.size, "base", r.base)
	return nil
}

// startAll starts what has become whole, and tells what could not be started.
func (s *session) startAll() error {
	var failed []error
	for i := range s.rings {
		if err := s.start(&s.rings[i]); err != nil {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// stop stops the ring if it runs, and remembers how far it came.
func (s *session) stop(r *ring) {
	if !r.running {
		return
	}
	base, err := s.dev.StopQueue(r.index)
	if err != nil {
		s.log.Warn("queue stopped with an error", "queue", r.index, "err", err)
	}
	r.base, r.running = base, false
	s.log.Debug("queue stopped", "queue", r.index, "base", base)
}

func (s *session) stopAll() {
	for i := range s.rings {
		s.stop(&s.rings[i])
	}
}

func (s *session) anyRunning() bool {
	for i := range s.rings {
		if s.rings[i].running {
			return true
		}
	}
	return false
}

// setMem makes m the table and releases the old one. It takes over the caller's reference. An empty table is none: rings
// wait for the first region. Rings that m has no room for are stopped; rings that waited for it are started, and the
// error tells which could not be.
func (s *session) setMem(m *guestmem.Map) error {
	if len(m.Regions()) == 0 {
		m.Release()
		m = nil
	}
	for i := range s.rings {
		r := &s.rings[i]
		if !r.running {
			continue
		}
		err := errors.New("no memory")
		if m != nil {
			err = r.within(m, s.features&FeatureEventIdx != 0)
		}
		if err != nil {
			s.log.Warn("queue stopped: its rings are gone from the memory table", "queue", r.index, "err", err)
			s.stop(r)
		}
	}
	if s.anyRunning() {
		if err := s.dev.SetMem(m); err != nil {
			s.log.Warn("memory table not replaced under running queues; they are stopped and started", "err", err)
			s.stopAll()
		}
	}
	old := s.mem
	s.mem = m
	if old != nil {
		old.Release()
	}
	return s.startAll()
}

// reset is a device reset: see the package comment for what it keeps.
func (s *session) reset() {
	s.stopAll()
	for i := range s.rings {
		s.rings[i].reset()
	}
	s.features, s.acked, s.status = 0, false, 0
	s.dev.Reset()
}

// pause is a device status of 0. It is a reset of a driver's, or no more than the pause of a machine: QEMU has no other
// word for it, and asks for the bases afterwards (7.2) to go on from there, with a driver that knows of no reset. So the
// bases and the device's settings outlive it; after a true reset the front-end sets all of that anew.
func (s *session) pause() {
	s.stopAll()
	for i := range s.rings {
		s.rings[i].pause()
	}
	s.features, s.acked, s.status = 0, false, 0
}
