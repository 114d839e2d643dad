// SPDX-License-Identifier: Apache-2.0

package vhostuser_test

import (
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhosttest"
	. "github.com/sluice-blk/sluice/internal/vhostuser"
)

// Every read and write of a whole conversation fails once, for each way in which it can fail. Whatever the n-th
// operation is, the session must end, with everything given back.

// faultyConn lets its fault happen at the n-th operation, counted from 1.
type faultyConn struct {
	*net.UnixConn
	n     int
	fault fault
	hit   bool
}

// fault is what happens instead of an operation on b; it returns as the operation would.
type fault struct {
	name string
	do   func(c *net.UnixConn, b []byte) (int, error)
}

var faults = []fault{
	{"ENOMEM", func(*net.UnixConn, []byte) (int, error) { return 0, syscall.ENOMEM }},
	{"reset", func(*net.UnixConn, []byte) (int, error) { return 0, syscall.ECONNRESET }},
	{"end", func(*net.UnixConn, []byte) (int, error) { return 0, io.EOF }},
	{"closed", func(c *net.UnixConn, b []byte) (int, error) { _ = c.Close(); return c.Read(b) }},
	{"shut down after a byte", func(c *net.UnixConn, b []byte) (int, error) {
		n, err := c.Read(b[:1])
		_ = c.CloseRead()
		return n, err
	}},
}

func (c *faultyConn) due() bool {
	c.n--
	if c.n == 0 {
		c.hit = true
	}
	return c.n == 0
}

func (c *faultyConn) Read(b []byte) (int, error) {
	if len(b) > 0 && c.due() {
		return c.fault.do(c.UnixConn, b)
	}
	return c.UnixConn.Read(b)
}

// ReadMsgUnix loses the message and keeps its descriptors where it fails: they were received and must be closed.
func (c *faultyConn) ReadMsgUnix(b, oob []byte) (int, int, int, *net.UnixAddr, error) {
	if !c.due() {
		return c.UnixConn.ReadMsgUnix(b, oob)
	}
	_, oobn, flags, _, err := c.UnixConn.ReadMsgUnix(b[:1], oob)
	if err != nil {
		return 0, 0, 0, nil, err
	}
	if c.fault.name == "truncated" {
		return 1, oobn, flags | sys.MSG_CTRUNC, nil, nil
	}
	n, err := c.fault.do(c.UnixConn, b)
	return n, oobn, flags, nil, err
}

func (c *faultyConn) Write(b []byte) (int, error) {
	if !c.due() {
		return c.UnixConn.Write(b)
	}
	_ = c.Close()
	return 0, syscall.EPIPE
}

// converse is a conversation with every message that carries a payload, a descriptor or a reply.
func converse(f *vhosttest.Frontend, mem, more *vhosttest.Memory, kick, call int) error {
	v := vhosttest.Vring{Size: 16, Desc: mem.UserAddr(0), Avail: mem.UserAddr(4096), Used: mem.UserAddr(8192),
		Kick: kick, Call: call, Err: call}
	config := func() error { _, err := f.GetConfig(0, 4); return err }
	base := func() error { _, err := f.GetVringBase(0); return err }
	slots := func() error { _, err := f.AskU64(GetMaxMemSlots); return err }
	status := func() error { _, err := f.GetStatus(); return err }
	for _, step := range []func() error{
		func() error { return f.Negotiate(allFeatures, ProtocolOffered) },
		func() error { return f.SetMemTable(mem.Region()) },
		func() error { return f.SetVring(v) },
		func() error { return f.SetMemTable(mem.Region(), more.Region()) },
		func() error { return f.RemMemReg(more.Region()) },
		func() error { return f.AddMemReg(more.Region()) },
		func() error { return f.SetConfig(0, []byte("x"), 0) },
		func() error { return f.SetStatus(4) },
		func() error { return f.SetVringCall(0, call) },
		func() error { return f.SetVringEnable(0, false) },
		func() error { return f.SetVringEnable(0, true) },
		func() error { return f.Tell(9999, make([]byte, 100), kick) },
		config, slots, status, base,
		func() error { return f.SetVringKick(0, kick) },
		func() error { return f.ResetDevice() },
	} {
		if err := step(); err != nil {
			if errors.Is(err, vhosttest.ErrRefused) {
				continue // of the unknown message
			}
			return err
		}
	}
	return nil
}

func TestEveryReadAndWriteFailing(t *testing.T) {
	checkDescriptors(t)
	mem, err := vhosttest.NewMemory(0, 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	more, err := vhosttest.NewMemory(1<<20, 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	defer more.Close()
	kick, call := eventfd(t), eventfd(t)
	for _, kind := range append(faults, fault{"truncated", faults[0].do}) {
		for n := 1; ; n++ {
			f, back, err := vhosttest.Pair()
			if err != nil {
				t.Fatal(err)
			}
			dev := newFake()
			conn := &faultyConn{UnixConn: back, n: n, fault: kind}
			done := make(chan error, 1)
			go func() { done <- ServeConn(context.Background(), conn, dev, nil) }()
			said := converse(f, mem, more, kick, call)
			_ = f.Close()
			select {
			case err = <-done:
			case <-time.After(patience):
				t.Fatalf("%s at operation %d: the session does not end", kind.name, n)
			}
			dev.verify(t)
			if !conn.hit {
				if said != nil || err != nil {
					t.Errorf("%s: undisturbed conversation: front-end %v, back-end %v", kind.name, said, err)
				}
				if n < 60 {
					t.Errorf("the conversation has %d operations only", n)
				}
				break
			}
			if said == nil && n < 60 {
				t.Errorf("%s at operation %d went unnoticed", kind.name, n)
			}
		}
	}
}
