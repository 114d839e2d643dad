// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"

	"github.com/sluice-blk/sluice/internal/sys"
)

// RangeCopier has the kernel copy stretches between files, by sharing them where the file system can. Safe for concurrent
// use.
type RangeCopier struct {
	target *os.File // nil where that is not possible

	mu      sync.Mutex
	sources map[string]*os.File // nil for those that cannot be opened
}

// newRangeCopier is for a target whose bytes lie in its file as the disk has them.
func newRangeCopier(target *Disk) *RangeCopier {
	c := &RangeCopier{sources: make(map[string]*os.File)}
	if target.format == FormatRaw {
		if f, err := os.OpenFile(target.name, os.O_WRONLY, 0); err == nil {
			c.target = f
		}
	}
	return c
}

func (c *RangeCopier) close() {
	for _, f := range c.sources {
		if f != nil {
			_ = f.Close() // it was read only
		}
	}
	if c.target != nil {
		_ = c.target.Close() // what was written is flushed through the disk
	}
}

func (c *RangeCopier) source(path string) *os.File {
	c.mu.Lock()
	defer c.mu.Unlock()
	f, known := c.sources[path]
	if !known {
		if opened, err := os.Open(path); err == nil {
			f = opened
		}
		c.sources[path] = f
	}
	return f
}

// copyRange copies a batch without reading it, and tells whether that was possible. Where it was not, nothing is lost by
// copying the batch in the ordinary way.
func (w *convertWorker) copyRange(ctx context.Context, b *batch) (bool, error) {
	c := w.c.CopyRange
	if c.target == nil {
		return false, nil
	}
	for _, s := range b.spans {
		if s.kind == spanData && (s.file == "" || c.source(s.file) == nil) {
			return false, nil
		}
	}
	if err := w.turn(ctx, b); err != nil {
		return false, err
	}
	for _, s := range b.spans {
		if s.kind == spanZero {
			if err := w.zeros(s.off, s.n); err != nil {
				return false, failedAt(convertWriteText, s.off, err)
			}
			continue
		}
		if err := c.copy(s); err != nil {
			if cannotCopy(err) {
				return false, nil
			}
			return false, Wordedf(convertWriteText, s.off, err)
		}
	}
	if err := w.writes.run(w.c.Target); err != nil {
		return false, failedAt(convertWriteText, b.start, err)
	}
	return true, nil
}

// copy copies one span.
func (c *RangeCopier) copy(s span) error {
	from := c.source(s.file)
	for s.n > 0 {
		n, err := sys.CopyFileRange(int(from.Fd()), s.host, int(c.target.Fd()), s.off, s.n)
		if err != nil {
			return err
		}
		if n == 0 {
			return syscall.EXDEV // the end of the file, inside a sector: the ordinary way knows what is there
		}
		s.off, s.host, s.n = s.off+n, s.host+n, s.n-n
	}
	return nil
}

// cannotCopy tells an error that speaks of these two files, from one that speaks of the data.
func cannotCopy(err error) bool {
	for _, e := range []syscall.Errno{syscall.EXDEV, syscall.EINVAL, syscall.ENOSYS, syscall.EOPNOTSUPP, syscall.EBADF, syscall.ETXTBSY, syscall.EPERM} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}
