// SPDX-License-Identifier: Apache-2.0

// Package imagetest holds what the tests of codecs of disk images have in common: whatever the bytes are, opening them ends
// with a map that keeps to its contract, or with an error that says whose fault it is, in memory bounded by their number.
package imagetest

import (
	"bytes"
	"errors"
	"io"
	"runtime"
	"testing"

	"github.com/sluice-blk/sluice/internal/format/sparse"
)

// Open opens an image in the codec under test, and gives the size of its disk, and its map.
type Open func(r io.ReaderAt, size int64) (disk int64, m sparse.Map, err error)

// maxLookups bounds the walk through a map: one of many small extents is walked in part.
const maxLookups = 5000

// Survives opens the bytes and walks through the map, if they give one. It answers the error of opening them.
func Survives(t testing.TB, open Open, image []byte) error {
	t.Helper()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	disk, m, err := open(bytes.NewReader(image), int64(len(image)))
	runtime.ReadMemStats(&after)
	// The rest is buffers, and the pointers to the pages of the largest table there may be.
	if used, bound := after.TotalAlloc-before.TotalAlloc, uint64(4*len(image)+3<<20); used > bound {
		t.Errorf("%d bytes were allocated for an image of %d, want at most %d", used, len(image), bound)
	}
	if err != nil {
		var corrupt *sparse.CorruptError
		var unsupported *sparse.UnsupportedError
		if !errors.As(err, &corrupt) && !errors.As(err, &unsupported) {
			t.Errorf("the error does not tell whether the image is corrupt or not supported: %v", err)
		}
		return err
	}
	walk(t, disk, m, int64(len(image)))
	return nil
}

func walk(t testing.TB, disk int64, m sparse.Map, fileSize int64) {
	t.Helper()
	if disk < 0 || disk%sparse.Sector != 0 {
		t.Fatalf("a disk of %d bytes", disk)
	}
	end := (fileSize + sparse.Sector - 1) &^ (sparse.Sector - 1)
	for at, n := int64(0), 0; at < disk && n < maxLookups; n++ {
		e := m.Lookup(at, disk-at)
		switch {
		case e.Offset != at || e.Length <= 0 || e.Length > disk-at || e.Kind > sparse.Deflate:
			t.Fatalf("at %d of %d: %+v", at, disk, e)
		case e.Kind == sparse.Data && (e.Host < 0 || e.Host > end || e.Length > end-e.Host):
			t.Fatalf("%+v reaches beyond the end of the file at %d", e, fileSize)
		case e.Kind == sparse.Deflate && (e.Host < 0 || e.Room <= 0 || e.Host+e.Room > end):
			t.Fatalf("grain %+v reaches beyond the end of the file at %d", e, fileSize)
		}
		at += e.Length
	}
}

// Change is a test of one field.
type Change struct {
	Name string
	At   int // negative: from the end
	To   []byte
	Want string // a part of the error; "": it is taken all the same
}

// Apply gives the image with the change.
func (c Change) Apply(image []byte) []byte {
	b := bytes.Clone(image)
	at := c.At
	if at < 0 {
		at += len(b)
	}
	copy(b[at:], c.To)
	return b
}
