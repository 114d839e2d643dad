// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/sluice-blk/sluice/aio"
)

// Loops are the event loops of one verb that moves data, each on its own thread: what is read and what is written
// shall not share one. Safe for concurrent use.
type Loops struct {
	list   []*aio.Loop
	cancel context.CancelFunc
	ended  sync.WaitGroup
}

// StartLoops runs n loops.
func StartLoops(n int) (*Loops, error) {
	run, cancel := context.WithCancel(context.Background())
	s := &Loops{cancel: cancel}
	for i := range n {
		l, err := aio.NewLoop(&aio.LoopOptions{Name: fmt.Sprintf("img loop %d", i)})
		if err != nil {
			s.Stop()
			return nil, fmt.Errorf("start loops: %w", err)
		}
		s.list = append(s.list, l)
		s.ended.Go(func() {
			// A loop that cannot go on answers what is asked of it with its end; nothing else hears of it here.
			_ = l.Run(run)
		})
	}
	return s, nil
}

// At is the i-th loop.
func (s *Loops) At(i int) *aio.Loop { return s.list[i] }

// Stop ends the loops and waits until their threads are gone. No disk is open on them.
func (s *Loops) Stop() {
	s.cancel()
	s.ended.Wait()
}

// closeAll closes disks and adds what went wrong to err.
func closeAll(err error, disks ...*Disk) error {
	for _, d := range disks {
		if d != nil {
			err = errors.Join(err, d.Close())
		}
	}
	return err
}
