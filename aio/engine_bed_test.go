// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/sys"
)

// The tests of the engines drive a loop by hand, turn by turn, on the test's own thread, so that what happens between two
// turns is theirs to say.

// enginePatience is far beyond what any of this takes on a machine that is busy with something else.
const enginePatience = 60 * time.Second

// engineSetup is one way to run the engine tests.
type engineSetup struct {
	kind   EngineKind
	poller PollerKind
	direct bool // O_DIRECT files on disk, else files in memory
}

func (s engineSetup) String() string {
	place := "memory"
	if s.direct {
		place = "direct"
	}
	return fmt.Sprintf("%s/%s/%s", s.kind, s.poller, place)
}

// engineBed is a loop, an engine and a place for files.
type engineBed struct {
	t testing.TB
	l *Loop
	engineSetup
	dir       string
	completed int
	// signals treats files in memory as any other: their requests are waited for and not taken within the submission.
	signals bool
}

func newEngineBed(t testing.TB, s engineSetup, change func(o *LoopOptions)) *engineBed {
	t.Helper()
	b := &engineBed{t: t, engineSetup: s, dir: place(t, s.direct)}
	o := &LoopOptions{Poller: s.poller}
	if change != nil {
		change(o)
	}
	// A ring belongs to the thread that enables it.
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	l, err := NewLoop(o)
	if err != nil {
		if s.poller == PollerIOUring {
			t.Skipf("needs io_uring: %v", err)
		}
		t.Fatal(err)
	}
	if err := l.poller.start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if n := l.carried(); n != 0 {
			t.Errorf("%d requests are still with the engines", n)
		}
		if err := l.Close(); err != nil {
			t.Errorf("close loop: %v", err)
		}
	})
	b.l = l
	return b
}

// place is a directory for files that are in memory, or that O_DIRECT can open.
func place(t testing.TB, direct bool) string {
	t.Helper()
	dir := t.TempDir()
	if !direct {
		if shm, err := os.MkdirTemp("/dev/shm", "aio"); err == nil {
			t.Cleanup(func() { _ = os.RemoveAll(shm) })
			return shm
		}
		return dir
	}
	name := filepath.Join(dir, "probe")
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|syscall.O_DIRECT, 0o600)
	if errors.Is(err, syscall.EINVAL) {
		t.Skipf("needs a file system that knows O_DIRECT at %s", dir)
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	return dir
}

// create makes a file of size bytes and opens it with the setup's flags; fd is closed with the test.
func (b *engineBed) create(size int64) (fd int) {
	b.t.Helper()
	flags := os.O_RDWR | os.O_CREATE | os.O_EXCL
	if b.direct {
		flags |= syscall.O_DIRECT
	}
	name := filepath.Join(b.dir, fmt.Sprintf("file-%d", time.Now().UnixNano()))
	f, err := os.OpenFile(name, flags, 0o600)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(size); err != nil {
		b.t.Fatal(err)
	}
	return int(f.Fd())
}

// file makes a file of size bytes and opens it on the loop with the setup's engine.
func (b *engineBed) file(size int64) *File { return b.open(b.create(size), nil) }

func (b *engineBed) open(fd int, o *FileOptions) *File {
	b.t.Helper()
	if o == nil {
		o = &FileOptions{}
	}
	o.Engine = b.kind
	f, err := b.l.OpenFile(fd, o)
	if err != nil {
		if errors.Is(err, syscall.ENOSYS) || errors.Is(err, syscall.EPERM) {
			b.t.Skipf("needs engine %s: %v", b.kind, err)
		}
		b.t.Fatal(err)
	}
	f.inMemory = f.inMemory && !b.signals
	b.t.Cleanup(func() {
		if err := f.Close(); err != nil {
			b.t.Error(err)
		}
	})
	return f
}

// readOnlyFile is a file whose descriptor refuses writes: a bad file for whoever writes.
func (b *engineBed) readOnlyFile(size int64) *File {
	b.t.Helper()
	fd, err := syscall.Open(fmt.Sprintf("/proc/self/fd/%d", b.create(size)), syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = syscall.Close(fd) })
	return b.open(fd, nil)
}

// buffer is memory of whole pages that O_DIRECT accepts.
func (b *engineBed) buffer(n int) []byte {
	b.t.Helper()
	m, err := sys.MmapAnon((n + 4095) &^ 4095)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = sys.Munmap(m) })
	return m[:n]
}

// ask is one request and what came of it.
type ask struct {
	Request
	bed   *engineBed
	times int
	err   error
	order int // the how manyth of its bed to complete
	then  func()
}

// Complete is the outcome.
func (a *ask) Complete(_ *Request, err error) {
	a.times++
	a.err = err
	a.bed.completed++
	a.order = a.bed.completed
	if a.then != nil {
		a.then()
	}
}

func (b *engineBed) ask(op Op, offset int64, segments ...[]byte) *ask {
	a := &ask{bed: b}
	a.Op, a.Offset, a.Done = op, offset, a
	for _, s := range segments {
		a.Mem = append(a.Mem, IOVecOf(s))
		a.Length += int64(len(s))
	}
	return a
}

// until turns the loop until n more requests have completed.
func (b *engineBed) until(n int) {
	b.t.Helper()
	n += b.completed
	deadline := time.Now().Add(enginePatience)
	for b.completed < n {
		b.l.turn(int64(10 * time.Millisecond))
		if b.l.failure != nil {
			b.t.Fatalf("the loop failed: %v", b.l.failure)
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("stuck: %d requests have not completed", n-b.completed)
		}
	}
}

// once turns the loop once without waiting.
func (b *engineBed) once() { b.l.turn(0) }

// do carries out requests that are submitted together and checks that each completes once.
func (b *engineBed) do(f *File, asks ...*ask) {
	b.t.Helper()
	b.l.Plug()
	for _, a := range asks {
		a.times = 0
		f.Submit(&a.Request)
		if a.times != 0 {
			b.t.Fatal("completed inside Submit")
		}
	}
	b.l.Unplug()
	b.until(len(asks))
	for range 3 {
		b.once()
	}
	for i, a := range asks {
		if a.times != 1 {
			b.t.Fatalf("request %d completed %d times", i, a.times)
		}
	}
}

// must carries out requests that have to succeed.
func (b *engineBed) must(f *File, asks ...*ask) {
	b.t.Helper()
	b.do(f, asks...)
	for i, a := range asks {
		if a.err != nil {
			b.t.Fatalf("request %d: %s of %d bytes at %d: %v", i, a.Op, a.Length, a.Offset, a.err)
		}
	}
}

// counters are those of the setup's engine.
func (b *engineBed) counters() EngineCounters { return *b.l.engines[b.kind].counters() }

// pattern fills p so that each place and each seed give other bytes.
func pattern(p []byte, seed int64) {
	for i := range p {
		x := uint64(i)*0x9e3779b97f4a7c15 + uint64(seed)*0xbf58476d1ce4e5b9
		p[i] = byte(x >> 56)
	}
}
