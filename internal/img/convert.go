// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"errors"
	"sync"
	"time"
)

// The words of a failed conversion.
const (
	convertReadText  = "error while reading at byte %d: %s"
	convertWriteText = "error while writing at byte %d: %s"
)

// Limits of a conversion.
const (
	ConvertWorkersMax     = 16
	ConvertWorkersDefault = 8
	SparseMax             = 16 << 20
	SparseDefault         = 4 << 10

	// convertChunk is how much one worker holds at a time, if clusters are not larger. Much more does not stay in the
	// caches of the processor between the read and the write, much less is spent on handing requests over.
	convertChunk = 512 << 10
	// batchSpans bounds how many pieces of a scattered source are read together.
	batchSpans = 64
	// zeroMax bounds one request for zeros, so that a rate and an interrupt have a say.
	zeroMax = 256 << 20
)

// Convert copies what is in images, one behind the other, to a disk that is as large at least.
//
// A planner walks the maps of the sources and cuts them into batches; workers read a batch, look for zeros in it, compress
// it where that is wanted, and write it. Holes are never read. At most Workers batches are in memory.
type Convert struct {
	Sources []*Disk
	Target  *Disk
	// Skip leaves out so many bytes of the first source. Length bounds how much is copied where it is not 0.
	Skip, Length int64

	// Sparse is the length of a run of zeros that is worth not being written; 0 writes everything.
	Sparse int64
	// TargetZero tells that the target reads as zeros, so that zeros need not be written.
	TargetZero bool
	// OnlyTop leaves alone what the first layer of the source does not store, since the target has it behind itself.
	OnlyTop bool

	// KeepAbsent leaves alone, up to this offset, what no layer of the source has something to say of.
	KeepAbsent int64
	// Exact takes what the source stores for what is to be stored, and zeros for what it calls zeros: nothing is looked for,
	// and Sparse does not count.
	Exact bool

	Workers    int  // 0 is ConvertWorkersDefault
	OutOfOrder bool // writes need not begin in the order of their offsets
	// Compress, when set, writes the target in compressed clusters.
	Compress *Compression
	// Grain is the unit that the target allocates, when it is to be written in whole ones; 0 and 1 are bytes.
	Grain int64
	// CopyRange, when set, is asked before anything is read.
	CopyRange *RangeCopier
	// Salvage goes on after a failed read with zeros in its place, and tells of it. It is called by several goroutines.
	Salvage func(text string)
	// Rate bounds how many bytes are written in a second; 0 does not.
	Rate int64
	// Advance is told how far the work has got, in bytes of the target; with ByWork only those count that [Convert.Work] counts.
	// It is called by several goroutines.
	Advance func(n int64)
	ByWork  bool
}

// Run copies, and flushes the target. What was written stays when it fails or ctx ends.
func (c *Convert) Run(ctx context.Context) error {
	if c.Workers == 0 {
		c.Workers = ConvertWorkersDefault
	}
	if c.Advance == nil {
		c.Advance = func(int64) {}
	}
	work, stop := context.WithCancelCause(ctx)
	defer stop(nil)

	batches := make(chan *batch)
	var workers sync.WaitGroup
	var failed firstError
	for range c.Workers {
		workers.Go(func() {
			w := newConvertWorker(c)
			for b := range batches {
				if err := w.do(work, b); err != nil && !errors.Is(err, errStopped) {
					failed.note(b.start, err)
					stop(err)
				}
			}
		})
	}
	planned := newPlanner(c, batches).run(work)
	close(batches)
	workers.Wait()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case failed.err != nil:
		return failed.err
	case planned != nil:
		return planned
	}
	if err := c.Target.Flush(); err != nil {
		return Wordedf("error while flushing '%s': %s", c.Target.name, err)
	}
	return nil
}

// size is how much there is to copy.
func (c *Convert) size() int64 {
	n := -c.Skip
	for _, s := range c.Sources {
		n += s.Size()
	}
	if c.Length > 0 {
		n = min(n, c.Length)
	}
	return n
}

// errStopped is what a worker answers that has been told to stop, because of something else.
var errStopped = errors.New("stopped")

// firstError keeps the error that belongs to the lowest offset.
type firstError struct {
	mu  sync.Mutex
	at  int64
	err error
}

func (f *firstError) note(at int64, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil || at < f.at {
		f.at, f.err = at, err
	}
}

// failedAt words an error of a transfer, which knows where it happened.
func failedAt(format string, start int64, err error) error {
	var t *transferError
	if errors.As(err, &t) {
		return Wordedf(format, t.off, t.err)
	}
	return Wordedf(format, start, err)
}

// pace holds work up so that no more than rate bytes pass in a second. Safe for concurrent use.
type pace struct {
	rate int64
	mu   sync.Mutex
	due  time.Time // when the bytes that have passed are paid for
}

// paceSlack is how far ahead of its rate work may be, so that pieces need not wait for each other.
const paceSlack = 100 * time.Millisecond

// wait lets n bytes pass.
func (p *pace) wait(ctx context.Context, n int64) error {
	if p.rate == 0 || n == 0 {
		return nil
	}
	p.mu.Lock()
	now := time.Now()
	if p.due.Before(now) {
		p.due = now
	}
	ahead := p.due.Sub(now)
	p.due = p.due.Add(time.Duration(float64(n) / float64(p.rate) * float64(time.Second)))
	p.mu.Unlock()
	if ahead < paceSlack {
		return nil
	}
	select {
	case <-time.After(ahead - paceSlack):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
