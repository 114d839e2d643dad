// SPDX-License-Identifier: Apache-2.0

// Package vhosttest plays the front-end of a vhost-user conversation: the part of a virtual machine monitor that
// negotiates, hands over memory and sets up rings.
//
// It knows nothing of what is in a ring: memory regions, ring addresses and eventfds are the caller's. Next to the typed
// calls stand raw ones, for messages that no decent front-end sends. It is imported by tests and by the bench room only.
//
// Thread rule: a Frontend belongs to one goroutine at a time; Close may be called from any.
package vhosttest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/sluice-blk/sluice/internal/guestmem"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhostuser"
)

// Timeout is how long a Frontend waits for an answer unless told otherwise. It is long because machines under test are
// slow; a back-end that drains a queue on a slow disk may need longer still.
const Timeout = 60 * time.Second

// dialPause is the time between two attempts to connect.
const dialPause = 20 * time.Millisecond

// ErrRefused is what a typed call gives when the back-end acknowledged with something else than 0.
var ErrRefused = errors.New("refused by the back-end")

// Frontend is one connection to a back-end.
type Frontend struct {
	// Timeout bounds every send and every wait for an answer. 0: [Timeout].
	Timeout time.Duration

	// What the back-end offers and what was negotiated, after [Frontend.Negotiate].
	Offered, Features                 uint64
	OfferedProtocol, ProtocolFeatures uint64
	Queues                            int

	conn *net.UnixConn
}

// New makes a front-end of a connected socket, which it takes ownership of.
func New(conn *net.UnixConn) *Frontend { return &Frontend{conn: conn} }

// Dial connects to the socket at path, again and again until ctx ends, so that the back-end may still be starting.
func Dial(ctx context.Context, path string) (*Frontend, error) {
	for {
		conn, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
		if err == nil {
			return New(conn), nil
		}
		t := time.NewTimer(dialPause)
		select {
		case <-ctx.Done():
			t.Stop()
			return nil, fmt.Errorf("connect to %s: %w", path, err)
		case <-t.C:
		}
	}
}

// Pair is a front-end and the socket for its back-end.
func Pair() (*Frontend, *net.UnixConn, error) {
	a, b, err := sys.Socketpair()
	if err != nil {
		return nil, nil, fmt.Errorf("make socket pair: %w", err)
	}
	front, err := unixConn(a)
	back, err2 := unixConn(b)
	if err := errors.Join(err, err2); err != nil {
		for _, c := range []*net.UnixConn{front, back} {
			if c != nil {
				_ = c.Close()
			}
		}
		return nil, nil, err
	}
	return New(front), back, nil
}

// unixConn takes ownership of fd.
func unixConn(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "vhost-user")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("use socket: %w", err)
	}
	return c.(*net.UnixConn), nil
}

// Close ends the connection. May be called from any goroutine.
func (f *Frontend) Close() error { return f.conn.Close() }

// Conn is the socket, for tests that shut down a half of it or send bytes that are no message.
func (f *Frontend) Conn() *net.UnixConn { return f.conn }

func (f *Frontend) deadline() time.Time {
	if f.Timeout != 0 {
		return time.Now().Add(f.Timeout)
	}
	return time.Now().Add(Timeout)
}

// Send sends one message, whatever it is. Of flags the version is set by itself. The descriptors stay the caller's.
func (f *Frontend) Send(r vhostuser.Request, flags uint32, payload []byte, fds ...int) error {
	if err := f.SendRaw(vhostuser.AppendMessage(nil, r, flags, payload), fds...); err != nil {
		return fmt.Errorf("send %v: %w", r, err)
	}
	return nil
}

// SendRaw sends bytes as they are, with the descriptors, in one piece as far as the kernel takes it.
func (f *Frontend) SendRaw(b []byte, fds ...int) error {
	if err := f.conn.SetWriteDeadline(f.deadline()); err != nil {
		return err
	}
	var oob []byte
	if len(fds) > 0 {
		oob = sys.UnixRights(fds...)
	}
	n, _, err := f.conn.WriteMsgUnix(b, oob, nil)
	if err != nil || n == len(b) {
		return err
	}
	_, err = f.conn.Write(b[n:])
	return err
}

// Recv reads the answer to r: its payload. It is an error when something else comes. io.EOF, wrapped, tells that the
// back-end closed the connection.
func (f *Frontend) Recv(r vhostuser.Request) ([]byte, error) {
	if err := f.conn.SetReadDeadline(f.deadline()); err != nil {
		return nil, fmt.Errorf("read answer to %v: %w", r, err)
	}
	var head [vhostuser.HeaderSize]byte
	if _, err := io.ReadFull(f.conn, head[:]); err != nil {
		return nil, fmt.Errorf("read answer to %v: %w", r, err)
	}
	h, err := vhostuser.ParseHeader(head[:])
	if err != nil {
		return nil, fmt.Errorf("read answer to %v: %w", r, err)
	}
	if h.Request != r || h.Flags != vhostuser.FlagVersion|vhostuser.FlagReply {
		return nil, fmt.Errorf("read answer to %v: %v with flags %#x came", r, h.Request, h.Flags)
	}
	payload := make([]byte, h.Size)
	if _, err := io.ReadFull(f.conn, payload); err != nil {
		return nil, fmt.Errorf("read answer to %v: %w", r, err)
	}
	return payload, nil
}

// Ask sends a message that has a reply of its own, and gives the reply's payload.
func (f *Frontend) Ask(r vhostuser.Request, payload []byte, fds ...int) ([]byte, error) {
	if err := f.Send(r, 0, payload, fds...); err != nil {
		return nil, err
	}
	return f.Recv(r)
}

// AskU64 is [Frontend.Ask] for an empty message whose reply is a number.
func (f *Frontend) AskU64(r vhostuser.Request) (uint64, error) {
	p, err := f.Ask(r, nil)
	if err != nil {
		return 0, err
	}
	v, err := vhostuser.ParseU64(p)
	if err != nil {
		return 0, fmt.Errorf("answer to %v: %w", r, err)
	}
	return v, nil
}

// Tell sends a message without a reply of its own. When REPLY_ACK is negotiated it waits for the acknowledgement, and
// gives [ErrRefused] when that is not 0.
func (f *Frontend) Tell(r vhostuser.Request, payload []byte, fds ...int) error {
	if f.ProtocolFeatures&vhostuser.ProtocolReplyAck == 0 {
		return f.Send(r, 0, payload, fds...)
	}
	if err := f.Send(r, vhostuser.FlagNeedReply, payload, fds...); err != nil {
		return err
	}
	return f.RecvAck(r)
}

// RecvAck reads an acknowledgement: nil for 0, else [ErrRefused].
func (f *Frontend) RecvAck(r vhostuser.Request) error {
	p, err := f.Recv(r)
	if err != nil {
		return err
	}
	switch v, err := vhostuser.ParseU64(p); {
	case err != nil:
		return fmt.Errorf("acknowledgement of %v: %w", r, err)
	case v != 0:
		return fmt.Errorf("%v (%d): %w", r, v, ErrRefused)
	}
	return nil
}

// TellU64 is [Frontend.Tell] with a number.
func (f *Frontend) TellU64(r vhostuser.Request, v uint64, fds ...int) error {
	return f.Tell(r, vhostuser.AppendU64(nil, v), fds...)
}

// Negotiate does what a front-end does first: owner, features, protocol features, number of queues, and features again.
// What is wanted and not offered is left out; see the Frontend's fields for what came of it.
func (f *Frontend) Negotiate(features, protocol uint64) error {
	if err := f.Tell(vhostuser.SetOwner, nil); err != nil {
		return err
	}
	var err error
	if f.Offered, err = f.AskU64(vhostuser.GetFeatures); err != nil {
		return err
	}
	f.Queues = 1
	if f.Offered&vhostuser.FeatureProtocolFeatures != 0 {
		if err := f.negotiateProtocol(protocol); err != nil {
			return err
		}
	}
	return f.SetFeatures(f.Offered & features)
}

func (f *Frontend) negotiateProtocol(want uint64) error {
	var err error
	if f.OfferedProtocol, err = f.AskU64(vhostuser.GetProtocolFeatures); err != nil {
		return err
	}
	want &= f.OfferedProtocol
	if err := f.Send(vhostuser.SetProtocolFeatures, 0, vhostuser.AppendU64(nil, want)); err != nil {
		return err
	}
	f.ProtocolFeatures = want
	if want&vhostuser.ProtocolMQ != 0 {
		n, err := f.AskU64(vhostuser.GetQueueNum)
		if err != nil {
			return err
		}
		f.Queues = int(n)
	}
	return nil
}

// SetFeatures acknowledges exactly these features.
func (f *Frontend) SetFeatures(features uint64) error {
	if err := f.TellU64(vhostuser.SetFeatures, features); err != nil {
		return err
	}
	f.Features = features
	return nil
}

// SetMemTable hands over the whole table of memory; each region's FD goes along and stays the caller's.
func (f *Frontend) SetMemTable(regions ...guestmem.Region) error {
	fds := make([]int, len(regions))
	for i := range regions {
		fds[i] = regions[i].FD
	}
	return f.Tell(vhostuser.SetMemTable, vhostuser.AppendMemTable(nil, regions), fds...)
}

// AddMemReg adds one region to the table.
func (f *Frontend) AddMemReg(r guestmem.Region) error {
	return f.Tell(vhostuser.AddMemReg, vhostuser.AppendMemReg(nil, r), r.FD)
}

// RemMemReg takes one region from the table.
func (f *Frontend) RemMemReg(r guestmem.Region) error {
	return f.Tell(vhostuser.RemMemReg, vhostuser.AppendMemReg(nil, r))
}

// GetConfig reads n bytes of the config space. An error of the back-end is [ErrRefused].
func (f *Frontend) GetConfig(offset uint32, n int) ([]byte, error) {
	c := vhostuser.ConfigSpace{Offset: offset, Size: uint32(n), Data: make([]byte, n)}
	p, err := f.Ask(vhostuser.GetConfig, c.Append(nil))
	if err != nil {
		return nil, err
	}
	if len(p) == 0 {
		return nil, fmt.Errorf("%v: %w", vhostuser.GetConfig, ErrRefused)
	}
	got, err := vhostuser.ParseConfig(p, true)
	switch {
	case err != nil:
		return nil, fmt.Errorf("answer to %v: %w", vhostuser.GetConfig, err)
	case got.Offset != offset || got.Size != uint32(n):
		return nil, fmt.Errorf("answer to %v: %d bytes at %d, want %d at %d", vhostuser.GetConfig, got.Size, got.Offset,
			n, offset)
	}
	return got.Data, nil
}

// SetConfig writes p to the config space, as a driver does when flags are 0.
func (f *Frontend) SetConfig(offset uint32, p []byte, flags uint32) error {
	c := vhostuser.ConfigSpace{Offset: offset, Size: uint32(len(p)), Flags: flags, Data: p}
	return f.Tell(vhostuser.SetConfig, c.Append(nil))
}

// ResetDevice resets the device.
func (f *Frontend) ResetDevice() error { return f.Tell(vhostuser.ResetDevice, nil) }

// SetStatus sets the virtio device status.
func (f *Frontend) SetStatus(status uint8) error {
	return f.TellU64(vhostuser.SetStatus, uint64(status))
}

// GetStatus is the virtio device status.
func (f *Frontend) GetStatus() (uint8, error) {
	v, err := f.AskU64(vhostuser.GetStatus)
	return uint8(v), err
}
