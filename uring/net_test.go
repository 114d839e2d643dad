// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"net"
	"path/filepath"
	"syscall"
	"testing"
	"unsafe"
)

// sockets makes a connected pair of stream sockets.
func sockets(t *testing.T) (a, b int) {
	t.Helper()
	p, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		syscall.Close(p[0])
		syscall.Close(p[1])
	})
	return p[0], p[1]
}

func TestSendAndReceive(t *testing.T) {
	forEachKind(t, func(t *testing.T, r *Ring) {
		x, y := sockets(t)
		in := make([]byte, 10)
		s := sqe(t, r)
		s.PrepRecv(y, in, 0)
		s.UserData = 1
		quiet(t, r)
		s = sqe(t, r)
		s.PrepSend(x, []byte("hello"), syscall.MSG_NOSIGNAL)
		s.UserData = 2
		m := byUserData(t, wait(t, r, 2))
		wantRes(t, m, 1, 5)
		wantRes(t, m, 2, 5)
		if string(in[:5]) != "hello" {
			t.Errorf("received %q", in)
		}
	})
}

func TestMessages(t *testing.T) {
	r := newTestRing(t, 4, nil)
	x, y := sockets(t)
	out, in := []byte("hello"), make([]byte, 10)
	iov := []syscall.Iovec{{Base: &out[0], Len: 5}, {Base: &in[0], Len: 10}}
	must(t, r, "sendmsg", 5, func(s *SQE) { s.PrepSendmsg(x, &syscall.Msghdr{Iov: &iov[0], Iovlen: 1}, 0) })
	must(t, r, "recvmsg", 5, func(s *SQE) { s.PrepRecvmsg(y, &syscall.Msghdr{Iov: &iov[1], Iovlen: 1}, 0) })
	if string(in[:5]) != "hello" {
		t.Errorf("received %q", in)
	}
}

func TestShutdown(t *testing.T) {
	r := newTestRing(t, 4, nil)
	needOp(t, r, IORING_OP_SHUTDOWN, "5.11")
	x, y := sockets(t)
	must(t, r, "shutdown", 0, func(s *SQE) { s.PrepShutdown(x, syscall.SHUT_WR) })
	must(t, r, "receive at the end", 0, func(s *SQE) { s.PrepRecv(y, make([]byte, 1), 0) })
}

func TestAccept(t *testing.T) {
	r := newTestRing(t, 8, nil)
	l, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(l)
	path := filepath.Join(t.TempDir(), "s")
	if err := syscall.Bind(l, &syscall.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(l, 4); err != nil {
		t.Fatal(err)
	}
	connect := func() {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
	}
	var addr syscall.RawSockaddrAny
	size := uint32(unsafe.Sizeof(addr))
	connect()
	c := run(t, r, func(s *SQE) { s.PrepAccept(l, &addr, &size, syscall.SOCK_CLOEXEC) })
	if c.Res < 0 {
		t.Fatal(c.Err())
	}
	syscall.Close(int(c.Res))
	if addr.Addr.Family != syscall.AF_UNIX {
		t.Errorf("peer's family is %d", addr.Addr.Family)
	}

	s := sqe(t, r)
	s.PrepAccept(l, nil, nil, syscall.SOCK_CLOEXEC)
	s.IoPrio = IORING_ACCEPT_MULTISHOT
	s.UserData = 1
	for range 3 {
		connect()
		c := one(t, r, 1)
		if c.Res == -int32(syscall.EINVAL) {
			missing(t, "multishot accept", "5.19")
		}
		if c.Res < 0 || !c.More() {
			t.Fatalf("completion %+v", c)
		}
		syscall.Close(int(c.Res))
	}
	s = sqe(t, r)
	s.PrepCancel(1, 0)
	s.UserData = 2
	m := byUserData(t, wait(t, r, 2))
	wantRes(t, m, 1, -int32(syscall.ECANCELED))
	wantRes(t, m, 2, 0)
}

func TestSendZeroCopyTellsWhenTheBufferIsFree(t *testing.T) {
	r := newTestRing(t, 4, nil)
	needOp(t, r, IORING_OP_SEND_ZC, "6.0")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Skipf("needs a loopback network: %v", err)
	}
	defer l.Close()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Skipf("needs a loopback network: %v", err)
	}
	defer conn.Close()
	peer, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	b := []byte("hello")
	s := sqe(t, r)
	_ = raw.Control(func(fd uintptr) { s.PrepSendZC(int(fd), b, 0, 0) })
	s.UserData = 1
	if c := one(t, r, 1); c.Res != 5 || !c.More() {
		t.Fatalf("result %+v", c)
	}
	in := make([]byte, 5)
	if _, err := peer.Read(in); err != nil || string(in) != "hello" {
		t.Errorf("peer read %q, %v", in, err)
	}
	if c := one(t, r, 1); c.Flags&IORING_CQE_F_NOTIF == 0 || c.More() {
		t.Errorf("notification %+v", c)
	}
}
