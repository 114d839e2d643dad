// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// Info is what info tells of an image. The order of the fields is that of the JSON.
type Info struct {
	BackingFormat   string          `json:"backing-filename-format,omitempty"`
	Snapshots       []SnapshotInfo  `json:"snapshots,omitempty"`
	VirtualSize     int64           `json:"virtual-size"`
	Filename        string          `json:"filename"`
	ClusterSize     int64           `json:"cluster-size,omitempty"`
	Format          string          `json:"format"`
	ActualSize      int64           `json:"actual-size"`
	Encrypted       bool            `json:"encrypted,omitempty"`
	Specific        *FormatSpecific `json:"format-specific,omitempty"`
	FullBacking     string          `json:"full-backing-filename,omitempty"`
	BackingFilename string          `json:"backing-filename,omitempty"`
	Dirty           bool            `json:"dirty-flag"`
}

// FormatSpecific is what only some format knows. Data is a struct whose JSON is the object; its text is written from the
// same fields.
type FormatSpecific struct {
	Type string `json:"type"`
	Data any    `json:"data"`
}

// SnapshotInfo is an internal snapshot.
type SnapshotInfo struct {
	ICount      *uint64 `json:"icount,omitempty"`
	VMClockNsec int64   `json:"vm-clock-nsec"`
	Name        string  `json:"name"`
	DateSec     int64   `json:"date-sec"`
	DateNsec    int64   `json:"date-nsec"`
	VMClockSec  int64   `json:"vm-clock-sec"`
	ID          string  `json:"id"`
	VMStateSize int64   `json:"vm-state-size"`
}

// Qcow2Info is specific to qcow2. A nil pointer is not told: version 2 has less to tell.
type Qcow2Info struct {
	Compat          string       `json:"compat"`
	CompressionType string       `json:"compression-type"`
	LazyRefcounts   *bool        `json:"lazy-refcounts,omitempty"`
	Bitmaps         []BitmapInfo `json:"bitmaps,omitempty"`
	RefcountBits    int          `json:"refcount-bits"`
	DataFile        *string      `json:"data-file,omitempty"`
	DataFileRaw     *bool        `json:"data-file-raw,omitempty"`
	Corrupt         *bool        `json:"corrupt,omitempty"`
	ExtendedL2      *bool        `json:"extended-l2,omitempty"`
}

// BitmapInfo is a persistent bitmap.
type BitmapInfo struct {
	Flags       []string `json:"flags"`
	Name        string   `json:"name"`
	Granularity int64    `json:"granularity"`
}

// Backing is the backing file that the image names: how to open it. It is false when there is none.
func (i *Info) Backing(store StoreOptions) (Source, bool) {
	if i.BackingFilename == "" {
		return Source{}, false
	}
	return Source{Name: i.FullBacking, Format: i.BackingFormat, Store: store}, true
}

// InfoOf tells what an image is.
func InfoOf(src Source) (info *Info, err error) {
	i, err := OpenImage(src)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, i.Close()) }()
	info, err = i.Info()
	if err != nil {
		return nil, Wordedf("Could not open '%s': %s", src.Name, err.Error())
	}
	return info, nil
}

// maxChain is how many images a chain may have.
const maxChain = 200

// InfoChain tells what an image is and each one behind it, as deep as it goes.
func InfoChain(src Source) ([]*Info, error) {
	var all []*Info
	seen := make(map[string]bool)
	for {
		if seen[src.Name] || len(all) == maxChain {
			return nil, Wordedf("Backing file '%s' creates an infinite loop.", src.Name)
		}
		seen[src.Name] = true
		info, err := InfoOf(src)
		if err != nil {
			return nil, err
		}
		all = append(all, info)
		next, ok := info.Backing(src.Store)
		if !ok {
			return all, nil
		}
		src = next
	}
}

// Info tells what the image is.
func (i *Image) Info() (*Info, error) {
	info := &Info{Filename: i.Name, Format: i.Format}
	var err error
	if info.ActualSize, err = i.Allocated(); err != nil {
		return nil, err
	}
	switch i.Format {
	case FormatRaw:
		info.VirtualSize, err = i.rawSize()
	case FormatQcow2:
		err = i.qcow2Info(info)
	default:
		err = i.foreignInfo(info)
	}
	if err != nil {
		return nil, err
	}
	return info, nil
}

func (i *Image) qcow2Info(info *Info) error {
	h, err := i.readable()
	if err != nil {
		return err
	}
	info.VirtualSize, info.ClusterSize = h.Size, 1<<h.ClusterBits
	info.Dirty, info.Encrypted = h.IsDirty(), h.CryptMethod != qcow2.CryptNone
	if h.BackingFile != "" {
		info.BackingFilename, info.BackingFormat = h.BackingFile, h.BackingFormat()
		info.FullBacking = Beside(i.Name, h.BackingFile)
	}
	snapshots, _, err := qcow2.ReadSnapshots(i.Read, h)
	if err != nil {
		return err
	}
	for _, s := range snapshots {
		info.Snapshots = append(info.Snapshots, snapshotInfo(&s))
	}
	bitmaps, err := qcow2.ReadBitmaps(i.Read, h)
	if err != nil {
		return err
	}
	info.Specific = &FormatSpecific{Type: FormatQcow2, Data: qcow2Specific(h, bitmaps)}
	return nil
}

// readable is header, but an image whose encryption is not supported can be told about.
func (i *Image) readable() (*qcow2.Header, error) {
	h, err := qcow2.ReadHeaderUnchecked(i.Read)
	if err != nil {
		return nil, qcow2Error(err)
	}
	plain := *h
	if plain.CryptMethod == qcow2.CryptLUKS || plain.CryptMethod == qcow2.CryptAES {
		plain.CryptMethod = qcow2.CryptNone
	}
	if err := plain.Supported(); err != nil {
		return nil, qcow2Error(err)
	}
	return h, h.Validate()
}

func snapshotInfo(s *qcow2.Snapshot) SnapshotInfo {
	const second = 1e9
	i := SnapshotInfo{
		ID: s.ID, Name: s.Name, VMStateSize: int64(s.VMState), DateSec: int64(s.Seconds), DateNsec: int64(s.Nanoseconds),
		VMClockSec: int64(s.VMClock / second), VMClockNsec: int64(s.VMClock % second),
	}
	if s.ICount != qcow2.NoICount {
		i.ICount = &s.ICount
	}
	return i
}

func qcow2Specific(h *qcow2.Header, bitmaps []qcow2.Bitmap) *Qcow2Info {
	q := &Qcow2Info{Compat: "0.10", CompressionType: "zlib", RefcountBits: 1 << h.RefcountOrder}
	if h.Version < 3 {
		return q
	}
	q.Compat = "1.1"
	if h.CompressionType == qcow2.CompressionZstd {
		q.CompressionType = "zstd"
	}
	q.LazyRefcounts, q.Corrupt, q.ExtendedL2 = told(h.IsLazy()), told(h.IsCorrupt()), told(h.IsExtendedL2())
	for _, b := range bitmaps {
		q.Bitmaps = append(q.Bitmaps, BitmapInfo{Name: b.Name, Granularity: b.Granularity(), Flags: bitmapFlags(&b)})
	}
	if h.HasDataFile() {
		q.DataFileRaw = told(h.IsDataFileRaw())
		if name := h.DataFile(); name != "" {
			q.DataFile = &name
		}
	}
	return q
}

func told(v bool) *bool { return &v }

func bitmapFlags(b *qcow2.Bitmap) []string {
	flags := []string{}
	if b.Flags&qcow2.BitmapInUse != 0 {
		flags = append(flags, "in-use")
	}
	if b.Flags&qcow2.BitmapAuto != 0 {
		flags = append(flags, "auto")
	}
	return flags
}
