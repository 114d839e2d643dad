// SPDX-License-Identifier: Apache-2.0

// Package memstore is a file in memory for tests of what stands on a Store: sparse, so that it can be terabytes long, and
// able to fail its n-th call. It checks that callers do what they may. Not safe for concurrent use.
package memstore

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
)

const page = 4096

// ErrInjected is what a failing call returns; it carries EIO.
var ErrInjected = fmt.Errorf("injected: %w", syscall.EIO)

// Store is the file. The zero value is an empty one.
type Store struct {
	// FailAt makes the call with this number, counted from 1, fail with ErrInjected and do nothing; For ever, all after it
	// too. Reads, writes and flushes count, Size does not. 0 is never.
	FailAt  int
	Forever bool
	Limit   int64 // of the size in bytes: who writes beyond it gets ENOSPC. 0 is none
	Calls   int   // so far
	Writes  int   // calls that change the file, of these
	Flushes int

	pages map[int64]*[page]byte
	size  int64
}

// Clone is a file of its own with the same content, which fails nothing.
func (s *Store) Clone() *Store {
	c := &Store{pages: make(map[int64]*[page]byte, len(s.pages)), size: s.size}
	for i, p := range s.pages {
		q := *p
		c.pages[i] = &q
	}
	return c
}

func (s *Store) call(off, n int64) error {
	if off < 0 || n < 0 || off+n < 0 {
		panic(fmt.Sprintf("memstore: call for %d bytes at %#x", n, off))
	}
	s.Calls++
	if s.FailAt != 0 && (s.Calls == s.FailAt || s.Forever && s.Calls > s.FailAt) {
		return ErrInjected
	}
	return nil
}

func (s *Store) room(end int64) error {
	if s.Limit != 0 && end > s.Limit {
		return syscall.ENOSPC
	}
	return nil
}

// Read fills p; bytes beyond the end are zero.
func (s *Store) Read(p []byte, off int64) error {
	if err := s.call(off, int64(len(p))); err != nil {
		return err
	}
	for len(p) > 0 {
		in := off % page
		n := min(len(p), int(page-in))
		if q := s.pages[off/page]; q != nil {
			copy(p[:n], q[in:])
		} else {
			clear(p[:n])
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// Write writes p.
func (s *Store) Write(p []byte, off int64) error {
	if err := s.call(off, int64(len(p))); err != nil {
		return err
	}
	if err := s.room(off + int64(len(p))); err != nil {
		return err
	}
	s.Writes++
	if s.pages == nil {
		s.pages = make(map[int64]*[page]byte)
	}
	s.size = max(s.size, off+int64(len(p)))
	for len(p) > 0 {
		in := off % page
		n := min(len(p), int(page-in))
		q := s.pages[off/page]
		if q == nil {
			q = new([page]byte)
			s.pages[off/page] = q
		}
		copy(q[in:], p[:n])
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// Zero makes a range read as zeros.
func (s *Store) Zero(off, n int64) error {
	if err := s.call(off, n); err != nil {
		return err
	}
	if err := s.room(off + n); err != nil {
		return err
	}
	s.Writes++
	s.drop(off, n, 0)
	s.size = max(s.size, off+n)
	return nil
}

// Discard fills whole pages with a pattern, so that who reads them is found out.
func (s *Store) Discard(off, n int64) error {
	if err := s.call(off, n); err != nil {
		return err
	}
	s.Writes++
	s.drop(off, min(n, max(0, s.size-off)), 0xdd)
	return nil
}

func (s *Store) drop(off, n int64, fill byte) {
	end := off + n
	for i, q := range s.pages {
		from, to := max(off, i*page), min(end, i*page+page)
		switch {
		case from >= to:
		case fill == 0 && to-from == page:
			delete(s.pages, i)
		default:
			for j := from - i*page; j < to-i*page; j++ {
				q[j] = fill
			}
		}
	}
}

// Allocate does nothing but be there.
func (s *Store) Allocate(off, n int64) error { return s.Zero(off, n) }

// Flush counts.
func (s *Store) Flush() error {
	s.Flushes++
	return s.call(0, 0)
}

// Size is the length.
func (s *Store) Size() (int64, error) { return s.size, nil }

// Truncate changes the length.
func (s *Store) Truncate(n int64) error {
	if err := s.call(n, 0); err != nil {
		return err
	}
	if err := s.room(n); err != nil {
		return err
	}
	s.Writes++
	if n < s.size {
		s.drop(n, s.size-n, 0)
	}
	s.size = n
	return nil
}

// Save writes the file to path, sparse.
func (s *Store) Save(t testing.TB, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err == nil {
		err = f.Truncate(s.size)
	}
	for i, p := range s.pages {
		if n := min(s.size-i*page, page); n > 0 && err == nil && *p != [page]byte{} {
			_, err = f.WriteAt(p[:n], i*page)
		}
	}
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Load reads the file at path.
func Load(t testing.TB, path string) *Store {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	s := &Store{size: st.Size(), pages: make(map[int64]*[page]byte)}
	for off := int64(0); off < s.size; off += page {
		next, err := f.Seek(off, 3) // SEEK_DATA
		if errors.Is(err, syscall.ENXIO) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		off = next &^ (page - 1)
		p := new([page]byte)
		if _, err := f.ReadAt(p[:min(page, s.size-off)], off); err != nil {
			t.Fatal(err)
		}
		if *p != [page]byte{} {
			s.pages[off/page] = p
		}
	}
	return s
}
