// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/sluice-blk/sluice/internal/daemon"
)

// service runs a daemon as a process: it starts it, tells who waits that it is ready, and stops it at a signal.
type service struct {
	daemon  *daemon.Daemon
	log     *slog.Logger
	out     io.Writer // hears "ready"
	ready   *os.File  // hears it too; nil: none
	pidFile string    // empty: none
	manager *daemon.ServiceManager
}

// run returns when the daemon has stopped: with nil after a signal.
func (s *service) run() error {
	// Whoever reads the log or waited for "ready" may go away; the guests' disks must not go with them.
	signal.Ignore(syscall.SIGPIPE)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer signal.Stop(signals)
	over := make(chan struct{})
	defer close(over)
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	go s.heed(signals, over, cancel)

	err := s.start(ctx)
	if err == nil {
		select {
		case <-ctx.Done():
		case err = <-s.daemon.Failed():
		}
	}
	s.tell("STOPPING=1")
	stopErr := s.daemon.Stop(context.Background())
	s.forgetPID()
	if errors.Is(err, errSignalled) {
		err = nil // a start that a signal cut short is a stop as it was asked for
	}
	if err == nil && stopErr == nil {
		s.log.Info("stopped")
	}
	return errors.Join(err, stopErr)
}

var errSignalled = errors.New("stopped by a signal")

// echoMax is how long after the first signal another one counts as its echo. timeout(1) and some supervisors send the
// signal to the process and, at once, to its group again.
const echoMax = 250 * time.Millisecond

// heed turns the first signal into a stop and the second into the end.
func (s *service) heed(signals <-chan os.Signal, over <-chan struct{}, cancel context.CancelCauseFunc) {
	select {
	case sig := <-signals:
		s.log.Info("stopping: requests in flight are finished first, a second signal ends at once", "signal", sig.String())
		cancel(errSignalled)
	case <-over:
		return
	}
	for first := time.Now(); ; {
		select {
		case sig := <-signals:
			if time.Since(first) < echoMax {
				continue
			}
			s.log.Error("ended by a second signal: requests in flight are abandoned", "signal", sig.String())
			s.daemon.Abandon()
			s.forgetPID()
			os.Exit(exitFailure)
		case <-over:
			return
		}
	}
}

func (s *service) start(ctx context.Context) error {
	if err := s.daemon.Start(ctx); err != nil {
		return err
	}
	if s.pidFile != "" {
		if err := daemon.WritePIDFile(s.pidFile); err != nil {
			return err
		}
	}
	return s.announce()
}

// announce tells everybody who waits. A reader of standard output that has gone away is no reason to stop; a broken
// --ready-fd is one, since somebody waits behind it.
func (s *service) announce() error {
	if s.ready != nil {
		_, err := s.ready.WriteString("ready\n")
		if err = errors.Join(err, s.ready.Close()); err != nil {
			return fmt.Errorf("write to --ready-fd: %w", err)
		}
	}
	if _, err := fmt.Fprintln(s.out, "ready"); err != nil {
		s.log.Warn("cannot say on standard output that the daemon is ready", "err", err)
	}
	s.tell("READY=1")
	return nil
}

func (s *service) tell(state string) {
	if err := s.manager.Notify(state); err != nil {
		s.log.Warn("the service manager does not listen", "err", err)
	}
}

func (s *service) forgetPID() {
	if s.pidFile != "" {
		daemon.RemovePIDFile(s.pidFile)
	}
}
