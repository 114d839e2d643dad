// SPDX-License-Identifier: Apache-2.0

package vhostuser

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"syscall"
	"time"
)

// queueSizeDefault is the largest queue that QEMU and libvhost-user have.
const queueSizeDefault = 1024

// acceptPause is how long the server waits for descriptors or memory to come free before it accepts again.
const acceptPause = 100 * time.Millisecond

// ServerOptions are the options of a [Server]. The zero value, and a nil pointer, work.
type ServerOptions struct {
	// Logger gets what went wrong, once each, and with level debug the life of the queues. nil: nothing is logged.
	Logger *slog.Logger

	// Stats is counted into. nil: nobody looks.
	Stats *Stats

	// MaxQueueSize is the most entries that a queue may have, a power of two up to 32768. 0: 1024.
	MaxQueueSize int
}

// Stats counts what a server meets. Safe for concurrent use.
type Stats struct {
	Sessions atomic.Uint64 // front-ends that were served
	Broken   atomic.Uint64 // of these, sessions that ended with an error
	Messages atomic.Uint64 // messages received whole
	Refused  atomic.Uint64 // of these, refused
}

func (o *ServerOptions) logger() *slog.Logger {
	if o == nil || o.Logger == nil {
		return slog.New(slog.DiscardHandler)
	}
	return o.Logger
}

func (o *ServerOptions) stats() *Stats {
	if o == nil || o.Stats == nil {
		return new(Stats)
	}
	return o.Stats
}

func (o *ServerOptions) maxQueueSize() int {
	if o == nil || o.MaxQueueSize == 0 {
		return queueSizeDefault
	}
	return min(o.MaxQueueSize, sizeLimit)
}

// Server offers one device at one socket.
type Server struct {
	l   net.Listener
	dev Device
	o   *ServerOptions
}

// NewServer makes a server for the front-ends that connect to l, a *[net.UnixListener]. The listener stays the
// caller's, who closes it after Serve has returned.
func NewServer(l net.Listener, dev Device, o *ServerOptions) *Server {
	return &Server{l: l, dev: dev, o: o}
}

// Serve serves front-ends, one after the other, until ctx ends or the listener fails. A front-end that connects while
// another is served waits in the listener's backlog. What one of them does wrong ends its session and is logged.
//
// When ctx ends, the queues are drained and the session is closed, and Serve returns nil. A listener that was closed
// under a server gives [net.ErrClosed], wrapped.
// May be called from any goroutine, once at a time.
func (s *Server) Serve(ctx context.Context) error {
	l, ok := s.l.(interface{ SetDeadline(time.Time) error })
	if !ok {
		return fmt.Errorf("serve vhost-user at %v: %T is not a unix listener", s.l.Addr(), s.l)
	}
	if err := l.SetDeadline(time.Time{}); err != nil { // an earlier Serve left it in the past
		return fmt.Errorf("serve vhost-user at %v: %w", s.l.Addr(), err)
	}
	stop := context.AfterFunc(ctx, func() { _ = l.SetDeadline(time.Unix(1, 0)) }) // fails when closed, which also wakes
	defer stop()
	for ctx.Err() == nil { // or whoever waits in the backlog would be taken from it and turned away
		conn, err := s.l.Accept()
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = conn.Close() // it came too late and was told nothing
			}
			return nil
		case err != nil:
			if err := s.rest(ctx, err); err != nil {
				return err
			}
			continue
		}
		s.serveOne(ctx, conn)
	}
	return nil
}

// rest waits when accept failed for a reason that passes, and returns the error when it does not.
func (s *Server) rest(ctx context.Context, err error) error {
	for _, passing := range [...]error{syscall.EMFILE, syscall.ENFILE, syscall.ENOBUFS, syscall.ENOMEM, syscall.ECONNABORTED} {
		if !errors.Is(err, passing) {
			continue
		}
		s.o.logger().Warn("accept vhost-user front-end", "err", err)
		t := time.NewTimer(acceptPause)
		defer t.Stop()
		select {
		case <-ctx.Done():
		case <-t.C:
		}
		return nil
	}
	return fmt.Errorf("accept vhost-user front-end: %w", err)
}

func (s *Server) serveOne(ctx context.Context, conn net.Conn) {
	log := s.o.logger()
	unix, ok := conn.(*net.UnixConn)
	if !ok {
		log.Error("vhost-user front-end refused: not a unix socket", "conn", fmt.Sprintf("%T", conn))
		_ = conn.Close()
		return
	}
	log.Info("vhost-user front-end connected")
	if err := ServeConn(ctx, unix, s.dev, s.o); err != nil {
		log.Warn("vhost-user session ended", "err", err)
		return
	}
	log.Info("vhost-user front-end left")
}
