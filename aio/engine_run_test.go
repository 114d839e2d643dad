// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// chain is a request that submits itself again until it has completed often enough.
type chain struct {
	ask
	f     *File
	left  int
	alive *int
	done  chan<- error
}

// Complete goes on with the next page, or reports the end of the last chain.
func (c *chain) Complete(_ *Request, err error) {
	if c.left--; c.left > 0 && err == nil {
		c.Offset = (c.Offset + page) % (64 * page)
		c.f.Submit(&c.Request)
		return
	}
	if *c.alive--; *c.alive == 0 || err != nil {
		c.done <- err
	}
}

// TestEnginesOnARunningLoop lets the loop sleep for as long as it likes between completions: one that does not wake it is
// a hang here. The requests come from chains, one and several, so that the loop falls asleep at all moments.
func TestEnginesOnARunningLoop(t *testing.T) {
	for _, s := range []engineSetup{
		{EngineIOUring, PollerIOUring, true},
		{EngineLinuxAIO, PollerEpoll, false},
		{EngineLinuxAIO, PollerEpoll, true},
		{EngineLinuxAIO, PollerPoll, true},
		{EngineLinuxAIO, PollerIOUring, true},
		{EngineThreads, PollerEpoll, false},
		{EngineThreads, PollerPoll, false},
		{EngineThreads, PollerIOUring, false},
	} {
		t.Run(s.String(), func(t *testing.T) {
			ignore := goleak.IgnoreCurrent()
			runChains(t, s)
			goleak.VerifyNone(t, ignore)
		})
	}
}

func runChains(t *testing.T, s engineSetup) {
	// The bed makes the file and the memory; its own loop stays idle.
	b := newEngineBed(t, engineSetup{EngineThreads, PollerPoll, s.direct}, nil)
	fd := b.create(64 * page)
	l, err := NewLoop(&LoopOptions{Poller: s.poller})
	if err != nil {
		t.Skipf("needs poller %s: %v", s.poller, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
	}()
	var f *File
	if err := l.Call(ctx, func() (err error) { f, err = l.OpenFile(fd, &FileOptions{Engine: s.kind}); return err }); err != nil {
		t.Fatal(err)
	}
	for _, depth := range []int{1, 7} {
		done := make(chan error, depth)
		alive := depth
		chains := make([]*chain, depth)
		for i := range chains {
			c := &chain{ask: *b.ask(OpRead, int64(i)*page, b.buffer(page)), f: f, left: 300, alive: &alive, done: done}
			c.Done = c
			chains[i] = c
		}
		l.Post(func() {
			for _, c := range chains {
				f.Submit(&c.Request)
			}
		})
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(enginePatience):
			t.Fatalf("depth %d: stuck", depth)
		}
	}
	if err := l.Call(ctx, f.Close); err != nil && !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}
