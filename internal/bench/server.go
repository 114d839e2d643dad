// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// server is a process that serves a socket.
type server struct {
	cmd  *exec.Cmd
	out  bytes.Buffer // both streams; read it after end
	gone chan error
}

// startServer starts the subject's program. It ends with ctx, or when told to.
func startServer(ctx context.Context, s *Subject, socket string) (*server, error) {
	args := make([]string, len(s.Args))
	for i, a := range s.Args {
		args[i] = strings.ReplaceAll(a, "%S", socket)
	}
	v := &server{gone: make(chan error, 1)}
	v.cmd = exec.CommandContext(ctx, args[0], args[1:]...)
	v.cmd.Stdout, v.cmd.Stderr = &v.out, &v.out
	v.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := v.cmd.Start(); err != nil {
		return nil, err
	}
	go func() { v.gone <- v.cmd.Wait() }()
	return v, nil
}

// while runs work, whose context ends when the server does.
func (v *server) while(ctx context.Context, work func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		select {
		case err := <-v.gone:
			v.gone <- err
			cancel(fmt.Errorf("the server ended: %v", err)) // end tells the error itself
		case <-ctx.Done():
		}
	}()
	err := work(ctx)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = errors.Join(cause, err)
	}
	cancel(nil)
	<-ended
	return err
}

// serverEndMax is how long a server may take to stop before it is killed.
var serverEndMax = 10 * time.Second

// errStubborn is a server that had to be killed. Of ours that is a failure; the peer's now and then hangs in its last
// drain, and what was measured before is worth no less for it.
var errStubborn = errors.New("the server did not end at SIGTERM")

// end asks the server to stop, and makes it after a while.
func (v *server) end() error {
	if err := v.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("end the server: %w", err)
	}
	select {
	case err := <-v.gone:
		return endedAsAsked(err)
	case <-time.After(serverEndMax):
		err := v.cmd.Process.Kill()
		<-v.gone // that it was killed is no news
		return errors.Join(errStubborn, err)
	}
}

// endedAsAsked leaves out the death by the very signal that it was sent: a server need not catch it.
func endedAsAsked(err error) error {
	if exit := new(exec.ExitError); errors.As(err, &exit) {
		if s, ok := exit.Sys().(syscall.WaitStatus); ok && s.Signaled() && s.Signal() == syscall.SIGTERM {
			return nil
		}
	}
	return err
}

// measure runs one subject once.
func measure(ctx context.Context, s *Subject, socket string, w Workload, what Observation) (res *Result, err error) {
	if s.Role == Direct {
		return runFio(ctx, s, w, what)
	}
	v, err := startServer(ctx, s, socket)
	if err != nil {
		return nil, err
	}
	err = v.while(ctx, func(ctx context.Context) (err error) {
		res, err = Observe(ctx, socket, w, what)
		return err
	})
	ended := v.end()
	if err == nil && s.Role != Ours && errors.Is(ended, errStubborn) {
		res.Killed, ended = true, nil
	}
	if err = errors.Join(err, ended); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, v.out.Bytes())
	}
	res.Server = loggedCounters(v.out.Bytes())
	return res, nil
}

// loggedCounters reads what a server of ours logs as JSON when it stops: the whole of its life, so that ratios are worth
// something and sums are not. It is nil for other servers.
func loggedCounters(log []byte) *ServerCounters {
	var c ServerCounters
	for line := range bytes.Lines(log) {
		var l struct {
			Requests      uint64 `json:"requests"`
			Kicks         uint64 `json:"kicks"`
			Notifications uint64 `json:"notifications"`
			Submitted     uint64 `json:"submitted"`
			Submissions   uint64 `json:"submissions"`
			SysCalls      uint64 `json:"syscalls"`
			Poller        string `json:"poller"`
		}
		if json.Unmarshal(line, &l) != nil {
			continue
		}
		c.Requests += l.Requests
		c.Kicks += l.Kicks
		c.Notifications += l.Notifications
		c.Submitted += l.Submitted
		c.Submissions += l.Submissions
		c.SysCalls += l.SysCalls
		if l.Poller != "" {
			c.Poller = l.Poller
		}
	}
	if c.Requests == 0 {
		return nil
	}
	return &c
}
