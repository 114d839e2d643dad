// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestEngineConformance runs one list of tests for each engine, on each poller that it can stand on, with files in memory
// and with direct files on disk. The kernel is the real one; what it can be made to answer only through a seam is in
// the engines' own tests.
func TestEngineConformance(t *testing.T) {
	for _, s := range []engineSetup{
		{EngineIOUring, PollerIOUring, false},
		{EngineLinuxAIO, PollerEpoll, false},
		{EngineLinuxAIO, PollerPoll, false},
		{EngineLinuxAIO, PollerIOUring, false},
		{EngineThreads, PollerEpoll, false},
		{EngineThreads, PollerIOUring, false},
		{EngineIOUring, PollerIOUring, true},
		{EngineLinuxAIO, PollerEpoll, true},
		{EngineThreads, PollerEpoll, true},
	} {
		t.Run(s.String(), func(t *testing.T) {
			place(t, s.direct) // skips them all at once where there is none
			for _, c := range engineConformance {
				if c.where.fits(s) {
					t.Run(c.name, func(t *testing.T) { c.test(t, s) })
				}
			}
		})
	}
}

// engineWhere says to which set-ups a test has anything to say.
type engineWhere uint8

const (
	everywhere  engineWhere = iota
	inMemory                // where size and cost are small
	onDisk                  // with O_DIRECT
	withoutRace             // the race detector allocates by itself
)

func (w engineWhere) fits(s engineSetup) bool {
	switch w {
	case inMemory:
		return !s.direct
	case onDisk:
		return s.direct
	case withoutRace:
		return !raceEnabled
	}
	return true
}

var engineConformance = []struct {
	name  string
	test  func(t *testing.T, s engineSetup)
	where engineWhere
}{
	{"what is written is read", engineRoundTrip, everywhere},
	{"four files leave in one submission", engineFourFiles, everywhere},
	{"unbatched requests leave one by one", engineUnbatched, everywhere},
	{"ten thousand queued at once", engineTenThousand, everywhere},
	{"one after the other", engineDepthOne, everywhere},
	{"reads beyond the end", engineBeyondEnd, everywhere},
	{"a read-only descriptor", engineBadDescriptor, everywhere},
	{"a bad one among good ones", engineBadInTheMiddle, everywhere},
	{"requests of no bytes", engineNoBytes, everywhere},
	{"a read-only file", engineReadOnly, everywhere},
	{"a file system that fills up", engineFull, inMemory},
	{"vectors of many segments", engineLongVectors, everywhere},
	{"segments of no bytes", engineEmptySegments, everywhere},
	{"unaligned direct requests", engineUnaligned, onDisk},
	{"flush and durable writes", engineDurable, everywhere},
	{"discard and write zeroes", engineZeroes, everywhere},
	{"drain in a section", engineDrainInSection, everywhere},
	{"nested sections", engineNestedSections, everywhere},
	{"close with requests in flight", engineCloseInFlight, everywhere},
	{"random requests against a model", engineModel, everywhere},
	{"moments of requests and sizes of batches", engineTimes, everywhere},
	{"no allocations", engineNoAllocations, withoutRace},
}

const page = 4096

func engineRoundTrip(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	f := b.file(1 << 20)
	if f.Engine() != s.kind || !strings.Contains(f.Reason(), s.kind.String()) {
		t.Errorf("engine %s, reason %q", f.Engine(), f.Reason())
	}
	var writes, reads []*ask
	for i := range int64(40) {
		w, r := b.buffer(3*page), b.buffer(3*page)
		pattern(w, i)
		// One segment, three segments, from different places.
		if i%2 == 0 {
			writes = append(writes, b.ask(OpWrite, i*4*page, w))
			reads = append(reads, b.ask(OpRead, i*4*page, r[2*page:], r[:page], r[page:2*page]))
		} else {
			writes = append(writes, b.ask(OpWrite, i*4*page, w[:page], w[page:2*page], w[2*page:]))
			reads = append(reads, b.ask(OpRead, i*4*page, r))
		}
	}
	b.must(f, writes...)
	b.must(f, b.ask(OpFlush, 0))
	b.must(f, reads...)
	for i, r := range reads {
		want := make([]byte, 3*page)
		pattern(want, int64(i))
		var got []byte
		for _, v := range r.Mem {
			got = append(got, v.Bytes()...)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("request %d read something else", i)
		}
	}
}

// engineFourFiles counts system calls: what one turn queues for four files is one submission.
func engineFourFiles(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	var files []*File
	for range 4 {
		files = append(files, b.file(64*page))
	}
	before := b.counters()
	b.l.Plug()
	for i := range 32 {
		a := b.ask(OpRead, int64(i)*page, b.buffer(page))
		files[i%4].Submit(&a.Request)
	}
	if got := b.counters(); got.Submissions != before.Submissions {
		t.Errorf("%d submissions while plugged", got.Submissions-before.Submissions)
	}
	b.l.Unplug()
	b.until(32)
	got := b.counters()
	if got.Submissions-before.Submissions != 1 || got.Requests-before.Requests != 32 {
		t.Errorf("%d requests in %d submissions", got.Requests-before.Requests, got.Submissions-before.Submissions)
	}
}

func engineUnbatched(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, func(o *LoopOptions) { o.Unbatched = true })
	f := b.file(64 * page)
	before := b.counters()
	for i := range 8 {
		a := b.ask(OpRead, int64(i)*page, b.buffer(page))
		f.Submit(&a.Request)
	}
	b.until(8)
	if got := b.counters(); got.Submissions-before.Submissions != 8 {
		t.Errorf("8 requests in %d submissions", got.Submissions-before.Submissions)
	}
}

// engineTenThousand queues far more than the kernel's queues hold, by two ways: in one section, and from a completion.
func engineTenThousand(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	const places = 256
	f := b.file(places * page)
	w := b.buffer(places * page)
	pattern(w, 1)
	b.must(f, b.ask(OpWrite, 0, w))
	const total = 10_000
	r := b.buffer(places * page)
	var first, second []*ask
	for i := range int64(total / 2) {
		at := i % places * page
		first = append(first, b.ask(OpRead, at, r[at:at+page]))
		second = append(second, b.ask(OpRead, at, r[at:at+page]))
	}
	first[17].then = func() {
		for _, a := range second {
			f.Submit(&a.Request)
		}
	}
	b.l.Plug()
	for _, a := range first {
		f.Submit(&a.Request)
	}
	b.l.Unplug()
	b.until(total)
	for range 10 {
		b.once()
	}
	for i, a := range append(first, second...) {
		if a.times != 1 || a.err != nil {
			t.Fatalf("request %d completed %d times: %v", i, a.times, a.err)
		}
	}
	if !bytes.Equal(r, w) {
		t.Error("something else was read")
	}
}

// engineDepthOne chains requests, each submitted by the completion of the last, and then goes quiet: none may be stuck
// until something else happens.
func engineDepthOne(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	f := b.file(16 * page)
	total := 2000
	if s.direct {
		total = 200
	}
	a := b.ask(OpRead, 0, b.buffer(page))
	a.then = func() {
		if a.times < total {
			a.Offset = int64(a.times%16) * page
			f.Submit(&a.Request)
		}
	}
	f.Submit(&a.Request)
	b.until(total)
	if a.err != nil || a.times != total {
		t.Errorf("%d times, %v", a.times, a.err)
	}
}

func engineBeyondEnd(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	const size = 2*page + 1000 // ends inside a sector
	fd := b.create(2 * page)
	f := b.open(fd, nil)
	w := b.buffer(2 * page)
	pattern(w, 5)
	b.must(f, b.ask(OpWrite, 0, w))
	if err := syscall.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	want := make([]byte, 8*page)
	copy(want, w)
	for _, c := range []struct{ offset, length int64 }{{0, 4 * page}, {page, page}, {2 * page, 2 * page}, {3 * page, page}, {7 * page, page}} {
		r := b.buffer(int(c.length))
		for i := range r {
			r[i] = 0xee
		}
		over := c.offset+c.length > size
		a := b.ask(OpRead, c.offset, r)
		b.do(f, a)
		if over != errors.Is(a.err, io.ErrUnexpectedEOF) || over != errors.Is(a.err, syscall.EIO) {
			t.Errorf("%d bytes at %d: %v", c.length, c.offset, a.err)
		}
		half := c.length / 2
		a = b.ask(OpRead, c.offset, r[:half], r[half:])
		a.Flags = FlagZeroEOF
		b.must(f, a)
		if !bytes.Equal(r, want[c.offset:c.offset+c.length]) {
			t.Errorf("%d bytes at %d: not the file's, then zeros", c.length, c.offset)
		}
	}
}

// engineBadDescriptor gets a real errno from the real kernel.
func engineBadDescriptor(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	f := b.readOnlyFile(page)
	buf := b.buffer(page)
	a := b.ask(OpWrite, 0, buf)
	b.do(f, a)
	if a.err != syscall.EBADF {
		t.Errorf("write to a read-only descriptor: %v", a.err)
	}
	a = b.ask(OpRead, -page, buf)
	b.do(f, a)
	if a.err != syscall.EINVAL {
		t.Errorf("read at a negative offset: %v", a.err)
	}
	b.must(f, b.ask(OpRead, 0, buf))
	if got := b.counters(); got.Errors != 2 {
		t.Errorf("%d errors counted", got.Errors)
	}
}

// engineBadInTheMiddle has all patterns of four good and bad requests, submitted together with nothing in flight: each
// one has its own outcome, and none is left behind.
func engineBadInTheMiddle(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	good, bad := b.file(4*page), b.readOnlyFile(4*page)
	buf := b.buffer(4 * page)
	for mask := range 16 {
		asks := make([]*ask, 4)
		b.l.Plug()
		for i := range asks {
			asks[i] = b.ask(OpWrite, int64(i)*page, buf[i*page:(i+1)*page])
			if mask>>i&1 != 0 {
				bad.Submit(&asks[i].Request)
			} else {
				good.Submit(&asks[i].Request)
			}
		}
		b.l.Unplug()
		b.until(4)
		for i, a := range asks {
			if isBad := mask>>i&1 != 0; a.times != 1 || isBad != (a.err == syscall.EBADF) || !isBad && a.err != nil {
				t.Fatalf("pattern %04b: request %d completed %d times: %v", mask, i, a.times, a.err)
			}
		}
	}
}

func engineNoBytes(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	f := b.file(page)
	before := b.counters()
	for _, op := range []Op{OpRead, OpWrite, OpDiscard, OpWriteZeroes} {
		b.must(f, b.ask(op, 0), b.ask(op, 1<<40))
	}
	if got := b.counters(); got.Requests != before.Requests {
		t.Error("the kernel was asked")
	}
	a := b.ask(Op(99), 0)
	b.do(f, a)
	if a.err != syscall.EOPNOTSUPP {
		t.Errorf("unknown operation: %v", a.err)
	}
}

func engineReadOnly(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	f := b.open(b.create(page), &FileOptions{ReadOnly: true})
	buf := b.buffer(page)
	for _, op := range []Op{OpWrite, OpDiscard, OpWriteZeroes} {
		a := b.ask(op, 0, buf)
		b.do(f, a)
		if a.err != syscall.EROFS {
			t.Errorf("%s: %v", op, a.err)
		}
	}
	b.must(f, b.ask(OpRead, 0, buf), b.ask(OpFlush, 0))
}

// engineFull writes into a small file system until it is full inside a request. Real short writes come first.
func engineFull(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	dir := t.TempDir()
	const capacity = 1 << 20
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", capacity)); err != nil {
		t.Skipf("needs root to mount a tmpfs: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	b.dir = dir
	fd := b.create(0)
	f := b.open(fd, nil)
	// Closed here, and not only with the test: a file system with open files cannot be unmounted.
	t.Cleanup(func() { _ = f.Close(); _ = syscall.Close(fd) })
	const size = 384 << 10
	buf := b.buffer(size)
	pattern(buf, 3)
	b.must(f, b.ask(OpWrite, 0, buf), b.ask(OpWrite, size, buf[:page], buf[page:]))
	asks := []*ask{b.ask(OpWrite, 2*size, buf), b.ask(OpWrite, 3*size, buf[:page], buf[page:])}
	b.do(f, asks...)
	for i, a := range asks {
		if a.err != syscall.ENOSPC {
			t.Errorf("write %d to a full file system: %v", i, a.err)
		}
	}
	got := b.buffer(size)
	b.must(f, b.ask(OpRead, size, got))
	if !bytes.Equal(got, buf) {
		t.Error("what was written before is not there")
	}
}

// engineLongVectors goes up to and beyond the kernel's limit of 1024 segments.
func engineLongVectors(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	const segment = 512
	f := b.file(4096 * segment)
	for _, n := range []int{1, 2, 1023, 1024, 1025, 1500, 4096} {
		if s.direct && n > 1500 {
			continue
		}
		w, r := b.buffer(n*segment), b.buffer(n*segment)
		pattern(w, int64(n))
		var ws, rs [][]byte
		for i := range n {
			ws = append(ws, w[i*segment:(i+1)*segment])
			rs = append(rs, r[i*segment:(i+1)*segment])
		}
		b.do(f, b.ask(OpWrite, 0, ws...))
		a := b.ask(OpRead, 0, rs...)
		b.do(f, a)
		if s.direct && errors.Is(a.err, syscall.EINVAL) {
			t.Skip("needs a disk with sectors of 512 bytes")
		}
		if a.err != nil || !bytes.Equal(w, r) {
			t.Errorf("%d segments: %v, or something else was read", n, a.err)
		}
	}
}

func engineEmptySegments(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	f := b.file(4 * page)
	w, r := b.buffer(2*page), b.buffer(2*page)
	pattern(w, 9)
	b.must(f, b.ask(OpWrite, 0, w[:0], w[:page], w[page:page], w[page:], w[:0]))
	b.must(f, b.ask(OpRead, 0, r[:0], r[:0], r[:page], r[page:], r[:0]))
	if !bytes.Equal(w, r) {
		t.Error("something else was read")
	}
	// More of them than one transfer takes, in front of a single byte that counts.
	many := make([][]byte, 1100)
	for i := range many {
		many[i] = r[:0]
	}
	clear(r)
	b.must(f, b.ask(OpRead, 0, append(many, r)...))
	if !bytes.Equal(w, r) {
		t.Error("something else was read behind empty segments")
	}
}

// engineUnaligned has the kernel refuse what O_DIRECT cannot do: that request alone fails.
func engineUnaligned(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	f := b.file(64 * page)
	buf := b.buffer(8 * page)
	b.must(f, b.ask(OpWrite, 0, buf)) // a hole may be read at any offset: the disk is not asked
	for name, bad := range map[string]*ask{
		"offset": b.ask(OpRead, 1, buf[:page]),
		"length": b.ask(OpRead, 0, buf[:page-1]),
		"memory": b.ask(OpRead, 0, buf[1:page+1]),
	} {
		one, two := b.ask(OpRead, page, buf[2*page:3*page]), b.ask(OpRead, 2*page, buf[3*page:4*page])
		b.do(f, one, bad, two)
		if one.err != nil || two.err != nil {
			t.Errorf("%s: the others failed: %v, %v", name, one.err, two.err)
		}
		// Some file systems and devices accept memory at any address.
		if bad.err != syscall.EINVAL && (name == "offset" || bad.err != nil) {
			t.Errorf("%s: %v", name, bad.err)
		}
	}
}

func engineDurable(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	f := b.file(64 * page)
	buf, got := b.buffer(2*page), b.buffer(2*page)
	pattern(buf, 4)
	one, many := b.ask(OpWrite, 0, buf), b.ask(OpWrite, 8*page, buf[:page], buf[page:])
	one.Flags, many.Flags = FlagFUA, FlagFUA
	b.must(f, one, b.ask(OpFlush, 0), many, b.ask(OpFlush, 0))
	b.must(f, b.ask(OpRead, 8*page, got))
	if !bytes.Equal(buf, got) {
		t.Error("something else was read")
	}
}

func engineZeroes(t *testing.T, s engineSetup) {
	for _, flags := range []Flags{0, FlagUnmap, FlagFUA, FlagUnmap | FlagFUA} {
		b := newEngineBed(t, s, nil)
		f := b.file(16 * page)
		buf, got := b.buffer(16*page), b.buffer(16*page)
		pattern(buf, 8)
		b.must(f, b.ask(OpWrite, 0, buf))
		z := b.ask(OpWriteZeroes, 2*page)
		z.Length, z.Flags = 3*page, flags
		d := b.ask(OpDiscard, 8*page)
		d.Length = 4 * page
		b.do(f, z, d)
		if errors.Is(d.err, syscall.EOPNOTSUPP) {
			t.Skip("needs a file system that punches holes")
		}
		if z.err != nil || d.err != nil {
			t.Fatalf("write zeroes: %v, discard: %v", z.err, d.err)
		}
		clear(buf[2*page : 5*page])
		clear(buf[8*page : 12*page]) // a hole in a regular file
		b.must(f, b.ask(OpRead, 0, got))
		if !bytes.Equal(buf, got) {
			t.Errorf("flags %d: the range is not zeros, or more is", flags)
		}
	}
}

// engineDrainInSection waits for requests that a section keeps back: Flush sends them and leaves the section open.
func engineDrainInSection(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	f := b.file(16 * page)
	sent := func() uint64 { return b.counters().Submissions }
	b.l.Plug()
	for i := range int64(8) {
		a := b.ask(OpRead, i*page, b.buffer(page))
		f.Submit(&a.Request)
	}
	if sent() != 0 || b.l.carried() != 8 {
		t.Errorf("plugged: %d submissions, %d requests carried", sent(), b.l.carried())
	}
	b.l.Flush()
	if sent() != 1 {
		t.Errorf("flushed: %d submissions", sent())
	}
	b.until(8)
	a := b.ask(OpRead, 0, b.buffer(page))
	f.Submit(&a.Request)
	if sent() != 1 {
		t.Errorf("the section has ended: %d submissions", sent())
	}
	b.l.Unplug()
	b.until(1)
}

func engineNestedSections(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	f := b.file(16 * page)
	sent := func() uint64 { return b.counters().Submissions }
	b.l.Plug()
	b.l.Plug()
	for i := range int64(4) {
		a := b.ask(OpRead, i*page, b.buffer(page))
		f.Submit(&a.Request)
	}
	b.l.Unplug()
	if sent() != 0 {
		t.Errorf("inner section ended: %d submissions", sent())
	}
	b.l.Unplug()
	b.until(4)
	a := b.ask(OpRead, 0, b.buffer(page))
	f.Submit(&a.Request) // outside any section: at once
	if sent() != 2 {
		t.Errorf("no section: %d submissions", sent())
	}
	b.until(1)
}

// engineCloseInFlight closes a file that is in use: it stays open, and its requests come to their end.
func engineCloseInFlight(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	b.signals = true
	f := b.file(16 * page)
	a := b.ask(OpRead, 0, b.buffer(page))
	b.l.Plug()
	f.Submit(&a.Request)
	if err := f.Close(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("close with a request queued: %v", err)
	}
	b.l.Unplug()
	if err := f.Close(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("close with a request in flight: %v", err)
	}
	a.then = func() {
		if err := f.Close(); err != nil {
			t.Errorf("close in the last completion: %v", err)
		}
	}
	b.until(1)
	if a.err != nil {
		t.Error(a.err)
	}
	if err := f.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
	a.then = nil
	f.Submit(&a.Request)
	b.until(1)
	if a.err != syscall.EBADF {
		t.Errorf("submit to a closed file: %v", a.err)
	}
}

// engineModel mixes operations at random and compares the file with a model of it after each batch. Requests of one batch
// do not overlap, as their order is not said.
func engineModel(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, func(o *LoopOptions) { o.AIOEvents = 16; o.Threads = 4 })
	const places, span = 64, 4
	f := b.file(places * span * page)
	model := make([]byte, places*span*page)
	seed := rand.Int63()
	rng := rand.New(rand.NewSource(seed))
	buf := b.buffer(len(model))
	batches := 60
	if s.direct {
		batches = 10
	}
	for batch := range batches {
		var asks []*ask
		var list []string
		for _, place := range rng.Perm(places)[:1+rng.Intn(places)] {
			from := rng.Intn(span)
			length := (1 + rng.Intn(span-from)) * page
			at := place*span*page + from*page
			m := buf[at : at+length]
			cut := rng.Intn(length/page) * page
			var a *ask
			switch k := rng.Intn(10); {
			case k < 5:
				pattern(m, rng.Int63())
				copy(model[at:], m)
				a = b.ask(OpWrite, int64(at), m[:cut], m[cut:])
				a.Flags = Flags(rng.Intn(2)) & FlagFUA
			case k < 9:
				a = b.ask(OpRead, int64(at), m[:cut], m[cut:])
			default:
				a = b.ask(OpFlush, 0)
			}
			asks = append(asks, a)
			list = append(list, fmt.Sprintf("%s %d+%d", a.Op, at, length))
		}
		b.must(f, asks...)
		for _, a := range asks {
			at := int(a.Offset)
			if a.Op == OpRead && !bytes.Equal(buf[at:at+int(a.Length)], model[at:at+int(a.Length)]) {
				t.Fatalf("seed %d, batch %d: a read differs from the model\n%s", seed, batch, strings.Join(list, "\n"))
			}
		}
	}
	whole := b.buffer(len(model))
	b.must(f, b.ask(OpRead, 0, whole))
	if !bytes.Equal(whole, model) {
		t.Fatalf("seed %d: the file differs from the model", seed)
	}
}

// engineNoAllocations counts what a batch of 32 requests allocates on its way down and up.
func engineNoAllocations(t *testing.T, s engineSetup) {
	b := newEngineBed(t, s, nil)
	f := b.file(64 * page)
	var asks []*ask
	for i := range int64(32) {
		a := b.ask(OpRead, i*page, b.buffer(page))
		if i%4 == 3 {
			a = b.ask(OpRead, i*page, b.buffer(page)[:1024], b.buffer(page)[:3072])
		}
		if s.direct && i%4 == 3 {
			a = b.ask(OpRead, i*page, b.buffer(page), b.buffer(page))
		}
		asks = append(asks, a)
	}
	batch := func() {
		b.l.Plug()
		for _, a := range asks {
			f.Submit(&a.Request)
		}
		b.l.Unplug()
		b.until(len(asks))
	}
	for range 20 {
		batch() // workers are started, lists have grown
	}
	if n := testing.AllocsPerRun(50, batch); n >= 1 {
		t.Errorf("%v allocations for 32 requests", n)
	}
}

// TestShortReadsOfAPipe has a real kernel give a read in pieces, on the engine that can serve a pipe.
func TestShortReadsOfAPipe(t *testing.T) {
	b := newEngineBed(t, engineSetup{EngineIOUring, PollerIOUring, false}, nil)
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fds[1])
	t.Cleanup(func() { _ = syscall.Close(fds[0]) })
	f := b.open(fds[0], nil)
	want := make([]byte, 1000)
	pattern(want, 2)
	got := make([]byte, 1000)
	a := b.ask(OpRead, 0, got[:300], got[300:301], got[301:])
	f.Submit(&a.Request)
	for at := 0; at < len(want); at += 50 {
		if _, err := syscall.Write(fds[1], want[at:at+50]); err != nil {
			t.Fatal(err)
		}
		b.l.turn(1e7)
	}
	if a.times == 0 {
		b.until(1)
	}
	if a.err != nil || !bytes.Equal(got, want) {
		t.Errorf("%v, or something else was read", a.err)
	}
}

// TestChoice has each kind of file on each kind of loop and says which engine serves it.
func TestChoice(t *testing.T) {
	for _, c := range []struct {
		name   string
		t      traits
		uring  bool
		want   EngineKind
		reason string
	}{
		{"tmpfs", traits{regular: true, inMemory: true}, true, EngineLinuxAIO, "RWF_NOWAIT"},
		{"tmpfs, epoll", traits{regular: true, inMemory: true}, false, EngineLinuxAIO, "RWF_NOWAIT"},
		{"tmpfs that can tell", traits{regular: true, inMemory: true, noWait: true}, true, EngineIOUring, "buffered"},
		{"zram", traits{block: true, direct: true}, true, EngineLinuxAIO, "RWF_NOWAIT"},
		{"zram, buffered", traits{block: true}, true, EngineThreads, "RWF_NOWAIT"},
		{"network file, buffered", traits{regular: true}, true, EngineThreads, "RWF_NOWAIT"},
		{"direct", traits{regular: true, direct: true, noWait: true}, true, EngineIOUring, "direct"},
		{"direct, epoll", traits{regular: true, direct: true, noWait: true}, false, EngineLinuxAIO, "direct"},
		{"disk", traits{block: true, direct: true, noWait: true}, true, EngineIOUring, "direct"},
		{"buffered", traits{regular: true, noWait: true}, true, EngineIOUring, "buffered"},
		{"buffered, epoll", traits{regular: true, noWait: true}, false, EngineThreads, "buffered"},
		{"character device", traits{}, true, EngineThreads, "neither"},
	} {
		list := prefer(c.t, c.uring)
		if list[0].kind != c.want || !strings.Contains(list[0].reason, c.reason) {
			t.Errorf("%s: %s (%s), want %s", c.name, list[0].kind, list[0].reason, c.want)
		}
		if last := list[len(list)-1].kind; last != EngineThreads {
			t.Errorf("%s: falls back to %s in the end", c.name, last)
		}
	}
}

// TestChoiceOfRealFiles opens a file in memory and a buffered one on disk on a loop without io_uring.
func TestChoiceOfRealFiles(t *testing.T) {
	b := newEngineBed(t, engineSetup{EngineAuto, PollerEpoll, false}, nil)
	f := b.file(page)
	if traits, err := askFile(f.Fd(), false); err != nil || !traits.regular || traits.direct {
		t.Errorf("traits %+v, %v", traits, err)
	} else if traits.inMemory && !traits.noWait && f.Engine() != EngineLinuxAIO && !strings.Contains(f.Reason(), "not linux-aio") {
		t.Errorf("file in memory is served by %s: %s", f.Engine(), f.Reason())
	}
	b.must(f, b.ask(OpRead, 0, b.buffer(page)))

	name := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(name, make([]byte, page), 0o600); err != nil {
		t.Fatal(err)
	}
	disk, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer disk.Close()
	traits, err := askFile(int(disk.Fd()), false)
	if err != nil {
		t.Fatal(err)
	}
	if traits.inMemory {
		t.Skip("needs a directory for temporary files that is on a disk")
	}
	g, err := b.l.OpenFile(int(disk.Fd()), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if g.Engine() != EngineThreads {
		t.Errorf("buffered file is served by %s: %s", g.Engine(), g.Reason())
	}
}

// TestEngineThatCannotBeHad asks for io_uring on a loop without it: by name an error that says why, else the next one.
func TestEngineThatCannotBeHad(t *testing.T) {
	b := newEngineBed(t, engineSetup{EngineAuto, PollerEpoll, false}, nil)
	fd := b.create(page)
	_, err := b.l.OpenFile(fd, &FileOptions{Engine: EngineIOUring, Name: "disk.raw"})
	if !errors.Is(err, ErrNotSupported) || !strings.Contains(err.Error(), "open disk.raw") || !strings.Contains(err.Error(), "epoll") {
		t.Errorf("error %v", err)
	}
	if _, err := b.l.OpenFile(fd, &FileOptions{Engine: EngineKind(9)}); err == nil {
		t.Error("an engine that does not exist was opened")
	}
	if _, err := b.l.OpenFile(1<<20, nil); !errors.Is(err, syscall.EBADF) {
		t.Errorf("bad descriptor: %v", err)
	}
}
