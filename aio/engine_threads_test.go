// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/sys"
	"go.uber.org/goleak"
)

// callLog stands between the threads and their system calls. It notes each one, and may answer in the kernel's place.
type callLog struct {
	mu      sync.Mutex
	names   []string
	offsets []int64
	// answer is asked before each call, with its number; handled says that it stands for the kernel's answer.
	answer func(call int, name string, vs []IOVec, offset int64) (n int, err error, handled bool)
	most   int // bytes that a transfer may move; 0 is no limit
}

func (c *callLog) note(name string, vs []IOVec, offset int64) (int, error, bool) {
	c.mu.Lock()
	c.names = append(c.names, name)
	c.offsets = append(c.offsets, offset)
	call := len(c.names)
	c.mu.Unlock()
	if c.answer == nil {
		return 0, nil, false
	}
	return c.answer(call, name, vs, offset)
}

func (c *callLog) transfer(name string, real func(int, []IOVec, int64, int) (int, error)) func(int, []IOVec, int64, int) (int, error) {
	return func(fd int, vs []IOVec, offset int64, flags int) (int, error) {
		full := name
		if flags == sys.RWF_DSYNC {
			full += "+dsync"
		}
		if n, err, handled := c.note(full, vs, offset); handled {
			return n, err
		}
		if c.most > 0 {
			vs = []IOVec{IOVecOf(vs[0].Bytes()[:min(c.most, int(vs[0].Len))])}
		}
		return real(fd, vs, offset, flags)
	}
}

func (c *callLog) kernel() *blockingKernel {
	ranged := func(name string, real func(int, int64, int64) error) func(int, int64, int64) error {
		return func(fd int, offset, length int64) error {
			if _, err, handled := c.note(name, nil, offset); handled {
				return err
			}
			return real(fd, offset, length)
		}
	}
	return &blockingKernel{
		preadv:  c.transfer("read", sys.Preadv2),
		pwritev: c.transfer("write", sys.Pwritev2),
		fdatasync: func(fd int) error {
			if _, err, handled := c.note("sync", nil, 0); handled {
				return err
			}
			return sys.Fdatasync(fd)
		},
		fallocate: func(fd int, mode uint32, offset, length int64) error {
			name := map[uint32]string{1: "allocate", 3: "punch", 17: "zero"}[mode]
			if _, err, handled := c.note(name, nil, offset); handled {
				return err
			}
			return sys.Fallocate(fd, mode, offset, length)
		},
		blkDiscard: ranged("blkdiscard", sys.BlkDiscard),
		blkZeroout: ranged("blkzeroout", sys.BlkZeroout),
	}
}

func (c *callLog) list() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.names)
}

func newThreadsBed(t *testing.T, c *callLog, threads int) *engineBed {
	return newEngineBed(t, engineSetup{EngineThreads, PollerEpoll, false}, func(o *LoopOptions) {
		o.Threads = threads
		o.seams.blocking = c.kernel()
	})
}

// TestThreadsAreBounded has each read wait until as many are under way as there may be threads, and never sees more.
func TestThreadsAreBounded(t *testing.T) {
	const threads, total = 4, 40
	var mu sync.Mutex
	now, most, met := 0, 0, make(chan struct{})
	c := &callLog{answer: func(int, string, []IOVec, int64) (int, error, bool) {
		mu.Lock()
		if now++; now > most {
			if most = now; most == threads {
				close(met)
			}
		}
		mu.Unlock()
		select {
		case <-met:
		case <-time.After(enginePatience):
		}
		mu.Lock()
		now--
		mu.Unlock()
		return page, nil, true
	}}
	b := newThreadsBed(t, c, threads)
	b.must(b.file(total*page), b.reads(total)...)
	if most != threads {
		t.Errorf("%d at a time, want %d", most, threads)
	}
}

// TestOneThreadKeepsTheOrder gives one thread many requests in several hand-overs.
func TestOneThreadKeepsTheOrder(t *testing.T) {
	c := &callLog{}
	b := newThreadsBed(t, c, 1)
	f := b.file(64 * page)
	asks := b.reads(64)
	for i := range 4 {
		b.l.Plug()
		for _, a := range asks[i*16 : (i+1)*16] {
			f.Submit(&a.Request)
		}
		b.l.Unplug()
	}
	b.until(64)
	for i, offset := range c.offsets {
		if offset != int64(i)*page {
			t.Fatalf("call %d was for offset %d", i, offset)
		}
	}
	if got := b.counters(); got.Submissions != 4 || got.Requests != 64 {
		t.Errorf("%d requests in %d hand-overs", got.Requests, got.Submissions)
	}
}

// TestThreadsEndWithTheLoop looks for goroutines that the loop leaves behind.
func TestThreadsEndWithTheLoop(t *testing.T) {
	ignore := goleak.IgnoreCurrent()
	t.Run("loop", func(t *testing.T) {
		b := newThreadsBed(t, &callLog{}, 8)
		b.must(b.file(64*page), b.reads(64)...)
	})
	goleak.VerifyNone(t, ignore)
}

// TestInterruptedCalls has each call cut short by signals, some times.
func TestInterruptedCalls(t *testing.T) {
	c := &callLog{answer: func(call int, _ string, _ []IOVec, _ int64) (int, error, bool) {
		return 0, syscall.EINTR, call%3 != 0
	}}
	b := newThreadsBed(t, c, 1)
	f := b.file(8 * page)
	z := b.ask(OpDiscard, 0)
	z.Length = page
	b.must(f, append(b.reads(8), z, b.ask(OpFlush, 0))...)
	if n := len(c.list()); n != 30 {
		t.Errorf("%d calls", n)
	}
}

// TestThreadsTryAgain has calls answer EAGAIN some times, and then for ever.
func TestThreadsTryAgain(t *testing.T) {
	for _, times := range []int{3, 1000} {
		c := &callLog{answer: func(call int, _ string, _ []IOVec, _ int64) (int, error, bool) {
			return 0, syscall.EAGAIN, call <= times
		}}
		b := newThreadsBed(t, c, 1)
		a := b.ask(OpRead, 0, b.buffer(page))
		b.do(b.file(page), a)
		if want := map[int]error{3: nil, 1000: syscall.EAGAIN}[times]; a.err != want {
			t.Errorf("%d times EAGAIN: %v", times, a.err)
		}
	}
}

// TestNthCallFails lets the n-th call fail, for each n that the workload reaches: once, and once for ever after. Each
// request completes once, with success or with that errno.
func TestNthCallFails(t *testing.T) {
	for _, ever := range []bool{false, true} {
		for n := 1; ; n++ {
			c := &callLog{answer: func(call int, _ string, _ []IOVec, _ int64) (int, error, bool) {
				return 0, syscall.EIO, call == n || ever && call > n
			}, most: 1500}
			b := newThreadsBed(t, c, 2)
			asks := append(b.reads(4), b.ask(OpWrite, 8*page, b.buffer(page)[:2000], b.buffer(page)), b.ask(OpFlush, 0))
			d := b.ask(OpWriteZeroes, 0)
			d.Length, d.Flags = page, FlagFUA
			asks = append(asks, d)
			b.do(b.file(16*page), asks...)
			failed := 0
			for i, a := range asks {
				if a.err != nil && a.err != error(syscall.EIO) {
					t.Fatalf("call %d: request %d: %v", n, i, a.err)
				}
				if a.err != nil {
					failed++
				}
			}
			if calls := len(c.list()); calls < n {
				if failed > 0 {
					t.Errorf("%d requests failed by themselves", failed)
				}
				break
			}
			if failed == 0 || !ever && failed > 1 {
				t.Errorf("call %d failed (ever after: %v), and %d requests", n, ever, failed)
			}
		}
	}
}

func TestShortTransfersInThreads(t *testing.T) {
	for _, most := range []int{1, 1000, page} {
		b := newThreadsBed(t, &callLog{most: most}, 2)
		f := b.file(4 * page)
		size := min(most*50, 4*page)
		w, r := b.buffer(size), b.buffer(size)
		pattern(w, 6)
		b.must(f, b.ask(OpWrite, 0, w[:size/3], w[size/3:]))
		b.must(f, b.ask(OpRead, 0, r[:size/2], r[size/2:]))
		if !bytes.Equal(w, r) {
			t.Errorf("at most %d bytes: something else was read", most)
		}
	}
}

// TestCallsOfAnOperation says which system calls each operation makes, on which kind of file, and what follows when the
// file cannot do one of them.
func TestCallsOfAnOperation(t *testing.T) {
	for _, c := range []struct {
		op      Op
		flags   Flags
		block   bool
		refused string // answers EOPNOTSUPP
		want    []string
		err     error
	}{
		{OpFlush, 0, false, "", []string{"sync"}, nil},
		{OpWrite, 0, false, "", []string{"write"}, nil},
		{OpWrite, FlagFUA, false, "", []string{"write+dsync"}, nil},
		{OpWrite, FlagFUA, false, "write+dsync", []string{"write+dsync", "write", "sync"}, nil},
		{OpDiscard, 0, false, "", []string{"punch"}, nil},
		{OpDiscard, 0, false, "punch", []string{"punch"}, syscall.EOPNOTSUPP},
		{OpDiscard, 0, true, "", []string{"blkdiscard"}, nil},
		{OpDiscard, 0, true, "blkdiscard", []string{"blkdiscard"}, syscall.EOPNOTSUPP},
		{OpWriteZeroes, 0, false, "", []string{"zero"}, nil},
		{OpWriteZeroes, FlagFUA, false, "", []string{"zero", "sync"}, nil},
		{OpWriteZeroes, 0, false, "zero", []string{"zero", "punch", "allocate"}, nil},
		{OpWriteZeroes, FlagUnmap, false, "", []string{"punch"}, nil},
		{OpWriteZeroes, FlagUnmap, false, "punch", []string{"punch"}, syscall.EOPNOTSUPP},
		{OpWriteZeroes, 0, true, "", []string{"blkzeroout"}, nil},
		{OpWriteZeroes, FlagUnmap, true, "", []string{"punch"}, nil},
		{OpWriteZeroes, FlagUnmap, true, "punch", []string{"punch", "blkzeroout"}, nil},
		{OpWriteZeroes, FlagUnmap | FlagFUA, true, "punch", []string{"punch", "blkzeroout", "sync"}, nil},
	} {
		name := fmt.Sprintf("%s flags %d block %v without %q", c.op, c.flags, c.block, c.refused)
		t.Run(name, func(t *testing.T) {
			log := &callLog{answer: func(_ int, name string, vs []IOVec, _ int64) (int, error, bool) {
				if name == c.refused {
					return 0, syscall.EOPNOTSUPP, true
				}
				n := 0
				for _, v := range vs {
					n += int(v.Len)
				}
				return n, nil, true
			}}
			b := newThreadsBed(t, log, 2)
			f := b.file(4 * page)
			f.block = c.block
			a := b.ask(c.op, 0)
			if c.op == OpWrite {
				a = b.ask(c.op, 0, b.buffer(page))
			}
			a.Length, a.Flags = page, c.flags
			b.do(f, a)
			if got := log.list(); a.err != c.err || !slices.Equal(got, c.want) {
				t.Errorf("%v, %v; want %v, %v", got, a.err, c.want, c.err)
			}
		})
	}
}

// TestOtherEnginesUseTheThreads has linux-aio and io_uring hand over what they have no way for, on a loop whose threads
// have not been used yet.
func TestOtherEnginesUseTheThreads(t *testing.T) {
	for _, s := range []engineSetup{{EngineLinuxAIO, PollerEpoll, false}, {EngineIOUring, PollerIOUring, false}} {
		t.Run(s.String(), func(t *testing.T) {
			log := &callLog{answer: func(int, string, []IOVec, int64) (int, error, bool) { return 0, nil, true }}
			b := newEngineBed(t, s, func(o *LoopOptions) { o.seams.blocking = log.kernel() })
			f := b.file(4 * page)
			f.block = true
			d, z := b.ask(OpDiscard, 0), b.ask(OpWriteZeroes, 0)
			d.Length, z.Length, z.Flags = page, page, FlagFUA
			b.must(f, d, b.ask(OpRead, 0, b.buffer(page)), z)
			got := log.list()
			slices.Sort(got)
			if want := []string{"blkdiscard", "blkzeroout", "sync"}; !slices.Equal(got, want) {
				t.Errorf("%v, want %v", got, want)
			}
		})
	}
}
