// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/trace"
)

// TraceArgs are the arguments of the command "trace-start".
type TraceArgs struct {
	File string `json:"file"` // made, or emptied; no symbolic link
}

// TraceResult is the answer to "trace-stop".
type TraceResult struct {
	File     string `json:"file"`
	Requests uint64 `json:"requests"` // seen since the start
	Kept     int    `json:"kept"`     // of these, written
}

// tracer is the one trace that can run at a time.
type tracer struct {
	mu      sync.Mutex
	file    *os.File // nil: none runs
	loops   []*aio.Loop
	buffers []*trace.Buffer // one a loop
}

// traceFromStart begins the trace that the configuration asks for, and has it written at the end.
func (d *Daemon) traceFromStart(ctx context.Context) error {
	if d.config.Trace != "" {
		if err := d.step(ctx, "start the trace"); err != nil {
			return err
		}
		if err := d.startTrace(ctx, d.config.Trace); err != nil {
			return err
		}
	}
	d.undo = append(d.undo, func() error {
		_, err := d.stopTrace(context.Background())
		if errors.Is(err, errNoTrace) {
			return nil
		}
		return err
	})
	return nil
}

var errNoTrace = errors.New("stop the trace: none runs")

// startTrace opens the file, so that one which cannot be written is an error now, and lets the queues trace.
func (d *Daemon) startTrace(ctx context.Context, path string) error {
	t := &d.tracer
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.file != nil {
		return fmt.Errorf("start the trace: one runs already, to %s (stop it first)", t.file.Name())
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return fmt.Errorf("start the trace: %w", err)
	}
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return errors.Join(fmt.Errorf("start the trace: %s is not a regular file", path), err, f.Close())
	}
	t.file, t.loops, t.buffers = f, d.loops.All(), nil
	for range t.loops {
		t.buffers = append(t.buffers, trace.NewBuffer(trace.Window))
	}
	if err := d.setTrace(ctx); err != nil {
		t.buffers = nil
		err = errors.Join(err, d.setTrace(ctx), f.Close())
		t.file = nil
		return fmt.Errorf("start the trace: %w", err)
	}
	return nil
}

// setTrace gives every device the buffers of its loops, or takes them away.
func (d *Daemon) setTrace(ctx context.Context) error {
	var errs []error
	for _, e := range d.exports {
		var buffers []*trace.Buffer
		for _, l := range e.disk.loops {
			for i := range d.tracer.buffers {
				if d.tracer.loops[i] == l {
					buffers = append(buffers, d.tracer.buffers[i])
				}
			}
		}
		errs = append(errs, e.device.SetTrace(ctx, e.disk.Name(), e.name, buffers))
	}
	return errors.Join(errs...)
}

// stopTrace ends the trace and writes it.
func (d *Daemon) stopTrace(ctx context.Context) (*TraceResult, error) {
	t := &d.tracer
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.file == nil {
		return nil, errNoTrace
	}
	buffers := t.buffers
	t.buffers = nil
	if err := d.setTrace(ctx); err != nil {
		t.buffers = buffers // a queue may still write to them
		return nil, fmt.Errorf("stop the trace: %w", err)
	}
	r := &TraceResult{File: t.file.Name()}
	for _, b := range buffers {
		r.Requests += b.Added()
		r.Kept += b.Kept()
	}
	err := errors.Join(trace.Write(t.file, buffers), t.file.Close())
	t.file = nil
	if err != nil {
		return nil, fmt.Errorf("write the trace to %s: %w", r.File, err)
	}
	return r, nil
}
