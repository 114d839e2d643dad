// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"
)

// Client talks to a server, one request after the other. It belongs to one goroutine.
type Client struct {
	conn  net.Conn
	lines *bufio.Scanner
	id    uint64
}

// Dial connects to the server that listens on a UNIX socket.
func Dial(ctx context.Context, socket string) (*Client, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		var errno syscall.Errno
		if errors.As(err, &errno) {
			err = errno
		}
		return nil, fmt.Errorf("connect to %s: %w (is it the --control socket of a running sluice serve?)", socket, err)
	}
	c := &Client{conn: conn, lines: bufio.NewScanner(conn)}
	c.lines.Buffer(make([]byte, 0, 64<<10), AnswerMax)
	return c, nil
}

// Close ends the conversation.
func (c *Client) Close() error { return c.conn.Close() }

// Do has a command carried out, and reads its result into what result points to; nil drops it. args is encoded, nil is
// none. After any error but the server's own the conversation is over.
func (c *Client) Do(ctx context.Context, command string, args, result any) error {
	defer context.AfterFunc(ctx, func() { _ = c.conn.SetDeadline(time.Unix(1, 0)) })()
	c.id++
	r := Request{Version: Version, ID: c.id, Command: command}
	if args != nil {
		b, err := json.Marshal(args)
		if err != nil {
			return fmt.Errorf("encode arguments of %s: %w", command, err)
		}
		r.Args = b
	}
	b, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode %s: %w", command, err)
	}
	if _, err := c.conn.Write(append(b, '\n')); err != nil && !errors.Is(err, syscall.EPIPE) { // it may have said why
		return c.broken(ctx, command, err)
	}
	a, err := c.read()
	if err != nil {
		return c.broken(ctx, command, err)
	}
	switch {
	case !a.OK:
		return fmt.Errorf("%s: %s", command, a.Error)
	case a.ID != c.id:
		return fmt.Errorf("%s: the answer is to request %d, not %d", command, a.ID, c.id)
	case result == nil:
		return nil
	}
	if err := json.Unmarshal(a.Result, result); err != nil {
		return fmt.Errorf("%s: read the result: %w", command, err)
	}
	return nil
}

func (c *Client) read() (Answer, error) {
	var a Answer
	if !c.lines.Scan() {
		if err := c.lines.Err(); err != nil {
			return a, err
		}
		return a, io.ErrUnexpectedEOF
	}
	err := json.Unmarshal(c.lines.Bytes(), &a)
	return a, err
}

func (c *Client) broken(ctx context.Context, command string, err error) error {
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return fmt.Errorf("%s: the conversation with the server broke off: %w", command, err)
}
