// SPDX-License-Identifier: Apache-2.0

package blocktest

import (
	"fmt"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/fault"
)

// script is what the n-th failure tests do: every operation, aligned and not, one after the other. Each call stays within
// its own area, so that one that failed tells nothing of the others.
func script() []*Call {
	buf := func(n, skew int, round byte) [][]byte {
		b := Memory(n, 4096, skew)
		Pattern(b, 0, round)
		return Segments(b, 1536)
	}
	return []*Call{
		{Op: block.OpWrite, Offset: 0, Bufs: buf(65536, 0, 31)},
		{Op: block.OpWrite, Offset: 70001, Bufs: buf(3, 0, 32)},
		{Op: block.OpWrite, Offset: 80000, Bufs: buf(9000, 1, 33)},
		{Op: block.OpFlush},
		{Op: block.OpWrite, Flags: block.FlagFUA, Offset: 98304, Bufs: buf(4096, 0, 34)},
		{Op: block.OpWriteZeroes, Offset: 110001, Length: 10000},
		{Op: block.OpWriteZeroes, Flags: block.FlagUnmap | block.FlagFUA, Offset: 131072, Length: 65536},
		{Op: block.OpRead, Offset: 80000, Bufs: buf(9000, 1, 35)},
		{Op: block.OpDiscard, Offset: 262144, Length: 65536},
		{Op: block.OpRead, Offset: 1, Bufs: buf(60000, 0, 36)},
	}
}

// scriptSpan is how far the script reaches.
const scriptSpan = 336 << 10

// maxScript bounds how many requests a node can see of the script, however it is split.
const maxScript = 200

// NthFailure makes the n-th request that reaches the node fail, once and for ever, for every n that there is. Nothing may
// hang, every failure is told, what was told as written is there, and without faults all is well again.
func NthFailure(t *testing.T, s Subject) {
	l := Loop(t, s.Loop)
	for _, how := range []string{"count=1", ""} {
		n := 0
		for ; n < maxScript; n++ {
			if !s.fail(t, l, fmt.Sprintf("any after=%d error=EIO %s", n, how)) {
				break
			}
		}
		if n == 0 || n == maxScript {
			t.Errorf("the script was failed %d times, which cannot be", n)
		}
	}
}

// fail runs the script with faults, and tells whether one was injected.
func (s Subject) fail(t *testing.T, l *aio.Loop, text string) bool {
	t.Helper()
	var faults *fault.Node
	faulty := s
	faulty.Open = func(t *testing.T, size int64) block.Node {
		n, err := fault.New(s.Open(t, size), text)
		if err != nil {
			t.Fatal(err)
		}
		faults = n
		return n
	}
	injected := false
	t.Run(text, func(t *testing.T) {
		b := faulty.bedOn(t, l, nil)
		m := newModel(scriptSpan)
		failed := 0
		for _, c := range script() {
			err := b.Run(c)
			switch {
			case err == nil:
				s.check(t, m, c)
			case c.Op == block.OpDiscard && block.Errno(err) == syscall.EOPNOTSUPP:
			case block.Errno(err) != syscall.EIO:
				t.Fatalf("%v, want EIO", err)
			default:
				failed++
				// The block may hold the old or the new, and so may its neighbours by what was read to write a part.
				m.forget(c.Offset, c.size())
			}
		}
		injected = faults.Injected() > 0
		if injected != (failed > 0) {
			t.Fatalf("%d faults were injected and %d failures told", faults.Injected(), failed)
		}
		if err := faults.Set(""); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, scriptSpan)
		if err := b.Read(0, got); err != nil {
			t.Fatalf("after the faults: %v", err)
		}
		if at := m.differs(0, got); at >= 0 && !s.KeepsNothing {
			t.Fatalf("byte at %d is %#x, want %#x", at, got[at], m.data[at])
		}
		for _, c := range script() {
			if err := b.Run(c); err != nil && block.Errno(err) != syscall.EOPNOTSUPP {
				t.Fatalf("after the faults: %v", err)
			}
		}
	})
	return injected
}
