// SPDX-License-Identifier: Apache-2.0

package img

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func tempStore(t *testing.T, content string) *Store {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := OpenStore(path, StoreOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (s *Store) mustRead(t *testing.T, off int64, n int) string {
	t.Helper()
	p := bytes.Repeat([]byte{'?'}, n)
	if err := s.Read(p, off); err != nil {
		t.Fatal(err)
	}
	return string(p)
}

func (s *Store) mustSize(t *testing.T, want int64) {
	t.Helper()
	if n, err := s.Size(); n != want || err != nil {
		t.Errorf("size is %d, want %d, %v", n, want, err)
	}
}

func TestStoreReadsZerosBehindItsEnd(t *testing.T) {
	s := tempStore(t, "abc")
	if got := s.mustRead(t, 1, 4); got != "bc\x00\x00" {
		t.Errorf("across the end: %q", got)
	}
	if got := s.mustRead(t, 1<<40, 2); got != "\x00\x00" {
		t.Errorf("far behind the end: %q", got)
	}
}

func TestStoreZeroGrowsAndClears(t *testing.T) {
	s := tempStore(t, strings.Repeat("x", 10000))
	for _, c := range []struct{ off, n, size int64 }{{100, 50, 10000}, {4096, 4096, 10000}, {9990, 20, 10010}, {20000, 100, 20100}, {0, 0, 20100}} {
		if err := s.Zero(c.off, c.n); err != nil {
			t.Fatal(err)
		}
		s.mustSize(t, c.size)
		if got := s.mustRead(t, c.off, int(c.n)); got != strings.Repeat("\x00", int(c.n)) {
			t.Errorf("%d bytes at %d: %q", c.n, c.off, got)
		}
	}
	if got := s.mustRead(t, 98, 54); got != "xx"+strings.Repeat("\x00", 50)+"xx" {
		t.Errorf("around the zeros: %q", got)
	}
}

func TestStoreSpace(t *testing.T) {
	s := tempStore(t, "")
	if err := errors.Join(s.WriteZeros(0, 3<<20), s.Flush()); err != nil {
		t.Fatal(err)
	}
	full, err := s.Allocated()
	if err != nil || full < 3<<20 {
		t.Errorf("%d bytes are allocated, %v", full, err)
	}
	if err := s.Discard(1<<20, 1<<20); err != nil {
		t.Fatal(err)
	}
	s.mustSize(t, 3<<20)
	if n, err := s.Allocated(); err != nil || n > full-1<<20 {
		t.Errorf("%d of %d bytes are allocated after a discard, %v", n, full, err)
	}
	if err := s.Allocate(1<<20, 1<<20); err != nil {
		t.Fatal(err)
	}
	if n, err := s.Allocated(); err != nil || n < 3<<20 {
		t.Errorf("%d bytes are allocated again, %v", n, err)
	}
}

func TestStoreLocks(t *testing.T) {
	writer := tempStore(t, "")
	path := writer.Path()
	for _, c := range []struct {
		o    StoreOptions
		want string
	}{
		{StoreOptions{ReadOnly: true}, "Failed to get shared \"write\" lock\nIs another process using the image [" + path + "]?"},
		{StoreOptions{}, "Failed to get \"write\" lock\nIs another process using the image [" + path + "]?"},
		{StoreOptions{ReadOnly: true, Shared: true}, ""},
		{StoreOptions{NoLock: true}, ""},
	} {
		s, err := OpenStore(path, c.o)
		switch {
		case err == nil && c.want == "":
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		case err == nil:
			t.Errorf("%+v: nothing is said", c.o)
			s.Close()
		case OpenText(path, err) != c.want || !errors.Is(err, syscall.EAGAIN):
			t.Errorf("%+v: %v", c.o, err)
		}
	}
	// A file in use is not emptied by somebody who wants to make a new one of it.
	if err := writer.Write([]byte("x"), 0); err != nil {
		t.Fatal(err)
	}
	if s, err := CreateStore(path, StoreOptions{}); err == nil {
		s.Close()
		t.Error("a file in use was created anew")
	}
	writer.mustSize(t, 1)
}

func TestStoreUndoRemovesWhatItMade(t *testing.T) {
	old := filepath.Join(t.TempDir(), "old")
	if err := os.WriteFile(old, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	for path, stays := range map[string]bool{old: true, filepath.Join(t.TempDir(), "new"): false} {
		s, err := CreateStore(path, StoreOptions{})
		if err == nil {
			err = s.Undo()
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(path); (err == nil) != stays {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestStoreRefusesSpecialFiles(t *testing.T) {
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{fifo, t.TempDir()} {
		s, err := OpenStore(path, StoreOptions{ReadOnly: true})
		if err == nil {
			s.Close()
			t.Errorf("%s was opened", path)
		} else if want := "'file' driver requires '" + path + "' to be a regular file"; OpenText(path, err) != want {
			t.Errorf("said %q, want %q", OpenText(path, err), want)
		}
	}
}
