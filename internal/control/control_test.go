// SPDX-License-Identifier: Apache-2.0

package control

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what must come.
const patience = 30 * time.Second

// serve starts a server with a command that gives its text back, one that fails, and one that waits for its context.
func serve(t *testing.T) (socket string, stop func() error) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "control.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := NewServer(l, map[string]Handler{
		"echo": func(_ context.Context, args json.RawMessage) (any, error) {
			var a struct{ Text string }
			err := DecodeArgs(args, &a)
			return a, err
		},
		"fail": func(context.Context, json.RawMessage) (any, error) { return nil, errors.New("it cannot be done") },
		"wait": func(ctx context.Context, _ json.RawMessage) (any, error) { <-ctx.Done(); return nil, ctx.Err() },
	})
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Serve(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel()
		err := <-ended
		return errors.Join(err, l.Close())
	})
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
	return socket, stop
}

// raw is a client that says what it likes.
func raw(t *testing.T, socket string) (net.Conn, *bufio.Reader) {
	t.Helper()
	c, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	return c, bufio.NewReader(c)
}

func TestEachLineIsAnswered(t *testing.T) {
	socket, _ := serve(t)
	c, r := raw(t, socket)
	for _, x := range []struct{ line, want string }{
		{`{"v":1,"id":7,"cmd":"echo","args":{"Text":"hello"}}`, `{"v":1,"id":7,"ok":true,"result":{"Text":"hello"}}`},
		{`{"v":1,"cmd":"echo"}`, `{"v":1,"ok":true,"result":{"Text":""}}`},
		{`{"v":1,"id":2,"cmd":"fail"}`, `"id":2,"ok":false,"error":"it cannot be done"`},
		{`{"v":1,"id":3,"cmd":"frobnicate"}`, `unknown command \"frobnicate\" (this server knows echo, fail, wait)`},
		{`{"v":2,"id":4,"cmd":"echo"}`, `"id":4,"ok":false,"error":"read request: version is 2, this server speaks 1`},
		{`{"cmd":"echo"}`, `version is 0`},
		{`{"v":1}`, `no command is given`},
		{`{"v":1,"cmd":"echo","args":[1]}`, `args is not an object`},
		{`{"v":1,"cmd":"echo","args":{"Txet":"x"}}`, `unknown field \"Txet\"`},
		{`{"v":1,"cmd":"echo","verbose":true}`, `unknown field \"verbose\"`},
		{`{"v":1,"cmd":"echo"}{}`, `more than one value`},
		{`hello`, `"ok":false,"error":"read request: invalid character`},
		{"\n\t\n" + `{"v":1,"id":9,"cmd":"echo"}`, `"id":9,"ok":true`}, // lines of nothing ask nothing
	} {
		fmt.Fprintln(c, x.line)
		got, err := r.ReadString('\n')
		if err != nil {
			t.Fatalf("%s: %v", x.line, err)
		}
		if !strings.Contains(got, x.want) || !strings.Contains(got, `"v":1`) {
			t.Errorf("%s is answered with %s want %s", x.line, got, x.want)
		}
	}
}

func TestALineThatIsTooLongEndsTheConversation(t *testing.T) {
	socket, _ := serve(t)
	c, r := raw(t, socket)
	go func() { _, _ = c.Write([]byte(strings.Repeat("x", LineMax+4096))) }()
	got, err := r.ReadString('\n')
	if err != nil || !strings.Contains(got, "more than 65536 bytes") {
		t.Errorf("answer %q, error %v", got, err)
	}
	if _, err := r.ReadString('\n'); err == nil {
		t.Error("the conversation goes on")
	}
}

func TestSeveralClientsAtATimeAndNoMoreThanThereArePlaces(t *testing.T) {
	socket, _ := serve(t)
	var clients []*Client
	for i := range ClientsMax {
		c, err := Dial(t.Context(), socket)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		var got struct{ Text string }
		if err := c.Do(t.Context(), "echo", map[string]string{"Text": fmt.Sprint(i)}, &got); err != nil || got.Text != fmt.Sprint(i) {
			t.Fatalf("client %d got %q, error %v", i, got.Text, err)
		}
		clients = append(clients, c)
	}
	_, r := raw(t, socket)
	if got, err := r.ReadString('\n'); err != nil || !strings.Contains(got, "clients are served already") {
		t.Errorf("one client too many is told %q, error %v", got, err)
	}
	_ = clients[0].Close()
	for deadline := time.Now().Add(patience); ; {
		c, err := Dial(t.Context(), socket)
		if err != nil {
			t.Fatal(err)
		}
		err = c.Do(t.Context(), "echo", nil, nil)
		_ = c.Close()
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the place of a client that left is not given to another")
		}
	}
}

func TestTheEndOfTheServerWaitsForNoClient(t *testing.T) {
	socket, stop := serve(t)
	idle, err := Dial(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	defer idle.Close()
	if err := idle.Do(t.Context(), "echo", nil, nil); err != nil {
		t.Fatal(err)
	}
	busy, err := Dial(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	answer := make(chan error, 1)
	go func() { answer <- busy.Do(context.Background(), "wait", nil, nil) }()
	if err := stop(); err != nil {
		t.Error(err)
	}
	if err := <-answer; err == nil {
		t.Error("a command that was cut off succeeded")
	}
	if err := idle.Do(t.Context(), "echo", nil, nil); err == nil {
		t.Error("a server that ended answers")
	}
	if _, err := Dial(t.Context(), socket); err == nil {
		t.Error("a server that ended takes clients")
	}
}

func TestAClientGivesUpWithItsContext(t *testing.T) {
	socket, _ := serve(t)
	c, err := Dial(t.Context(), socket)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("enough")
	go cancel(cause)
	if err := c.Do(ctx, "wait", nil, nil); !errors.Is(err, cause) {
		t.Errorf("error %v, want %v", err, cause)
	}
}

// FuzzParse: whatever is sent, there is a request or an error, and a request that was taken is one that can be sent again.
func FuzzParse(f *testing.F) {
	for _, s := range []string{`{"v":1,"id":7,"cmd":"stats","args":{"disk":"a"}}`, `{"v":1,"cmd":"x","args":null}`, `{"v":1`, `[]`, `{"v":1,"cmd":"x"} {}`,
		`{"v":1,"cmd":"x","args":  {"a":{"b":[1,2,3]}}}`, `{"v":1e0,"cmd":"x"}`, `{"v":1,"id":18446744073709551615,"cmd":"\u0000"}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, line []byte) {
		r, err := Parse(line)
		if err != nil {
			return
		}
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatalf("%q was taken and cannot be sent: %v", line, err)
		}
		again, err := Parse(b)
		if err != nil || again.ID != r.ID || again.Command != r.Command {
			t.Fatalf("%q became %q, and that %+v, %v", line, b, again, err)
		}
		var any map[string]any
		_ = DecodeArgs(r.Args, &any) // must return
	})
}
