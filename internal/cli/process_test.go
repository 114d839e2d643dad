// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience bounds every wait of these tests; nothing is expected to take a hundredth of it.
const patience = 30 * time.Second

// asProgram makes the test binary behave as the program. asActivated makes it first do as systemd does in the process that
// it is about to start: name the process's own number in LISTEN_PID.
const (
	asProgram   = "SLUICE_TEST_AS_PROGRAM"
	asActivated = "SLUICE_TEST_AS_ACTIVATED"
)

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) == "" {
		os.Exit(m.Run())
	}
	if os.Getenv(asActivated) != "" {
		os.Setenv("LISTEN_PID", fmt.Sprint(os.Getpid()))
	}
	os.Exit(MainOf(os.Args, Std()))
}

// process is a sluice that runs.
type process struct {
	t    *testing.T
	cmd  *exec.Cmd
	out  *bufio.Reader
	log  *logBuffer
	over chan error
	done bool
}

// logBuffer may be read while the process writes to it.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// program is the command that runs this test binary as sluice.
func program(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), asProgram+"=1", "GORACE=atexit_sleep_ms=0") // the race detector's reports come at once all the same
	return cmd
}

// spawn starts sluice; change may alter the command before.
func spawn(t *testing.T, change func(*exec.Cmd), args ...string) *process {
	t.Helper()
	p := &process{t: t, cmd: program(context.Background(), args...), log: &logBuffer{}, over: make(chan error, 1)}
	p.cmd.Stderr = p.log
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stdout = in
	p.out = bufio.NewReader(out)
	if change != nil {
		change(p.cmd)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	in.Close()
	go func() { p.over <- p.cmd.Wait() }()
	t.Cleanup(func() {
		out.Close()
		if !p.done {
			_ = p.cmd.Process.Kill() // the test has failed before it could wait
			<-p.over
		}
		if t.Failed() {
			t.Logf("standard error of sluice %s:\n%s", strings.Join(args, " "), p.log)
		}
	})
	return p
}

// ready waits for the line "ready".
func (p *process) ready() {
	p.t.Helper()
	line := make(chan string, 1)
	go func() {
		s, err := p.out.ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			s = err.Error()
		}
		line <- s
	}()
	select {
	case s := <-line:
		if s != "ready\n" {
			p.t.Fatalf("standard output: %q, want the line ready", s)
		}
	case <-time.After(patience):
		p.t.Fatal("it does not become ready")
	}
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// logged waits until the log holds text.
func (p *process) logged(text string) {
	p.t.Helper()
	for deadline := time.Now().Add(patience); !strings.Contains(p.log.String(), text); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			p.t.Fatalf("the log does not say %q", text)
		}
	}
}

// status waits for the end.
func (p *process) status() int {
	p.t.Helper()
	select {
	case err := <-p.over:
		p.done = true
		if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
			p.t.Fatal(err)
		}
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(patience):
		p.t.Fatal("it does not end")
		return -1
	}
}

// ends waits for the end and checks the status and what the log says.
func (p *process) ends(status int, says string) {
	p.t.Helper()
	if got := p.status(); got != status || !strings.Contains(p.log.String(), says) {
		p.t.Errorf("status %d, want %d and %q in\n%s", got, status, says, p.log)
	}
}

// killed waits for a process that was killed.
func (p *process) killed() {
	p.t.Helper()
	select {
	case <-p.over:
		p.done = true
	case <-time.After(patience):
		p.t.Fatal("a killed process does not end")
	}
}
