// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/sluice-blk/sluice/aio"
)

// Loops are event loops that run, each on its own thread. Safe for concurrent use.
type Loops struct {
	list   []*aio.Loop
	cancel context.CancelFunc
	wg     sync.WaitGroup
	died   chan error // one for each loop that ended without being told to
}

// StartLoops makes the loops and runs them. What cannot be set up is an error here; none runs then.
func StartLoops(ctx context.Context, configs []LoopConfig) (*Loops, error) {
	if len(configs) == 0 {
		configs = []LoopConfig{{}}
	}
	list := make([]*aio.Loop, len(configs))
	for i, c := range configs {
		l, err := aio.NewLoop(&aio.LoopOptions{
			Poller: c.Poller, Unbatched: c.Unbatched, Pin: c.Pin, CPU: c.CPU, PollMax: c.PollMax,
			FixedBuffers: c.FixedBuffers,
			Name:         fmt.Sprintf("loop %d", i),
		})
		if err != nil {
			for _, made := range list[:i] {
				err = errors.Join(err, made.Close())
			}
			return nil, fmt.Errorf("start loops: %w", err)
		}
		list[i] = l
	}
	run, cancel := context.WithCancel(context.Background())
	s := &Loops{list: list, cancel: cancel, died: make(chan error, len(list))}
	for _, l := range list {
		s.wg.Go(func() {
			if err := l.Run(run); err != nil || run.Err() == nil {
				s.died <- errors.Join(err, fmt.Errorf("%s has ended", l.Name()))
			}
		})
	}
	if err := s.turnOnce(ctx); err != nil {
		s.Stop()
		return nil, fmt.Errorf("start loops: %w", err)
	}
	return s, nil
}

// turnOnce waits until every loop has turned, which it does not when its thread could not be set up. A loop that ends
// runs what was posted before, so one answer proves nothing; but it takes nothing more, so a second one does.
func (s *Loops) turnOnce(ctx context.Context) error {
	for _, l := range s.list {
		for range 2 {
			err := l.Call(ctx, func() error { return nil })
			if errors.Is(err, aio.ErrClosed) {
				return <-s.died
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// All are the loops, in the order of their configuration. The slice is not the caller's to change.
func (s *Loops) All() []*aio.Loop { return s.list }

// Died gives the error of a loop that ended by itself.
func (s *Loops) Died() <-chan error { return s.died }

// Stop ends the loops and waits until their threads are gone. Nothing may be open on them.
func (s *Loops) Stop() {
	s.cancel()
	s.wg.Wait()
}
