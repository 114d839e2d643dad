// SPDX-License-Identifier: Apache-2.0

package metadata

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// onDisk is the header as it is in the file. It changes when what it names is durable, so that whoever writes it next
// may write all of it: its fields lie in one sector, which is written whole or not at all.
type onDisk struct {
	h    qcow2.Header // the fields alone; Extensions and names are not looked at
	raw  []byte       // the bytes that hold them
	busy bool         // being written
	// stale says that a change failed, so that the file may have other fields than h.
	stale bool
}

// Bytes of the fixed fields. What lies behind them is changed by rewrite only.
const (
	fieldsVersion2 = 72
	fieldsVersion3 = 96 // up to the autoclear bits; behind it nothing changes
	offsetSize     = 24
)

func (d *onDisk) read(s Store, h *qcow2.Header) error {
	d.h = *h
	d.raw = make([]byte, fieldsVersion3)
	if h.Version == 2 {
		d.raw = d.raw[:fieldsVersion2]
	}
	return s.Read(d.raw, 0)
}

// change writes the fields as set makes them. Others that want to change them wait meanwhile. After an error the fields
// may be on disk or not; they are written again with the next change.
func (d *onDisk) change(m *Image, set func(h *qcow2.Header)) error {
	if err := m.wait(func() bool { return !d.busy }); err != nil {
		return err
	}
	d.busy = true
	set(&d.h)
	err := d.write(m)
	d.busy = false
	return err
}

func (d *onDisk) write(m *Image) error {
	d.encode()
	if err := m.s.Write(d.raw, 0); err != nil { // not m.write: the corrupt bit must pass
		d.stale = true
		return fmt.Errorf("write the header: %w", err)
	}
	return nil
}

func (d *onDisk) encode() {
	h := &d.h
	be := binary.BigEndian
	be.PutUint64(d.raw[offsetSize:], uint64(h.Size))
	l1, table, snapshots := h.L1Field(), h.RefcountTableField(), h.SnapshotsField()
	copy(d.raw[qcow2.OffsetL1:], l1[:])
	copy(d.raw[qcow2.OffsetRefcountTable:], table[:])
	copy(d.raw[qcow2.OffsetSnapshots:], snapshots[:])
	if h.Version >= 3 {
		be.PutUint64(d.raw[qcow2.OffsetIncompatible:], h.Incompatible)
		be.PutUint64(d.raw[qcow2.OffsetAutoclear:], h.Autoclear)
	}
}

// setDurable changes the fields of the header in use and on disk alike, and makes them durable. After an error they are
// what they were, but the disk may have either: what only one of them names must not be used again before restore, which the
// next commit does too.
func (m *Image) setDurable(set func(h *qcow2.Header)) error {
	d := &m.on
	if err := m.wait(func() bool { return !d.busy }); err != nil {
		return err
	}
	d.busy = true
	before := d.h
	set(&d.h)
	err := d.write(m)
	if err == nil {
		err = m.flush()
	}
	if err != nil {
		d.h, d.stale = before, true
	} else {
		set(m.h)
	}
	d.busy = false
	return err
}

// restore writes the header as it ought to be where the disk may have another.
func (m *Image) restore() error {
	if !m.on.stale {
		return nil
	}
	m.on.stale = false
	err := m.on.change(m, func(*qcow2.Header) {})
	if err == nil {
		err = m.flush()
	}
	m.on.stale = m.on.stale || err != nil
	return err
}

// needsPreparing tells whether something in the file must change before the first change of anything else.
func (m *Image) needsPreparing() bool {
	return m.h.Autoclear&^qcow2.KnownAutoclear != 0 || m.badBitmaps || slices.ContainsFunc(m.bitmaps, tracks)
}

// tracks tells whether a bitmap wants to know of all writes, and is not yet known to have missed some.
func tracks(b qcow2.Bitmap) bool {
	return b.Flags&qcow2.BitmapAuto != 0 && b.Flags&qcow2.BitmapInUse == 0
}

// prepare does that, once: autoclear bits that mean nothing to us are cleared, and bitmaps that ought to track what we
// write are marked as out of date. It is durable before the first change.
func (m *Image) prepare() error {
	for !m.ready {
		if !m.preparing {
			m.preparing = true
			err := m.declare()
			m.preparing = false
			if err != nil {
				return err
			}
			m.ready = true
		}
		if err := m.wait(func() bool { return m.ready || !m.preparing }); err != nil {
			return err
		}
	}
	return nil
}

func (m *Image) declare() error {
	for i := range m.bitmaps {
		if tracks(m.bitmaps[i]) {
			if err := m.outdate(i); err != nil {
				return err
			}
		}
	}
	return m.setDurable(func(h *qcow2.Header) {
		h.ClearUnknownAutoclear()
		if m.badBitmaps {
			h.Autoclear &^= qcow2.BitmapsBit
		}
	})
}

// clearAutoclear is the part of prepare that comes before changes that the guest does not see.
func (m *Image) clearAutoclear() error {
	if m.h.Autoclear&^qcow2.KnownAutoclear == 0 {
		return nil
	}
	return m.setDurable(func(h *qcow2.Header) { h.ClearUnknownAutoclear() })
}

// mark sets the dirty bit before refcounts may become wrong on disk: with lazy refcounts before the first change, else
// for what cannot be ordered. Version 2 has no such bit, and is never lazy.
func (m *Image) mark() error {
	for m.g.Version >= 3 && !m.marked && !m.keepMarked {
		if !m.marking {
			m.marking = true
			err := m.setDurable(func(h *qcow2.Header) { h.Incompatible |= qcow2.Dirty })
			m.marking = false
			if err != nil {
				return err
			}
			m.marked = true
		}
		if err := m.wait(func() bool { return m.marked || !m.marking }); err != nil {
			return err
		}
	}
	return nil
}

// unmark clears the dirty bit: refcounts on disk are right, and durable.
func (m *Image) unmark() error {
	if m.on.h.Incompatible&qcow2.Dirty == 0 || m.keepMarked || m.broken != nil {
		return nil
	}
	if err := m.setDurable(func(h *qcow2.Header) { h.Incompatible &^= qcow2.Dirty }); err != nil {
		return err
	}
	m.marked = false
	return nil
}

// rewrite changes more of the header than its fields: extensions. All of it lies in the first cluster; only the
// sectors that differ are written, in one piece.
func (m *Image) rewrite(set func(h *qcow2.Header)) error {
	d := &m.on
	if err := m.wait(func() bool { return !d.busy }); err != nil {
		return err
	}
	d.busy = true
	defer func() { d.busy = false }()
	before := d.h
	set(&d.h)
	b, sectors, err := m.encodeHeader(&d.h)
	if err == nil && sectors > 0 {
		err = m.s.Write(b[:sectors*sectorSize], 0)
		if err == nil {
			err = m.flush()
		}
		d.stale = err != nil
	}
	if err != nil {
		d.h = before
		return fmt.Errorf("write the header: %w", err)
	}
	copy(d.raw, b)
	set(m.h)
	return nil
}

// sectorSize is what a disk writes whole or not at all.
const sectorSize = 512

// encodeHeader is the first cluster with this header, and how many sectors of it differ from the file's, counted from the
// first.
func (m *Image) encodeHeader(h *qcow2.Header) (b []byte, sectors int, err error) {
	if b, err = h.Encode(); err != nil {
		return nil, 0, err
	}
	old := make([]byte, len(b))
	if err := m.read("the header", old, 0); err != nil {
		return nil, 0, err
	}
	for i := range len(b) / sectorSize {
		if !bytes.Equal(b[i*sectorSize:][:sectorSize], old[i*sectorSize:][:sectorSize]) {
			sectors = i + 1
		}
	}
	return b, sectors, nil
}
