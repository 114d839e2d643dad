// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// memStore is a file in memory, with what tests want to know and to break.
type memStore struct {
	data []byte
	// turn is called around each operation: a coroutine gives way to others there.
	turn func()
	// log, when wanted, has every change and flush in the order in which they were done.
	log    []event
	logged bool

	calls    int
	failAt   int  // this call fails; 0 none
	failOn   bool // and all that follow
	failWith error
	tear     *rand.Rand // a write that fails may have been done in part

	flushes, discards int
}

// event is a change of the file, or a flush where data is nil.
type event struct {
	off  int64
	data []byte
}

var errInjected = fmt.Errorf("injected: %w", syscall.EIO)

func (s *memStore) step() error {
	if s.turn != nil {
		s.turn()
	}
	s.calls++
	if s.failAt != 0 && (s.calls == s.failAt || s.failOn && s.calls > s.failAt) {
		if s.failWith != nil {
			return s.failWith
		}
		return errInjected
	}
	return nil
}

func (s *memStore) after() {
	if s.turn != nil {
		s.turn()
	}
}

func (s *memStore) Read(p []byte, off int64) error {
	if err := s.step(); err != nil {
		return err
	}
	s.readAt(p, off)
	s.after()
	return nil
}

func (s *memStore) readAt(p []byte, off int64) {
	clear(p)
	if off < int64(len(s.data)) {
		copy(p, s.data[off:])
	}
}

func (s *memStore) put(p []byte, off int64) {
	if s.logged {
		s.log = append(s.log, event{off, append([]byte{}, p...)})
	}
	s.data = putAt(s.data, p, off)
}

func putAt(data, p []byte, off int64) []byte {
	if end := off + int64(len(p)); end > int64(len(data)) {
		data = append(data, make([]byte, end-int64(len(data)))...)
	}
	copy(data[off:], p)
	return data
}

func (s *memStore) Write(p []byte, off int64) error {
	if err := s.step(); err != nil {
		if s.tear != nil && !errors.Is(err, syscall.ENOSPC) {
			s.put(p[:s.tear.IntN(len(p)+1)&^511], off)
		}
		return err
	}
	s.put(p, off)
	s.after()
	return nil
}

func (s *memStore) Zero(off, n int64) error { return s.Write(make([]byte, n), off) }

// Discard leaves rubbish, so that whoever still reads there is found out.
func (s *memStore) Discard(off, n int64) error {
	if err := s.step(); err != nil {
		return err
	}
	s.discards++
	rubbish := make([]byte, n)
	for i := range rubbish {
		rubbish[i] = 0xdb
	}
	if off < int64(len(s.data)) {
		s.put(rubbish[:min(n, int64(len(s.data))-off)], off)
	}
	s.after()
	return nil
}

func (s *memStore) Flush() error {
	if err := s.step(); err != nil {
		return err
	}
	s.flushes++
	if s.logged {
		s.log = append(s.log, event{})
	}
	s.after()
	return nil
}

func (s *memStore) Size() (int64, error) { return int64(len(s.data)), s.step() }

func (s *memStore) Truncate(n int64) error {
	if err := s.step(); err != nil {
		return err
	}
	s.data = append(s.data[:min(n, int64(len(s.data)))], make([]byte, max(0, n-int64(len(s.data))))...)
	return nil
}

// clone is the same file with nothing to break.
func (s *memStore) clone() *memStore { return &memStore{data: append([]byte(nil), s.data...)} }

// save writes it where other programs can read it.
func (s *memStore) save(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image.qcow2")
	if err := os.WriteFile(filepath.Join(filepath.Dir(path), "base"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, s.data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
