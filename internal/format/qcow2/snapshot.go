// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"encoding/binary"
	"math"
)

const (
	snapshotFixed = 40 // bytes before the extra data
	// extra data that is known: size of the VM state, size of the disk, instruction count
	extraVMState  = 8
	extraDiskSize = 16
	extraICount   = 24
	// NoICount is the instruction count of a snapshot that has none.
	NoICount = math.MaxUint64
)

// Snapshot is an entry of the snapshot table (section Snapshots).
type Snapshot struct {
	L1Offset  int64 // this, L1Entries and DiskSize may be used after Validate alone
	L1Entries uint32
	ID, Name  string

	Seconds     uint32 // since the epoch, when it was taken
	Nanoseconds uint32
	VMClock     uint64 // nanoseconds that the guest had run
	VMState     uint64 // bytes of saved state, behind the disk's end

	DiskSize int64  // of the virtual disk; where ExtraSize does not reach it, that of the header
	ICount   uint64 // instructions the guest had run, NoICount when unknown

	// ExtraSize is the length of the extra data. Version 3 demands 16 at least; Encode writes at least as much.
	ExtraSize uint32
	// Unknown are the extra data behind those known here; they are kept.
	Unknown []byte
}

// snapshotSize is the length of an entry, from its first 40 bytes.
func snapshotSize(b []byte, off int64) (int, error) {
	id, name, extra := binary.BigEndian.Uint16(b[12:]), binary.BigEndian.Uint16(b[14:]), binary.BigEndian.Uint32(b[36:])
	if extra > MaxSnapshotExtra {
		return 0, corruptf(off, "snapshot has %d bytes of extra data (at most %d are allowed)", extra, MaxSnapshotExtra)
	}
	return (snapshotFixed + int(extra) + int(id) + int(name) + 7) &^ 7, nil
}

// ParseSnapshot reads the entry at the start of b, which lies at off of the image, and tells its length. size is that
// of the header, for entries that do not say the size of their disk. An entry cut off is an error.
func ParseSnapshot(b []byte, off, size int64) (Snapshot, int, error) {
	if len(b) < snapshotFixed {
		return Snapshot{}, 0, corruptf(off, "snapshot table is cut off")
	}
	n, err := snapshotSize(b, off)
	if err != nil {
		return Snapshot{}, 0, err
	}
	be := binary.BigEndian
	s := Snapshot{
		L1Entries: be.Uint32(b[8:]), Seconds: be.Uint32(b[16:]), Nanoseconds: be.Uint32(b[20:]),
		VMClock: be.Uint64(b[24:]), VMState: uint64(be.Uint32(b[32:])),
		DiskSize: size, ICount: NoICount, ExtraSize: be.Uint32(b[36:]),
	}
	id, name := int(be.Uint16(b[12:])), int(be.Uint16(b[14:]))
	if used := snapshotFixed + int(s.ExtraSize) + id + name; len(b) < used {
		return Snapshot{}, 0, corruptf(off, "snapshot table is cut off")
	}
	s.L1Offset = int64(be.Uint64(b))
	extra := b[snapshotFixed:][:s.ExtraSize]
	s.parseExtra(extra)
	rest := b[snapshotFixed+len(extra):]
	s.ID, s.Name = string(rest[:id]), string(rest[id:id+name])
	return s, n, nil
}

func (s *Snapshot) parseExtra(extra []byte) {
	be := binary.BigEndian
	if len(extra) >= extraVMState {
		s.VMState = be.Uint64(extra)
	}
	if len(extra) >= extraDiskSize {
		s.DiskSize = int64(be.Uint64(extra[8:]))
	}
	if len(extra) >= extraICount {
		s.ICount = be.Uint64(extra[16:])
		s.Unknown = append([]byte(nil), extra[extraICount:]...)
	}
}

// Validate checks size and place of the snapshot's L1 table as Header.Validate does for the active one, and that it
// covers the snapshot's disk.
func (s *Snapshot) Validate(g *Geometry) error {
	n := int64(s.L1Entries) * 8
	switch {
	case n > MaxL1Bytes:
		return corruptf(s.L1Offset, "snapshot %q has too large an L1 table (%d entries)", s.ID, s.L1Entries)
	case s.L1Offset < 0, !g.Aligned(s.L1Offset), s.L1Offset > math.MaxInt64-n, s.L1Offset == 0 && n > 0:
		return corruptf(s.L1Offset, "snapshot %q has its L1 table at no possible place", s.ID)
	case s.DiskSize < 0:
		return corruptf(s.L1Offset, "snapshot %q has a disk of %d bytes", s.ID, uint64(s.DiskSize))
	case g.L1EntriesFor(s.DiskSize) > int64(s.L1Entries):
		return corruptf(s.L1Offset, "snapshot %q has too small an L1 table for its disk (%d entries)", s.ID, s.L1Entries)
	}
	return nil
}

// Encode is the entry as it is written, padded. It says all that is known, so at least 24 bytes of extra data where the
// instruction count is known, else 16.
func (s *Snapshot) Encode() ([]byte, error) {
	extra := extraDiskSize
	if s.ICount != NoICount || s.ExtraSize >= extraICount {
		extra = extraICount + len(s.Unknown)
	}
	if len(s.ID) > math.MaxUint16 || len(s.Name) > math.MaxUint16 || extra > MaxSnapshotExtra {
		return nil, invalidf("name of the snapshot is too long")
	}
	b := make([]byte, (snapshotFixed+extra+len(s.ID)+len(s.Name)+7)&^7)
	be := binary.BigEndian
	be.PutUint64(b, uint64(s.L1Offset))
	be.PutUint32(b[8:], s.L1Entries)
	be.PutUint16(b[12:], uint16(len(s.ID)))
	be.PutUint16(b[14:], uint16(len(s.Name)))
	be.PutUint32(b[16:], s.Seconds)
	be.PutUint32(b[20:], s.Nanoseconds)
	be.PutUint64(b[24:], s.VMClock)
	if s.VMState <= math.MaxUint32 {
		be.PutUint32(b[32:], uint32(s.VMState))
	}
	be.PutUint32(b[36:], uint32(extra))
	be.PutUint64(b[snapshotFixed:], s.VMState)
	be.PutUint64(b[snapshotFixed+8:], uint64(s.DiskSize))
	if extra >= extraICount {
		be.PutUint64(b[snapshotFixed+16:], s.ICount)
		copy(b[snapshotFixed+extraICount:], s.Unknown)
	}
	at := snapshotFixed + extra
	at += copy(b[at:], s.ID)
	copy(b[at:], s.Name)
	return b, nil
}

// EncodeSnapshots is the whole table.
func EncodeSnapshots(all []Snapshot) ([]byte, error) {
	if len(all) > MaxSnapshots {
		return nil, &limitError{"image would have too many snapshots"}
	}
	var table []byte
	for i := range all {
		b, err := all[i].Encode()
		if err != nil {
			return nil, err
		}
		table = append(table, b...)
	}
	if len(table) > MaxSnapshotTableBytes {
		return nil, &limitError{"snapshot table would be too large"}
	}
	return table, nil
}

// ReadSnapshots reads the snapshot table of an image whose header is valid, and tells its length in bytes. It reads
// entry by entry, at most MaxSnapshotTableBytes in all. The L1 tables that the entries name are not checked: see
// Snapshot.Validate.
func ReadSnapshots(read ReadFunc, h *Header) ([]Snapshot, int64, error) {
	var all []Snapshot
	var at int64
	buf := make([]byte, 4096)
	for range h.Snapshots {
		off := h.SnapshotsOffset + at
		if err := read(buf, off); err != nil {
			return nil, 0, err
		}
		n, err := snapshotSize(buf, off)
		if err != nil {
			return nil, 0, err
		}
		if at += int64(n); at > MaxSnapshotTableBytes {
			return nil, 0, &limitError{"snapshot table is too large"}
		}
		entry := buf
		if n > len(entry) {
			entry = make([]byte, n)
			if err := read(entry, off); err != nil {
				return nil, 0, err
			}
		}
		s, _, err := ParseSnapshot(entry, off, h.Size)
		if err != nil {
			return nil, 0, err
		}
		all = append(all, s)
	}
	return all, at, nil
}

// SalvageSnapshots reads what ReadSnapshots refuses, for a repair: of extra data that is too long the first
// MaxSnapshotExtra bytes are kept (cut counts these snapshots), and of too many snapshots or too long a table the first
// that are allowed (lost counts the others). What it gives can be encoded.
func SalvageSnapshots(read ReadFunc, h *Header) (all []Snapshot, cut, lost int, err error) {
	var at, length int64
	fixed := make([]byte, snapshotFixed)
	n := min(h.Snapshots, MaxSnapshots)
	for i := range n {
		off := h.SnapshotsOffset + at
		if err := read(fixed, off); err != nil {
			return nil, 0, 0, err
		}
		extra := int64(binary.BigEndian.Uint32(fixed[36:]))
		kept := min(extra, MaxSnapshotExtra)
		binary.BigEndian.PutUint32(fixed[36:], uint32(kept))
		size, err := snapshotSize(fixed, off)
		if err != nil {
			return nil, 0, 0, err
		}
		if length += int64(size); length > MaxSnapshotTableBytes-MaxSnapshots*extraICount {
			return all, cut, int(h.Snapshots - i), nil // what is encoded may be longer by the data that are known here
		}
		names := int(binary.BigEndian.Uint16(fixed[12:])) + int(binary.BigEndian.Uint16(fixed[14:]))
		entry := make([]byte, size)
		copy(entry, fixed)
		if err := read(entry[snapshotFixed:][:kept], off+snapshotFixed); err != nil {
			return nil, 0, 0, err
		}
		if err := read(entry[snapshotFixed+kept:][:names], off+snapshotFixed+extra); err != nil {
			return nil, 0, 0, err
		}
		s, _, err := ParseSnapshot(entry, off, h.Size)
		if err != nil {
			return nil, 0, 0, err
		}
		if kept < extra {
			cut++
		}
		all = append(all, s)
		at += (snapshotFixed + extra + int64(names) + 7) &^ 7
	}
	return all, cut, int(h.Snapshots - n), nil
}
