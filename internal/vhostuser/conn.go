// SPDX-License-Identifier: Apache-2.0

package vhostuser

import (
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/sluice-blk/sluice/internal/sys"
)

// Conn is the socket of a session: what a session needs of a [net.UnixConn], which is the only kind outside tests.
// ReadMsgUnix must receive descriptors closed on exec, as that of the standard library does.
type Conn interface {
	ReadMsgUnix(b, oob []byte) (n, oobn, flags int, addr *net.UnixAddr, err error)
	io.ReadWriteCloser
	SetDeadline(t time.Time) error
}

// message is a message as it was received. It owns the descriptors that came with it and that nobody took.
type message struct {
	Header
	body []byte
	fds  []int
}

// take hands over descriptor i.
func (m *message) take(i int) int {
	fd := m.fds[i]
	m.fds[i] = -1
	return fd
}

// close closes the descriptors that nobody took.
func (m *message) close() {
	for i := range m.fds {
		closeFD(&m.fds[i])
	}
	m.fds = m.fds[:0]
}

// receiver reads messages into buffers of its own.
type receiver struct {
	conn Conn
	head [HeaderSize]byte
	body [MaxBody]byte
	oob  []byte
	fds  []int // from the message that is being read
}

func newReceiver(conn Conn) *receiver {
	return &receiver{conn: conn, oob: make([]byte, sys.RightsSpace(MaxRegions)), fds: make([]int, 0, MaxRegions)}
}

// next reads one message, which is valid until the following call. io.EOF means that the front-end left between two
// messages. After an error nothing is left open, and the stream is of no more use.
func (v *receiver) next() (message, error) {
	m := message{}
	if err := v.readHead(); err != nil {
		m.fds = v.fds
		m.close()
		return m, err
	}
	m.fds = v.fds
	var err error
	if m.Header, err = ParseHeader(v.head[:]); err == nil {
		m.body = v.body[:m.Size]
		_, err = io.ReadFull(v.conn, m.body)
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			err = fmt.Errorf("read payload of %v: %w", m.Request, err)
		}
	}
	if err != nil {
		m.close()
	}
	return m, err
}

// readHead reads a header, in as many pieces as it comes. Descriptors travel with a message's first byte, but whoever
// sends the header in pieces may have sent some with each.
func (v *receiver) readHead() error {
	v.fds = v.fds[:0]
	for got := 0; got < HeaderSize; {
		n, oobn, flags, _, err := v.conn.ReadMsgUnix(v.head[got:], v.oob)
		var rights error
		v.fds, rights = sys.ParseUnixRights(v.fds, v.oob[:oobn])
		got += n
		switch {
		case err == nil && n == 0, errors.Is(err, io.EOF):
			if got == 0 {
				return io.EOF
			}
			return fmt.Errorf("read header: %w", io.ErrUnexpectedEOF)
		case err != nil:
			return fmt.Errorf("read header: %w", err)
		case rights != nil:
			return fmt.Errorf("read descriptors: %w", rights)
		case flags&sys.MSG_CTRUNC != 0, len(v.fds) > MaxRegions:
			return fmt.Errorf("read descriptors: more than %d came, or more than may be open (see RLIMIT_NOFILE): %w",
				MaxRegions, ErrMalformed)
		}
	}
	return nil
}
