// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"bytes"
	"syscall"
	"testing"
)

func TestMessageToAnotherRing(t *testing.T) {
	r := newTestRing(t, 4, nil)
	needOp(t, r, IORING_OP_MSG_RING, "5.18")
	to := newTestRing(t, 4, nil)
	must(t, r, "msg_ring", 0, func(s *SQE) { s.PrepMsgRing(to.Fd(), 77, 5) })
	if c := one(t, to, 77); c.Res != 5 {
		t.Errorf("the other ring got %+v", c)
	}
	c := run(t, r, func(s *SQE) { s.PrepMsgRing(0, 77, 5) }) // not a ring
	if c.Res >= 0 {
		t.Errorf("message to what is no ring gave %d", c.Res)
	}
}

func TestCommandAreaIsClearAndAsLargeAsTheEntryAllows(t *testing.T) {
	for _, c := range []struct {
		name string
		o    *Options
		size int
	}{{"64", nil, 16}, {"128", &Options{SQE128: true}, 80}} {
		t.Run(c.name, func(t *testing.T) {
			r := newTestRing(t, 4, c.o)
			for range 3 * r.SQEntries() { // the second round sees what the first left
				s := sqe(t, r)
				s.PrepNop()
				cmd := r.Cmd(s)
				if len(cmd) != c.size || !bytes.Equal(cmd, make([]byte, c.size)) {
					t.Fatalf("command area %x", cmd)
				}
				s.PrepURingCmd(-1, 1, 0)
				s.UserData = 4711
				for i := range cmd {
					cmd[i] = 0xa5
				}
				one(t, r, 4711)
			}
		})
	}
}

func TestDriverCommand(t *testing.T) {
	for _, o := range []*Options{nil, {SQE128: true, CQE32: true}} {
		r := newTestRing(t, 4, o)
		needOp(t, r, IORING_OP_URING_CMD, "5.19")
		null, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
		if err != nil {
			t.Skipf("needs /dev/null: %v", err)
		}
		defer syscall.Close(null)
		if c := run(t, r, func(s *SQE) { s.PrepURingCmd(null, 1, 0) }); c.Res != 0 {
			if c.Err() == syscall.EOPNOTSUPP {
				missing(t, "commands to /dev/null", "6.6")
			}
			t.Errorf("command gave %+v", c)
		}
	}
}

func TestCompletionsOf32BytesShowTheirExtraHalf(t *testing.T) {
	r := newTestRing(t, 4, &Options{CQE32: true})
	for i := range uint64(20) {
		s := sqe(t, r)
		s.PrepNop()
		s.UserData = i
		if _, err := r.Submit(); err != nil {
			t.Fatal(err)
		}
		c := r.PeekCQE()
		if c == nil || c.UserData != i || r.PeekExtra() != [2]uint64{} {
			t.Fatalf("completion %d: %+v, extra %v", i, c, r.PeekExtra())
		}
		r.Advance(1)
	}
	if r.PeekCQE() != nil {
		t.Error("a completion too many")
	}
}
