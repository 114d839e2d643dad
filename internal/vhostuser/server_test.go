// SPDX-License-Identifier: Apache-2.0

package vhostuser_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/vhosttest"
	. "github.com/sluice-blk/sluice/internal/vhostuser"
)

// listen makes a socket to serve at.
func listen(t *testing.T) (*net.UnixListener, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l, path
}

// serve runs a server until the returned function is called, which gives what Serve returned.
func serve(t *testing.T, l net.Listener, dev Device) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- NewServer(l, dev, nil).Serve(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-done:
			return err
		case <-time.After(patience):
			return errors.New("the server does not end")
		}
	})
	t.Cleanup(func() { _ = stop() })
	return stop
}

func dial(t *testing.T, path string) *vhosttest.Frontend {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	f, err := vhosttest.Dial(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

// guest does what a guest's whole life is to a back-end, up to the point where its ring runs.
func guest(t *testing.T, f *vhosttest.Frontend) {
	t.Helper()
	mem, err := vhosttest.NewMemory(0, 1<<16)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	if err := f.Negotiate(allFeatures, ProtocolOffered); err != nil {
		t.Fatal(err)
	}
	if err := f.SetMemTable(mem.Region()); err != nil {
		t.Fatal(err)
	}
	v := vhosttest.Vring{Size: 16, Desc: mem.UserAddr(0), Avail: mem.UserAddr(4096), Used: mem.UserAddr(8192),
		Kick: eventfd(t), Call: eventfd(t), Err: -1}
	if err := f.SetVring(v); err != nil {
		t.Fatal(err)
	}
}

func TestFrontEndsComeAndGo(t *testing.T) {
	checkDescriptors(t)
	l, path := listen(t)
	dev := newFake()
	stop := serve(t, l, dev)
	for range 5 {
		f := dial(t, path)
		guest(t, f)
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := stop(); err != nil {
		t.Errorf("server ended with %v", err)
	}
	dev.verify(t)
}

func TestSecondFrontEndWaitsUntilTheFirstLeaves(t *testing.T) {
	l, path := listen(t)
	dev := newFake()
	stop := serve(t, l, dev)
	first := dial(t, path)
	guest(t, first)
	second := dial(t, path)
	answered := make(chan error, 1)
	go func() {
		_, err := second.AskU64(GetFeatures)
		answered <- err
	}()
	for range 100 { // the first is served on while the second waits
		if _, err := first.AskU64(GetFeatures); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case err := <-answered:
		t.Fatalf("the second front-end was answered beside the first: %v", err)
	default:
	}
	if _, is := dev.vring(0); !is {
		t.Fatal("the first front-end's queue does not run any more")
	}
	_ = first.Close()
	select {
	case err := <-answered:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(patience):
		t.Fatal("the second front-end is not served")
	}
	guest(t, second)
	if err := stop(); err != nil {
		t.Errorf("server ended with %v", err)
	}
	dev.verify(t)
}

func TestEndOfContextDrainsTheQueuesAndClosesTheSession(t *testing.T) {
	l, path := listen(t)
	dev := newFake()
	stop := serve(t, l, dev)
	f := dial(t, path)
	guest(t, f)
	waiting := dial(t, path)
	if err := f.SendRaw([]byte{1, 0, 0, 0}); err != nil { // the session waits for the rest of a header
		t.Fatal(err)
	}
	if err := stop(); err != nil {
		t.Errorf("server ended with %v", err)
	}
	dev.verify(t)
	if _, err := f.Recv(GetFeatures); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("front-end: %v, want %v", err, io.EOF)
	}
	// The listener is still there, and whoever waits in its backlog is served by the next server.
	stop = serve(t, l, dev)
	guest(t, waiting)
	if err := stop(); err != nil {
		t.Errorf("server ended with %v", err)
	}
}

// A front-end that does not read its answers blocks its own session only for as long as the server wants it.
func TestFrontEndThatDoesNotReadDoesNotHoldUpTheEnd(t *testing.T) {
	l, path := listen(t)
	dev := newFake()
	stop := serve(t, l, dev)
	f := dial(t, path)
	f.Timeout = 200 * time.Millisecond
	var flood []byte
	for range 4096 {
		flood = AppendMessage(flood, GetFeatures, 0, nil)
	}
	for f.SendRaw(flood) == nil { // until the session writes no more, and so reads no more
	}
	if err := stop(); err != nil {
		t.Errorf("server ended with %v", err)
	}
	dev.verify(t)
}

func TestBrokenFrontEndsDoNotHarmTheNext(t *testing.T) {
	l, path := listen(t)
	dev := newFake()
	stop := serve(t, l, dev)
	for i, raw := range [][]byte{{}, {1, 2, 3}, make([]byte, 4096), Header{Request: 2, Flags: 1, Size: 1 << 31}.Append(nil)} {
		f := dial(t, path)
		guest(t, f)
		if err := f.SendRaw(raw); err != nil {
			t.Fatalf("%d: %v", i, err)
		}
		_ = f.Close()
	}
	guest(t, dial(t, path))
	if err := stop(); err != nil {
		t.Errorf("server ended with %v", err)
	}
	dev.verify(t)
}

// oddListener fails as it is told, then waits for the end.
type oddListener struct {
	*net.UnixListener
	errs []error
	conn net.Conn
}

func (l *oddListener) Accept() (net.Conn, error) {
	if len(l.errs) > 0 {
		err := l.errs[0]
		l.errs = l.errs[1:]
		return nil, fmt.Errorf("accept: %w", err)
	}
	if c := l.conn; c != nil {
		l.conn = nil
		return c, nil
	}
	return l.UnixListener.Accept()
}

func TestAcceptFailures(t *testing.T) {
	ul, path := listen(t)
	pipe, other := net.Pipe() // a connection that is no unix socket is turned away
	defer other.Close()
	l := &oddListener{UnixListener: ul, errs: []error{syscall.EMFILE, syscall.ECONNABORTED}, conn: pipe}
	stop := serve(t, l, newFake())
	guest(t, dial(t, path))
	if err := stop(); err != nil {
		t.Errorf("server ended with %v", err)
	}
	err := NewServer(&oddListener{UnixListener: ul, errs: []error{syscall.EINVAL}}, newFake(), nil).Serve(context.Background())
	if !errors.Is(err, syscall.EINVAL) {
		t.Errorf("server ended with %v, want %v", err, syscall.EINVAL)
	}
	_ = ul.Close()
	if err := NewServer(ul, newFake(), nil).Serve(context.Background()); !errors.Is(err, net.ErrClosed) {
		t.Errorf("server ended with %v, want %v", err, net.ErrClosed)
	}
}

// A front-end may hand over its own end of the conversation as a descriptor. Were it kept, the end of the front-end would
// never be seen, and its place be taken for ever.
func TestAFrontEndThatHandsOverItselfLeavesAllTheSame(t *testing.T) {
	l, path := listen(t)
	serve(t, l, newFake())
	f := dial(t, path)
	if err := f.Negotiate(FeatureVersion1|FeatureProtocolFeatures, ProtocolReplyAck); err != nil {
		t.Fatal(err)
	}
	raw, err := f.Conn().SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	for name, hand := range map[string]func(int, int) error{"kick": f.SetVringKick, "call": f.SetVringCall, "err": f.SetVringErr} {
		var refused error
		if err := raw.Control(func(fd uintptr) { refused = hand(0, int(fd)) }); err != nil {
			t.Fatal(err)
		}
		if !errors.Is(refused, vhosttest.ErrRefused) {
			t.Errorf("%s: the socket itself was taken: %v", name, refused)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	next := dial(t, path)
	if err := next.Negotiate(FeatureVersion1|FeatureProtocolFeatures, ProtocolReplyAck); err != nil {
		t.Errorf("the next front-end: %v", err)
	}
}
