// SPDX-License-Identifier: Apache-2.0

package img

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/sluice-blk/sluice/internal/block"
)

// MapRequest is what a person asks of map.
type MapRequest struct {
	Source
	Start  int64
	Length int64 // at most; -1 is up to the end
}

// MapEntry is a stretch of a disk that is stored in one way.
type MapEntry struct {
	Start, Length       int64
	Depth               int
	Present, Zero, Data bool
	Offset              int64 // in File; -1 where it has none
	File                string
}

// Map tells how a disk is stored, through all of its backing chain, in order and without gaps. Neighbours of one kind are
// one entry. Where nothing is in the range it is one entry of no length.
func Map(ctx context.Context, r *MapRequest, each func(MapEntry) error) (err error) {
	loops, err := StartLoops(1)
	if err != nil {
		return err
	}
	defer loops.Stop()
	d, err := OpenDisk(ctx, loops.At(0), r.Source, DiskOptions{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	now := MapEntry{Start: r.Start, Offset: -1}
	n := max(0, d.Size()-r.Start)
	if r.Length >= 0 {
		n = min(n, r.Length)
	}
	if n > 0 {
		err = d.Map(ctx, r.Start, n, func(e block.Extent) error {
			next := mapEntry(e)
			if now.Length == 0 || now.join(&next) {
				if now.Length == 0 {
					now = next
				}
				return nil
			}
			out := now
			now = next
			return each(out)
		})
	}
	if err != nil {
		return err
	}
	return each(now)
}

func mapEntry(e block.Extent) MapEntry {
	m := MapEntry{Start: e.Offset, Length: e.Length, Depth: e.Depth, Present: e.Present, Zero: e.Zero, Data: e.Data, Offset: e.Host, File: e.File}
	if m.Offset < 0 {
		m.Offset, m.File = -1, ""
	}
	return m
}

// join makes m longer by what follows it, when that is more of the same.
func (m *MapEntry) join(next *MapEntry) bool {
	same := m.Depth == next.Depth && m.Present == next.Present && m.Zero == next.Zero && m.Data == next.Data && m.File == next.File
	if !same || (m.Offset < 0) != (next.Offset < 0) || m.Offset >= 0 && m.Offset+m.Length != next.Offset {
		return false
	}
	m.Length += next.Length
	return true
}

// ErrUnmappable ends the text of a map that has data which stand in no file as they are.
var ErrUnmappable error = Wordedf("File contains external, encrypted or compressed clusters.")

// MapWriter writes entries as qemu-img does: JSON, or the data alone for people.
type MapWriter struct {
	w     io.Writer
	json  bool
	began bool
}

// NewMapWriter writes what stands before the entries.
func NewMapWriter(w io.Writer, json bool) (*MapWriter, error) {
	head := fmt.Sprintf("%-16s%-16s%-16s%s\n", "Offset", "Length", "Mapped to", "File")
	if json {
		head = "["
	}
	_, err := io.WriteString(w, head)
	return &MapWriter{w: w, json: json}, err
}

// Write writes an entry.
func (m *MapWriter) Write(e MapEntry) error {
	if !m.json {
		return m.writeText(e)
	}
	comma, offset := "", ""
	if m.began {
		comma = ",\n"
	}
	if e.Offset >= 0 {
		offset = fmt.Sprintf(", \"offset\": %d", e.Offset)
	}
	m.began = true
	_, err := fmt.Fprintf(m.w, "%s{ \"start\": %d, \"length\": %d, \"depth\": %d, \"present\": %t, \"zero\": %t, \"data\": %t%s}",
		comma, e.Start, e.Length, e.Depth, e.Present, e.Zero, e.Data, offset)
	return err
}

func (m *MapWriter) writeText(e MapEntry) error {
	switch {
	case !e.Data || e.Zero:
		return nil
	case e.Offset < 0:
		return ErrUnmappable
	}
	_, err := fmt.Fprintf(m.w, "%-16s%-16s%-16s%s\n", hex(e.Start), hex(e.Length), hex(e.Offset), e.File)
	return err
}

// hex has no prefix for nothing.
func hex(n int64) string {
	if n == 0 {
		return "0"
	}
	return fmt.Sprintf("%#x", n)
}

// End writes what stands behind the entries.
func (m *MapWriter) End() error {
	if !m.json {
		return nil
	}
	_, err := io.WriteString(m.w, "]\n")
	return err
}
