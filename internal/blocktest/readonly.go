// SPDX-License-Identifier: Apache-2.0

package blocktest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/fault"
)

// ReadOnlySubject is what the suite for nodes that are only read runs over.
type ReadOnlySubject struct {
	// Open opens the node. Each call gives another one of the same contents.
	Open func(t *testing.T) block.Node
	// Faulty opens the node with faults in the node below it; nil when there is none.
	Faulty func(t *testing.T, text string) (block.Node, *fault.Node)
	// Content is what it holds, all of it.
	Content []byte
}

// ConformReadOnly runs the suite for nodes that are only read: they keep to the contract, whatever is asked.
func ConformReadOnly(t *testing.T, s ReadOnlySubject) {
	for _, c := range []struct {
		name string
		run  func(t *testing.T, s ReadOnlySubject)
	}{
		{"InfoIsSound", readOnlyInfo},
		{"AllIsThere", allIsThere},
		{"AnyShapeAndManyAtOnce", readPieces},
		{"OutOfRangeIsRefused", readOutOfRange},
		{"ChangesAreRefused", refusesChanges},
		{"DrainUnderLoad", readDrain},
		{"TwoLoops", readTwoLoops},
		{"MapIsTrue", mapIsTrue},
		{"EachFailureIsTold", readFailures},
	} {
		if c.name == "EachFailureIsTold" && s.Faulty == nil {
			continue
		}
		t.Run(c.name, func(t *testing.T) { c.run(t, s) })
	}
}

// handle opens the node behind a guard, which is closed after the disks that are opened on it.
func (s ReadOnlySubject) handle(t *testing.T) *block.Handle {
	t.Helper()
	return closing(t, s.Open(t))
}

func closing(t *testing.T, n block.Node) *block.Handle {
	h := block.NewHandle(n, nil)
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Errorf("close handle: %v", err)
		}
	})
	return h
}

func (s ReadOnlySubject) disk(t *testing.T) *Disk {
	t.Helper()
	return Guarded(t, Loop(t, nil), s.handle(t))
}

func readOnlyInfo(t *testing.T, s ReadOnlySubject) {
	i := s.handle(t).Node().Info()
	if i.Size != int64(len(s.Content)) || !i.ReadOnly || i.Discard != block.None || i.WriteZeroes != block.None || i.WriteCache {
		t.Errorf("Info tells %+v, and the node is read-only and has %d bytes", i, len(s.Content))
	}
	if i.Align < 1 || i.Align&(i.Align-1) != 0 || i.MemAlign < 1 || i.MemAlign&(i.MemAlign-1) != 0 || i.Size%int64(i.Align) != 0 {
		t.Errorf("alignment %d of memory %d for %d bytes", i.Align, i.MemAlign, i.Size)
	}
	if i.Name == "" || i.Durability == "" || i.Engine == "" {
		t.Errorf("a text is missing: name %q, durability %q, engine %q", i.Name, i.Durability, i.Engine)
	}
}

func allIsThere(t *testing.T, s ReadOnlySubject) {
	got := make([]byte, len(s.Content))
	Pattern(got, 0, 99)
	if err := s.disk(t).Read(0, got); err != nil {
		t.Fatal(err)
	}
	if at := firstDifference(got, s.Content); at >= 0 {
		t.Fatalf("byte at %d is %#x, want %#x", at, got[at], s.Content[at])
	}
}

// pieces makes reads of all shapes.
func (s ReadOnlySubject) pieces(rng *rand.Rand, n int) []*Call {
	var calls []*Call
	for range n {
		length := min(1+rng.IntN([]int{512, 8192, 300 << 10}[rng.IntN(3)]), len(s.Content))
		at := rng.IntN(len(s.Content) - length + 1)
		buf := Memory(length, 4096, []int{0, 1, 512}[rng.IntN(3)])
		Pattern(buf, 0, 98)
		calls = append(calls, &Call{Op: block.OpRead, Offset: int64(at), Bufs: Segments(buf, 1+rng.IntN(70000))})
	}
	return calls
}

func (s ReadOnlySubject) compare(t *testing.T, calls []*Call) {
	t.Helper()
	for _, c := range calls {
		got := bytes.Join(c.Bufs, nil)
		if at := firstDifference(got, s.Content[c.Offset:c.Offset+int64(len(got))]); c.Err == nil && at >= 0 {
			t.Fatalf("%s: byte at %d is %#x", c, c.Offset+int64(at), got[at])
		}
	}
}

func readPieces(t *testing.T, s ReadOnlySubject) {
	d := s.disk(t)
	n := seed(t)
	rng := rand.New(rand.NewPCG(n, 2))
	for range 3 {
		calls := s.pieces(rng, 200)
		if err := d.Run(calls...); err != nil {
			t.Fatal(err)
		}
		s.compare(t, calls)
	}
	if t.Failed() {
		t.Logf("repeat with %s=%d", SeedVariable, n)
	}
}

func readOutOfRange(t *testing.T, s ReadOnlySubject) {
	d, size := s.disk(t), int64(len(s.Content))
	for _, at := range []int64{size, size - 511, size + 1, 1 << 55, -1} {
		if err := d.Read(at, make([]byte, 512)); !errors.Is(err, block.ErrRange) {
			t.Errorf("read at %d: %v, want %v", at, err, block.ErrRange)
		}
	}
}

func refusesChanges(t *testing.T, s ReadOnlySubject) {
	d := s.disk(t)
	for _, op := range []block.Op{block.OpWrite, block.OpDiscard, block.OpWriteZeroes} {
		c := &Call{Op: op, Length: 512, Bufs: [][]byte{make([]byte, 512)}}
		if err := d.Run(c); !errors.Is(err, block.ErrReadOnly) || block.Errno(err) != syscall.EROFS {
			t.Errorf("%s: %v, want %v", c, err, block.ErrReadOnly)
		}
	}
	if err := d.Flush(); err != nil {
		t.Error(err)
	}
}

func readDrain(t *testing.T, s ReadOnlySubject) {
	h := s.handle(t)
	d := Guarded(t, Loop(t, nil), h)
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	rng := rand.New(rand.NewPCG(5, 5))
	for range 3 {
		calls := s.pieces(rng, 100)
		batch := d.Start(calls...)
		if err := h.Drain(ctx); err != nil {
			t.Fatal(err)
		}
		if !batch.Done() {
			t.Fatal("requests are in flight in a drained handle")
		}
		h.Resume()
		if err := batch.Wait(t); err != nil {
			t.Fatal(err)
		}
		s.compare(t, calls)
	}
}

func readTwoLoops(t *testing.T, s ReadOnlySubject) {
	h := s.handle(t)
	if h.Node().Info().SingleLoop {
		return
	}
	first, second := Guarded(t, Loop(t, nil), h), Guarded(t, Loop(t, nil), h)
	rng := rand.New(rand.NewPCG(6, 6))
	a, b := s.pieces(rng, 100), s.pieces(rng, 100)
	one, two := first.Start(a...), second.Start(b...)
	if err := errors.Join(one.Wait(t), two.Wait(t)); err != nil {
		t.Fatal(err)
	}
	s.compare(t, append(a, b...))
}

// mapIsTrue looks for gaps, and for bytes in what is told to be zero.
func mapIsTrue(t *testing.T, s ReadOnlySubject) {
	n, at := s.handle(t).Node(), int64(0)
	err := block.Map(context.Background(), n, 0, n.Info().Size, func(e block.Extent) error {
		if e.Offset != at || e.Length <= 0 {
			return fmt.Errorf("extent %+v, want one that begins at %d", e, at)
		}
		if e.Zero && len(bytes.TrimLeft(s.Content[at:at+e.Length], "\x00")) > 0 {
			return fmt.Errorf("extent %+v is not zero", e)
		}
		at += e.Length
		return nil
	})
	if err != nil || at != n.Info().Size {
		t.Errorf("map ended at %d: %v", at, err)
	}
}

// readFailures fails the n-th request below, once and for ever, for every n that there is.
func readFailures(t *testing.T, s ReadOnlySubject) {
	for _, how := range []string{"count=1", ""} {
		for n := 0; ; n++ {
			injected := s.failRead(t, fmt.Sprintf("any after=%d error=EIO %s", n, how))
			if n == 0 && !injected && len(bytes.TrimLeft(s.Content, "\x00")) > 0 {
				t.Error("no read reaches the node below")
			}
			if !injected {
				break
			}
			if n > 40 {
				n += n / 2 // images of many pieces: some of them will do
			}
		}
	}
}

func (s ReadOnlySubject) failRead(t *testing.T, text string) (injected bool) {
	t.Run(text, func(t *testing.T) {
		n, faults := s.Faulty(t, text)
		d := Guarded(t, Loop(t, &aio.LoopOptions{}), closing(t, n))
		before := faults.Injected()
		calls := []*Call{{Op: block.OpRead, Bufs: [][]byte{make([]byte, len(s.Content))}}}
		err := d.Run(calls...)
		injected = faults.Injected() > before
		if injected != (err != nil) || err != nil && block.Errno(err) != syscall.EIO {
			t.Fatalf("%d faults, and the read answers %v", faults.Injected(), err)
		}
		s.compare(t, calls)
		if err := faults.Set(""); err != nil {
			t.Fatal(err)
		}
		if err := d.Run(calls...); err != nil {
			t.Fatalf("after the faults: %v", err)
		}
		s.compare(t, calls)
	})
	return injected
}
