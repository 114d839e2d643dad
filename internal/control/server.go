// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"time"
)

// Handler carries out a command. Its result becomes JSON; its error becomes the answer's text. It must end soon after ctx.
type Handler func(ctx context.Context, args json.RawMessage) (result any, err error)

// answerTime bounds how long a client may take to read an answer: one that has stopped reading must not keep a place.
const answerTime = 30 * time.Second

// Server answers the clients of one listener. Safe for concurrent use.
type Server struct {
	listener net.Listener
	handlers map[string]Handler
	places   chan struct{}
}

// NewServer makes a server. It borrows the listener and keeps the table, which must not change any more.
func NewServer(l net.Listener, handlers map[string]Handler) *Server {
	return &Server{listener: l, handlers: handlers, places: make(chan struct{}, ClientsMax)}
}

// Serve answers until ctx ends, then lets go of all clients and gives nil. The listener stays open, and is the caller's
// to close; when it breaks, that is the error.
func (s *Server) Serve(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var clients sync.WaitGroup
	defer clients.Wait()
	defer cancel()
	defer context.AfterFunc(ctx, func() { unblock(s.listener) })()
	for {
		c, err := s.listener.Accept()
		switch {
		case ctx.Err() != nil:
			if c != nil {
				_ = c.Close() // nothing was said
			}
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("accept a control client: %w", err)
		case err != nil:
			// Out of descriptors, or a client that went away at once: others may do better, a little later.
			select {
			case <-ctx.Done():
			case <-time.After(acceptPause):
			}
			continue
		}
		select {
		case s.places <- struct{}{}:
			clients.Go(func() {
				defer func() { <-s.places }()
				s.converse(ctx, c)
			})
		default:
			_ = write(c, Answer{Error: fmt.Sprintf("%d clients are served already (try again later)", ClientsMax)}) // it may be gone
			_ = c.Close()
		}
	}
}

// acceptPause is how long the server waits after a failure to accept.
const acceptPause = 100 * time.Millisecond

// unblock ends an Accept that waits.
func unblock(l net.Listener) {
	if d, ok := l.(interface{ SetDeadline(time.Time) error }); ok {
		_ = d.SetDeadline(time.Unix(1, 0)) // fails on a closed one, which does not wait
	}
}

// converse answers one client until it leaves.
func (s *Server) converse(ctx context.Context, c net.Conn) {
	defer c.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })()
	lines := bufio.NewScanner(c)
	lines.Buffer(make([]byte, 0, 512), LineMax)
	for lines.Scan() {
		if len(strings.TrimSpace(lines.Text())) == 0 {
			continue
		}
		if write(c, s.answer(ctx, lines.Bytes())) != nil || ctx.Err() != nil {
			return
		}
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		_ = write(c, Answer{Error: fmt.Sprintf("read request: a line has more than %d bytes", LineMax)}) // the end either way
	}
}

// answer carries out one line.
func (s *Server) answer(ctx context.Context, line []byte) Answer {
	r, err := Parse(line)
	if err != nil {
		return Answer{ID: r.ID, Error: err.Error()}
	}
	h, ok := s.handlers[r.Command]
	if !ok {
		known := slices.Sorted(maps.Keys(s.handlers))
		return Answer{ID: r.ID, Error: fmt.Sprintf("unknown command %q (this server knows %s)", r.Command, strings.Join(known, ", "))}
	}
	result, err := h(ctx, r.Args)
	if err != nil {
		return Answer{ID: r.ID, Error: err.Error()}
	}
	b, err := json.Marshal(result)
	if err != nil {
		return Answer{ID: r.ID, Error: "encode the result: " + err.Error()}
	}
	return Answer{ID: r.ID, OK: true, Result: b}
}

func write(c net.Conn, a Answer) error {
	a.Version = Version
	b, err := json.Marshal(a)
	if err != nil {
		return err
	}
	if err := c.SetWriteDeadline(time.Now().Add(answerTime)); err != nil {
		return err
	}
	_, err = c.Write(append(b, '\n'))
	return err
}
