// SPDX-License-Identifier: Apache-2.0

package fault_test

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/fault"
	"github.com/sluice-blk/sluice/internal/node/mem"
)

func faulty(t *testing.T, text string, size int64) *fault.Node {
	t.Helper()
	below, err := mem.New(mem.Options{Size: size})
	if err != nil {
		t.Fatal(err)
	}
	n, err := fault.New(below, text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestConformance(t *testing.T) {
	for name, text := range map[string]string{
		"none":  "",
		"other": "read 1T-2T error=EIO; flush error=EIO after=1000000",
		"delay": "write delay=100us count=50; read delay=1us; flush delay=1us",
	} {
		t.Run(name, func(t *testing.T) {
			blocktest.Conform(t, blocktest.Subject{Open: func(t *testing.T, size int64) block.Node { return faulty(t, text, size) }})
		})
	}
}

func disk(t *testing.T, text string) (*blocktest.Disk, *fault.Node) {
	t.Helper()
	n := faulty(t, text, 1<<20)
	h := block.NewHandle(n, nil)
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	return blocktest.Guarded(t, blocktest.Loop(t, nil), h), n
}

func TestStatements(t *testing.T) {
	d, n := disk(t, "")
	buf := make([]byte, 4096)
	read := func(at int64) error { return d.Read(at, buf) }
	write := func(at int64) error { return d.Write(at, buf) }
	flush := func(int64) error { return d.Flush() }
	type step struct {
		do   func(int64) error
		at   int64
		want syscall.Errno
	}
	for _, c := range []struct {
		text  string
		steps []step
	}{
		{"read error=EIO", []step{{read, 0, syscall.EIO}, {write, 0, 0}, {flush, 0, 0}, {read, 8192, syscall.EIO}}},
		{"read 4096-8191 error=ENOSPC", []step{{read, 0, 0}, {read, 4096, syscall.ENOSPC}, {read, 1, syscall.ENOSPC}, {read, 8191, syscall.ENOSPC}, {read, 8192, 0}}},
		{"write 1K error=EIO", []step{{write, 0, syscall.EIO}, {write, 1025, 0}}},
		{"any error=5 count=1 after=1", []step{{read, 0, 0}, {flush, 0, syscall.EIO}, {write, 0, 0}}},
		{"any 0-100 error=EIO", []step{{flush, 0, 0}, {read, 0, syscall.EIO}}},
		{"flush error=ENOSPC; write error=EROFS", []step{{flush, 0, syscall.ENOSPC}, {write, 0, syscall.EROFS}, {read, 0, 0}}},
		{"# nothing\n\n write error=EIO # tail; read error=EIO\n;;", []step{{read, 0, 0}, {write, 0, syscall.EIO}}},
		{"read error=EIO count=1; read error=ENXIO count=1", []step{{read, 0, syscall.EIO}, {read, 0, syscall.ENXIO}, {read, 0, 0}}},
	} {
		if err := n.Set(c.text); err != nil {
			t.Fatal(err)
		}
		for i, s := range c.steps {
			if err := s.do(s.at); block.Errno(err) != s.want {
				t.Errorf("%q, step %d: %v, want %v", c.text, i, err, s.want)
			}
		}
	}
}

// A short write leaves its first bytes on the disk and fails; a short read fills its first bytes and fails.
func TestShort(t *testing.T) {
	d, n := disk(t, "write short=600; read short=100 error=ENXIO; flush short=1 error=ENOSPC")
	w := make([]byte, 2048)
	blocktest.Pattern(w, 0, 1)
	if err := d.Write(0, blocktest.Segments(w, 512)...); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	r := make([]byte, 2048)
	if err := d.Read(0, r); !errors.Is(err, syscall.ENXIO) || r[99] != w[99] || r[100] != 0 {
		t.Errorf("short read: %v, %d, %d", err, r[99], r[100])
	}
	if err := d.Flush(); !errors.Is(err, syscall.ENOSPC) {
		t.Error(err)
	}
	if err := n.Set(""); err != nil {
		t.Fatal(err)
	}
	if err := d.Read(0, r); err != nil || r[599] != w[599] || r[600] != 0 {
		t.Errorf("after a torn write: %v, %d, %d", err, r[599], r[600])
	}
	if n.Injected() != 3 {
		t.Errorf("%d faults counted", n.Injected())
	}
}

func TestDelay(t *testing.T) {
	d, _ := disk(t, "write delay=30ms; read delay=10ms error=EIO")
	before := time.Now()
	if err := d.Write(0, make([]byte, 512)); err != nil || time.Since(before) < 30*time.Millisecond {
		t.Errorf("after %v: %v", time.Since(before), err)
	}
	before = time.Now()
	if err := d.Read(0, make([]byte, 512)); !errors.Is(err, syscall.EIO) || time.Since(before) < 10*time.Millisecond {
		t.Errorf("after %v: %v", time.Since(before), err)
	}
}
