// SPDX-License-Identifier: Apache-2.0

package blocktest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/aio"
)

// Patience is far beyond what any of this takes on a machine that is busy with something else.
const Patience = 60 * time.Second

// Loop runs a loop until the test ends. A poller that the machine cannot give skips the test.
func Loop(t testing.TB, o *aio.LoopOptions) *aio.Loop {
	t.Helper()
	l, err := aio.NewLoop(o)
	if err != nil {
		if o != nil && o.Poller == aio.PollerIOUring {
			t.Skipf("needs io_uring: %v", err)
		}
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("loop ended with %v", err)
			}
		case <-time.After(Patience):
			t.Error("loop does not end")
		}
	})
	return l
}

// On runs fn on the loop and waits for it.
func On(t testing.TB, l *aio.Loop, fn func() error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	err := l.Call(ctx, fn)
	if ctx.Err() != nil {
		t.Fatalf("loop does not answer: %v", err)
	}
	return err
}
