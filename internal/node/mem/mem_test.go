// SPDX-License-Identifier: Apache-2.0

package mem_test

import (
	"bytes"
	"testing"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/mem"
)

func open(journal bool) func(t *testing.T, size int64) block.Node {
	return func(t *testing.T, size int64) block.Node {
		n, err := mem.New(mem.Options{Size: size, Journal: journal})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
}

func TestConformance(t *testing.T) {
	t.Run("plain", func(t *testing.T) { blocktest.Conform(t, blocktest.Subject{Open: open(false)}) })
	t.Run("journal", func(t *testing.T) { blocktest.Conform(t, blocktest.Subject{Open: open(true)}) })
}

// A crash keeps what was flushed or written with FUA, and of the rest what the test says, sector by sector.
func TestCrashClone(t *testing.T) {
	n, err := mem.New(mem.Options{Size: 1 << 20, Journal: true})
	if err != nil {
		t.Fatal(err)
	}
	h := block.NewHandle(n, nil)
	defer h.Close()
	l := blocktest.Loop(t, nil)
	d := blocktest.Guarded(t, l, h)
	defer d.Close()
	page := func(round byte) []byte {
		b := make([]byte, 4096)
		blocktest.Pattern(b, 0, round)
		return b
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(d.Write(0, page(1)))
	must(d.Flush())
	must(d.Write(0, page(2)))    // in the cache over what was flushed
	must(d.Write(8192, page(3))) // overwritten by FUA
	must(d.Run(&blocktest.Call{Op: block.OpWrite, Flags: block.FlagFUA, Offset: 8192, Bufs: [][]byte{page(4)}}))
	must(d.Discard(65536, 4096))

	torn := append(append([]byte(nil), page(2)[:512]...), page(1)[512:]...)
	for _, c := range []struct {
		name     string
		survives func(int64) bool
		want     []byte
	}{
		{"nothing", func(int64) bool { return false }, page(1)},
		{"everything", func(int64) bool { return true }, page(2)},
		{"first sector", func(at int64) bool { return at == 0 }, torn},
	} {
		t.Run(c.name, func(t *testing.T) {
			clone, err := n.CrashClone(c.survives)
			if err != nil {
				t.Fatal(err)
			}
			h := block.NewHandle(clone, nil)
			defer h.Close()
			d := blocktest.Guarded(t, l, h)
			defer d.Close()
			got := make([]byte, 12288)
			if err := d.Read(0, got); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got[:4096], c.want) {
				t.Error("other bytes where unflushed lies over flushed")
			}
			if !bytes.Equal(got[8192:], page(4)) {
				t.Error("a durable write is lost, or an older one lies over it")
			}
		})
	}
}

func TestCloneNeedsJournal(t *testing.T) {
	n, err := mem.New(mem.Options{Size: 4096})
	if err != nil {
		t.Fatal(err)
	}
	defer n.Close()
	if _, err := n.CrashClone(nil); err == nil {
		t.Error("a disk without a journal was cloned")
	}
}
