// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"

	"github.com/sluice-blk/sluice/internal/control"
)

// listenControl makes the control socket, before anybody is served, so that one which cannot be made is an error of the
// start.
func (d *Daemon) listenControl(ctx context.Context) error {
	d.started = time.Now()
	if d.config.Control == "" {
		return nil
	}
	if err := d.step(ctx, "listen on the control socket"); err != nil {
		return err
	}
	s, err := ListenPrivate(d.config.Control)
	if err != nil {
		return fmt.Errorf("make the control socket: %w", err)
	}
	d.control = s
	d.adoptSocket(s)
	return nil
}

// serveControl begins to answer. What it starts is the last thing that Start does and the first that Stop ends, so that
// the handlers find everything open and need no lock: disks, exports and loops do not change in between.
func (d *Daemon) serveControl() {
	if d.control == nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	server := control.NewServer(d.control, d.commands())
	var serving sync.WaitGroup
	serving.Go(func() {
		if err := server.Serve(ctx); err != nil {
			d.log.Error("control socket has ended, the disks go on", "err", err)
		}
	})
	d.undo = append(d.undo, func() error {
		cancel()
		serving.Wait()
		return nil
	})
}

// commands are what can be asked for, by name.
func (d *Daemon) commands() map[string]control.Handler {
	return map[string]control.Handler{
		"status": noArgs(func(ctx context.Context) (any, error) { return d.status(ctx) }),
		"trace-start": func(ctx context.Context, raw json.RawMessage) (any, error) {
			var args TraceArgs
			if err := control.DecodeArgs(raw, &args); err != nil {
				return nil, err
			}
			return struct{}{}, d.startTrace(ctx, args.File)
		},
		"trace-stop": noArgs(func(ctx context.Context) (any, error) { return d.stopTrace(ctx) }),
		"stats": func(ctx context.Context, raw json.RawMessage) (any, error) {
			var args StatsArgs
			if err := control.DecodeArgs(raw, &args); err != nil {
				return nil, err
			}
			return d.observe(ctx, &args)
		},
	}
}

// noArgs is a command without arguments.
func noArgs(do func(ctx context.Context) (any, error)) control.Handler {
	return func(ctx context.Context, raw json.RawMessage) (any, error) {
		if err := control.DecodeArgs(raw, &struct{}{}); err != nil {
			return nil, err
		}
		return do(ctx)
	}
}
