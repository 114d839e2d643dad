// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// outputMax bounds Result.Output and consoleMax Result.Console: a script that prints for ever must not eat the
	// host. The live copies are not bounded.
	outputMax  = 16 << 20
	consoleMax = 64 << 10
	stderrMax  = 4 << 10
)

// ErrKilled is what Wait returns of a guest that Kill ended.
var ErrKilled = errors.New("guest was killed")

// A Result tells how a boot went. Of a boot that failed it holds what was seen until then.
type Result struct {
	Status      int    // exit status of the script
	Output      []byte // what the script printed, exactly; at most 16 MiB
	Truncated   bool   // the script printed more than that
	Console     []byte // the last 64 KiB of the kernel's console
	Accel       Accel
	AccelReason string
	Boot        time.Duration // from the start of QEMU to the script's, on the host's clock
	Script      time.Duration // from the script's start to its end, on the host's clock; 0 when both were heard of at once
	GuestUptime time.Duration // the guest's uptime when the script began
}

// A Guest is a running virtual machine. All methods are safe for concurrent use.
type Guest struct {
	cfg    Config
	cmd    *exec.Cmd
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when everything is over and err is set

	mu      sync.Mutex
	split   *splitter
	result  Result
	console tail
	stderr  tail
	started time.Time
	changed chan struct{} // closed and renewed whenever output or phase change
	alive   bool          // something was printed
	err     error
}

// Run boots a guest, waits for its end and returns what its script did. The error is about the guest; a script that
// fails is a Result with a Status.
func Run(ctx context.Context, cfg Config) (Result, error) {
	g, err := Boot(ctx, cfg)
	if err != nil {
		return Result{}, err
	}
	return g.Wait()
}

// Boot starts a guest. It ends with its script, with ctx, with cfg.Timeout, with Kill or with this process, whichever
// comes first; Wait must be called to learn how.
func Boot(ctx context.Context, cfg Config) (*Guest, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	qemu, err := exec.LookPath(cmp.Or(cfg.QEMU, defaultQEMU))
	if err != nil {
		return nil, fmt.Errorf("boot guest: %w (install qemu-system-x86)", err)
	}
	cfg.QEMU = qemu
	if err := cfg.adaptToQEMU(ctx); err != nil {
		return nil, fmt.Errorf("boot guest: %w", err)
	}
	if cfg.Kernel == nil {
		if cfg.Kernel, err = EnsureKernel(ctx, ""); err != nil {
			return nil, err
		}
	}
	accel, reason, err := ChooseAccel(ctx, &cfg)
	if err != nil {
		return nil, fmt.Errorf("boot guest: %w", err)
	}
	g := &Guest{
		cfg: cfg, done: make(chan struct{}), changed: make(chan struct{}),
		result:  Result{Accel: accel, AccelReason: reason},
		console: tail{max: consoleMax}, stderr: tail{max: stderrMax},
	}
	if err := g.start(ctx); err != nil {
		return nil, err
	}
	return g, nil
}

func (g *Guest) start(ctx context.Context) error {
	nonce := rand.Text()
	image, err := g.cfg.bootImage(ctx, nonce)
	if err != nil {
		return err
	}
	defer image.Close()
	output, outputWriter, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("boot guest: %w", err)
	}
	defer outputWriter.Close()
	g.split = newSplitter(nonce, g.takeOutput)

	timeout := cmp.Or(g.cfg.Timeout, defaultTimeout)
	ctx, g.cancel = context.WithCancelCause(ctx)
	ctx, stop := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("not finished after %v", timeout))
	args := g.cfg.CommandLine(g.result.Accel, "/dev/fd/3", "/dev/fd/4")
	g.cmd = exec.CommandContext(ctx, args[0], args[1:]...)
	g.cmd.ExtraFiles = []*os.File{image, outputWriter}
	g.cmd.Stdout = lineWriter{g, (*Guest).takeConsole}
	g.cmd.Stderr = lineWriter{g, (*Guest).takeStderr}
	g.cmd.WaitDelay = 10 * time.Second
	// Own process group: an interrupt on the terminal is ours to handle. The death signal is for the case that we
	// cannot handle anything any more.
	g.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}

	started := make(chan error)
	go g.supervise(ctx, stop, output, started)
	return <-started
}

// supervise starts QEMU and lives as long as it does. The death signal goes out when the thread that started the child
// ends, not the process, so the thread is held until then.
func (g *Guest) supervise(ctx context.Context, stop context.CancelFunc, output *os.File, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer stop()
	defer output.Close()

	g.mu.Lock()
	g.started = time.Now()
	g.mu.Unlock()
	if err := g.cmd.Start(); err != nil {
		g.cancel(nil)
		started <- fmt.Errorf("boot guest: %w", err)
		return
	}
	started <- nil

	silence := time.AfterFunc(g.silence(), g.checkSilence)
	defer silence.Stop()
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		io.Copy(lineWriter{g, (*Guest).takeSerial}, output)
	}()
	waitErr := g.cmd.Wait()
	<-drained
	g.finish(ctx, waitErr)
}

func (g *Guest) silence() time.Duration {
	if g.cfg.Silence > 0 {
		return g.cfg.Silence
	}
	if g.result.Accel == AccelKVM {
		return silenceKVM
	}
	return silenceTCG
}

// checkSilence ends a guest that has shown no sign of life.
func (g *Guest) checkSilence() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.alive {
		g.cancel(fmt.Errorf("nothing printed for %v (look at: a vhost-user server that does not answer, for which QEMU "+
			"waits before the guest runs; /dev/kvm that cannot run a stock kernel, for which there is accelerator tcg; "+
			"a kernel without serial console; a machine too busy for this limit)", g.silence()))
	}
}

// finish settles the outcome once QEMU is gone and its last words are read.
func (g *Guest) finish(ctx context.Context, waitErr error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.split.Close()
	g.result.Console = g.console.bytes
	g.err = g.outcome(context.Cause(ctx), waitErr)
	g.wake()
	close(g.done)
	g.cancel(nil)
}

// outcome finds the nearest cause: a guest that powered off by itself is a success even if somebody lost patience with
// it in that moment.
func (g *Guest) outcome(cause, waitErr error) error {
	where := phaseText[g.split.phase]
	switch {
	case g.split.phase == phaseExited && waitErr == nil:
		return nil
	case errors.Is(cause, ErrKilled):
		return fmt.Errorf("%w %s", ErrKilled, where)
	case cause != nil:
		return g.explain(fmt.Errorf("guest was stopped %s: %w", where, cause))
	case g.split.phase == phaseFailed:
		return g.explain(fmt.Errorf("prepare guest: %s", g.split.fail))
	case waitErr != nil:
		return g.explain(fmt.Errorf("run guest: qemu ended %s: %w", where, waitErr))
	default:
		return g.explain(fmt.Errorf("run guest: it went down %s", where))
	}
}

// explain adds what helps to find the reason: accelerator, QEMU's last words, the last of the console.
func (g *Guest) explain(err error) error {
	text := []string{fmt.Sprintf("accelerator: %s (%s)", g.result.Accel, g.result.AccelReason)}
	if words := g.stderr.lastLines(5); words != "" {
		text = append(text, "qemu: "+words)
	}
	if line := g.console.line("Kernel panic"); line != "" {
		text = append(text, "console: "+line)
	}
	if words := g.console.lastLines(12); words != "" {
		text = append(text, "console: "+words)
	}
	return fmt.Errorf("%w\n%s", err, strings.Join(text, "\n"))
}

// Wait waits for the end of the guest. It may be called more than once.
func (g *Guest) Wait() (Result, error) {
	<-g.done
	return g.result, g.err
}

// Done is closed at the end of the guest.
func (g *Guest) Done() <-chan struct{} { return g.done }

// Pid returns QEMU's process id.
func (g *Guest) Pid() int { return g.cmd.Process.Pid }

// Kill ends QEMU with SIGKILL, as a crash would, and returns when it is gone. Wait then returns ErrKilled, unless the
// guest had ended before. Killing twice does no harm.
func (g *Guest) Kill() {
	g.cancel(ErrKilled)
	<-g.done
}

// WaitOutput waits until the script has printed text, and fails when the guest ends without.
func (g *Guest) WaitOutput(ctx context.Context, text string) error {
	for from := 0; ; {
		g.mu.Lock()
		output, changed := g.result.Output, g.changed
		g.mu.Unlock()
		if bytes.Contains(output[from:], []byte(text)) {
			return nil
		}
		from = max(0, len(output)-len(text)+1)
		select {
		case <-changed:
			continue
		case <-ctx.Done():
			return fmt.Errorf("wait for guest to print %q: %w", text, context.Cause(ctx))
		case <-g.done:
		}
		if _, err := g.Wait(); err != nil {
			return fmt.Errorf("wait for guest to print %q: %w", text, err)
		}
		if !bytes.Contains(g.result.Output, []byte(text)) {
			return fmt.Errorf("wait for guest to print %q: it ended without", text)
		}
		return nil
	}
}

// A lineWriter hands what comes from one of QEMU's three outputs to a method, under the guest's lock.
type lineWriter struct {
	guest *Guest
	take  func(*Guest, []byte)
}

func (w lineWriter) Write(p []byte) (int, error) {
	w.guest.mu.Lock()
	defer w.guest.mu.Unlock()
	w.take(w.guest, p)
	return len(p), nil
}

func (g *Guest) takeStderr(p []byte) { g.stderr.Write(p) }

func (g *Guest) takeConsole(p []byte) {
	g.alive = true
	g.console.Write(p)
	copyTo(g.cfg.Console, p)
}

// takeSerial takes the second line; what of it is output comes back to takeOutput.
func (g *Guest) takeSerial(p []byte) {
	g.alive = true
	before := g.split.phase
	g.split.Write(p)
	if g.split.phase == before {
		return
	}
	since := time.Since(g.started)
	if before < phaseScript && (g.split.phase == phaseScript || g.split.phase == phaseExited) {
		g.result.Boot = since
		g.result.GuestUptime = g.split.start
	}
	if g.split.phase == phaseExited {
		g.result.Script = since - g.result.Boot
		g.result.Status = g.split.status
	}
	g.wake()
}

func (g *Guest) takeOutput(p []byte) {
	keep := min(len(p), outputMax-len(g.result.Output))
	g.result.Truncated = g.result.Truncated || keep < len(p)
	g.result.Output = append(g.result.Output, p[:keep]...)
	copyTo(g.cfg.Console, p)
	copyTo(g.cfg.Output, p)
	g.wake()
}

func (g *Guest) wake() {
	close(g.changed)
	g.changed = make(chan struct{})
}

// copyTo ignores errors: a live copy that fails is no reason to end the guest.
func copyTo(w io.Writer, p []byte) {
	if w != nil {
		w.Write(p)
	}
}
