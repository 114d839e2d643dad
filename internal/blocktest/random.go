// SPDX-License-Identifier: Apache-2.0

package blocktest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/block"
)

// SeedVariable names the environment variable that repeats a random test.
const SeedVariable = "SLUICE_SEED"

func seed(t *testing.T) uint64 {
	if text := os.Getenv(SeedVariable); text != "" {
		n, err := strconv.ParseUint(text, 0, 64)
		if err != nil {
			t.Fatalf("%s=%q: %v", SeedVariable, text, err)
		}
		return n
	}
	return uint64(time.Now().UnixNano())
}

// model is what a disk should hold. After a discard nobody knows.
type model struct {
	data    []byte
	unknown []bool
}

func newModel(size int64) *model {
	return &model{make([]byte, size), make([]bool, size)}
}

func (m *model) set(offset int64, b []byte) {
	copy(m.data[offset:], b)
	clear(m.unknown[offset : offset+int64(len(b))])
}

func (m *model) forget(offset, length int64) {
	for i := offset; i < offset+length; i++ {
		m.unknown[i] = true
	}
}

// differs finds the first byte that is known and different; -1 is none.
func (m *model) differs(offset int64, got []byte) int64 {
	if bytes.Equal(m.data[offset:offset+int64(len(got))], got) {
		return -1
	}
	for i, v := range got {
		if at := offset + int64(i); !m.unknown[at] && m.data[at] != v {
			return at
		}
	}
	return -1
}

// randomSpan bounds where a random test writes, so that requests meet.
const randomSpan = 96 << 10

// Random runs rounds of up to depth requests at once that do not overlap but touch the same blocks, and compares with a
// model after each. It prints the seed and the operations when they differ; SLUICE_SEED repeats them.
func Random(t *testing.T, s Subject, rounds, depth int) {
	b := s.bed(t, nil)
	n := seed(t)
	rng := rand.New(rand.NewPCG(n, 1))
	m := newModel(DiskSize)
	var history []string
	defer func() {
		if t.Failed() {
			t.Logf("repeat with %s=%d; operations:\n%s", SeedVariable, n, strings.Join(history, "\n"))
		}
	}()
	for round := range rounds {
		calls := randomCalls(rng, depth, byte(round))
		for _, c := range calls {
			history = append(history, fmt.Sprintf("%d: %s", round, c))
		}
		err := b.Run(calls...)
		for _, c := range calls {
			if c.Err != nil && !(c.Op == block.OpDiscard && block.Errno(c.Err) == block.Errno(block.ErrNotSupported)) {
				t.Fatalf("round %d: %v", round, err)
			}
			s.check(t, m, c)
		}
	}
	got := make([]byte, 2*randomSpan)
	if err := b.Read(0, got); err != nil {
		t.Fatal(err)
	}
	if at := m.differs(0, got); at >= 0 && !s.KeepsNothing {
		t.Fatalf("byte at %d is %#x at the end, want %#x", at, got[at], m.data[at])
	}
}

// check brings the model up to date with a call, or compares what it read.
func (s Subject) check(t *testing.T, m *model, c *Call) {
	t.Helper()
	at := c.Offset
	switch c.Op {
	case block.OpWrite:
		for _, buf := range c.Bufs {
			m.set(at, buf)
			at += int64(len(buf))
		}
	case block.OpWriteZeroes:
		m.set(at, make([]byte, c.Length))
	case block.OpDiscard:
		m.forget(at, c.Length)
	case block.OpRead:
		for _, buf := range c.Bufs {
			if bad := m.differs(at, buf); bad >= 0 && !s.KeepsNothing {
				t.Fatalf("%s: byte at %d is %#x, want %#x", c, bad, buf[bad-at], m.data[bad])
			}
			at += int64(len(buf))
		}
	}
}

// randomCalls makes calls that do not overlap.
func randomCalls(rng *rand.Rand, depth int, round byte) []*Call {
	var calls []*Call
	at := int64(rng.IntN(5000))
	for range 1 + rng.IntN(depth) {
		length := int64(1 + rng.IntN([]int{16, 700, 5000, 20000}[rng.IntN(4)]))
		if rng.IntN(3) == 0 {
			at, length = at&^511+512, (length+511)&^511
		}
		if rng.IntN(6) == 0 {
			at, length = (at+4095)&^4095, (length+4095)&^4095
		}
		if at+length > randomSpan {
			break
		}
		calls = append(calls, randomCall(rng, at, length, round))
		at += length + int64(rng.IntN(3)*rng.IntN(600))
	}
	rng.Shuffle(len(calls), func(i, j int) { calls[i], calls[j] = calls[j], calls[i] })
	return calls
}

func randomCall(rng *rand.Rand, at, length int64, round byte) *Call {
	c := &Call{Offset: at}
	if rng.IntN(4) == 0 {
		c.Flags = block.FlagFUA
	}
	switch k := rng.IntN(12); {
	case k == 0:
		c.Op, c.Length = block.OpWriteZeroes, length
		if rng.IntN(2) == 0 {
			c.Flags |= block.FlagUnmap
		}
		return c
	case k == 1:
		return &Call{Op: block.OpDiscard, Offset: at, Length: length}
	case k == 2:
		return &Call{Op: block.OpFlush}
	case k < 6:
		c.Op, c.Flags = block.OpRead, 0
	default:
		c.Op = block.OpWrite
	}
	buf := Memory(int(length), 4096, []int{0, 0, 1, 512}[rng.IntN(4)])
	if c.Op == block.OpWrite {
		Pattern(buf, at, round)
	}
	c.Bufs = Segments(buf, []int{1 << 20, 4096, 512, 1 + rng.IntN(900)}[rng.IntN(4)])
	return c
}
