// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"
	"math/bits"
	"slices"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// amendable are the options of create that amend takes too.
var amendable = []string{"backing_file", "backing_fmt", "compat", "data_file", "data_file_raw", "lazy_refcounts", "refcount_bits", "size"}

// AmendOptions are the options that amend takes for images of a format; nil for a format that cannot be amended.
func AmendOptions(format string) []OptionInfo {
	if format != FormatQcow2 {
		return nil
	}
	table := []OptionInfo{
		{Name: "encrypt.state", Help: "Select new state of affected keyslots (active/inactive)"},
		{Name: "encrypt.keyslot", Kind: OptionNumber, Help: "Select a single keyslot to modify explicitly"},
		{Name: "encrypt.old-secret", Help: "Select all keyslots that match this password"},
		{Name: "encrypt.new-secret", Help: "New secret to set in the matching keyslots. Empty string to erase"},
		{Name: "encrypt.iter-time", Kind: OptionNumber, Help: "Time to spend in PBKDF in milliseconds"},
	}
	for _, o := range qcow2Options {
		if slices.Contains(amendable, o.Name) {
			o.Default = "" // nothing is changed that is not asked for
			table = append(table, o)
		}
	}
	return table
}

// AmendRequest is what a person asks of amend.
type AmendRequest struct {
	Source
	Options  []string // lists of -o
	Progress func(part float64)
}

// Amend changes options of an image that exists.
func Amend(r *AmendRequest) error {
	i, err := OpenImage(r.Source)
	if err != nil {
		return err
	}
	if i.ProbedRaw() {
		r.warn(RawWarning(r.Name))
	}
	if err := r.amend(i); err != nil {
		return errors.Join(err, i.Close())
	}
	return i.Close()
}

func (r *AmendRequest) amend(i *Image) error {
	table := AmendOptions(i.Format)
	if table == nil {
		return Wordedf("Format driver '%s' does not support option amendment", i.Format)
	}
	o := NewOptions(table)
	for _, list := range r.Options {
		if err := parseAmend(o, list); err != nil {
			return err
		}
	}
	return (&amendment{r: r, image: i, o: o}).run()
}

// parseAmend is Parse that tells which options are there only for new images.
func parseAmend(o *Options, list string) error {
	err := o.Parse(list)
	if err == nil {
		return nil
	}
	for _, i := range CreateOptions(FormatQcow2, false) {
		if o.info(i.Name) == nil && err.Error() == Wordedf("Invalid parameter '%s'", i.Name).Error() {
			return Wordedf("%s\nThis option is only supported for image creation", err.Error())
		}
	}
	return err
}

// amendment is one change of a qcow2 image. Each step leaves an image that is whole.
type amendment struct {
	r     *AmendRequest
	image *Image
	o     *Options
}

func (a *amendment) run() error {
	h, err := a.image.header()
	if err != nil {
		return Wordedf("Could not open '%s': %s", a.r.Name, err.Error())
	}
	if h.HasDataFile() && h.DataFile() == "" && a.image.DataFile == "" {
		return Wordedf("Could not open '%s': 'data-file' is required for this image", a.r.Name)
	}
	version, err := a.check(h)
	if err != nil {
		return err
	}
	steps := []func() error{a.refcountWidth, a.header, a.size}
	if version > h.Version {
		steps = append([]func() error{a.upgrade}, steps...)
	}
	if version < h.Version {
		steps = append(steps, a.downgrade)
	}
	for n, step := range steps {
		a.r.Progress(float64(n) / float64(len(steps)))
		if err := step(); err != nil {
			return err
		}
	}
	a.r.Progress(1)
	return nil
}

// check refuses before anything is changed, and tells which version the image is to have.
func (a *amendment) check(h *qcow2.Header) (version uint32, err error) {
	version = h.Version
	if a.o.Has("compat") {
		v, ok := compats[a.o.Text("compat")]
		if !ok || a.o.Text("compat") == "" {
			return 0, Wordedf("Unknown compatibility level %s", a.o.Text("compat"))
		}
		version = v
	}
	width := uint64(1) << h.RefcountOrder
	if a.o.Has("refcount_bits") {
		width = a.o.Number("refcount_bits")
	}
	switch {
	case a.o.Has("encrypt.state") || a.o.Has("encrypt.keyslot") || a.o.Has("encrypt.old-secret") || a.o.Has("encrypt.new-secret") || a.o.Has("encrypt.iter-time"):
		return 0, Wordedf("Can't amend encryption options - encryption not present")
	case width == 0 || width > 64 || width&(width-1) != 0:
		return 0, Wordedf("Refcount width must be a power of two and may not exceed 64 bits")
	case a.o.Has("data_file") && !h.HasDataFile():
		return 0, Wordedf("data-file can only be set for images that use an external data file")
	case a.o.On("data_file_raw") && !h.IsDataFileRaw():
		return 0, Wordedf("data-file-raw cannot be set on existing images")
	case a.backing(h):
		return 0, Wordedf("Cannot amend the backing file\nYou can use 'qemu-img rebase' instead.")
	case version < 3 && width != 16 && width != 1<<h.RefcountOrder:
		return 0, Wordedf("Refcount widths other than 16 bits require compatibility level 1.1 or above (use compat=1.1 or greater)")
	case version < 3 && width != 16:
		return 0, Wordedf("compat=0.10 requires refcount_bits=16")
	case version < 3 && a.o.On("lazy_refcounts") && !h.IsLazy():
		return 0, Wordedf("Lazy refcounts only supported with compatibility level 1.1 and above (use compat=1.1 or greater)")
	}
	switch size := a.o.Number("size"); {
	case size%512 != 0:
		return 0, Wordedf("The new size must be a multiple of 512")
	case size > maxDisk:
		return 0, Wordedf("Image size too large: %d", size)
	}
	return version, nil
}

// backing tells that another backing file is asked for than the image has. What is not given is none, as it is for
// qemu-img.
func (a *amendment) backing(h *qcow2.Header) bool {
	other := func(option, have string) bool {
		return a.o.Has(option) != (have != "") || a.o.Text(option) != have
	}
	if !a.o.Has("backing_file") && !a.o.Has("backing_fmt") {
		return false
	}
	return other("backing_file", h.BackingFile) || other("backing_fmt", h.BackingFormat())
}

// change rewrites the first cluster with what edit makes of the header.
func (a *amendment) change(edit func(h *qcow2.Header)) error {
	h, err := a.image.header()
	if err != nil {
		return err
	}
	h.ClearUnknownAutoclear()
	edit(h)
	b, err := h.Encode()
	if err != nil {
		return err
	}
	return errors.Join(a.image.Write(b, 0), a.image.Flush())
}

// tables opens the tables for work that needs more than the header; what it did is on disk when it returns.
func (a *amendment) tables(work func(t *tables) error) error {
	t, err := a.image.tables(a.r.Source, metadata.Options{})
	if err != nil {
		return err
	}
	return errors.Join(work(t), t.closeTables(), t.closeData())
}

func (a *amendment) upgrade() error {
	err := a.change(func(h *qcow2.Header) {
		h.Version = 3
		h.Additional = make([]byte, 8) // compression type, and padding
		if h.ClusterBits >= 13 {
			h.SetFeatureNames(qcow2.KnownFeatures())
		}
	})
	if err != nil {
		return err
	}
	return a.completeSnapshots()
}

// completeSnapshots gives the entries of the snapshot table the length that version 3 demands. A check does so.
func (a *amendment) completeSnapshots() error {
	h, err := a.image.header()
	if err != nil {
		return err
	}
	all, _, err := qcow2.ReadSnapshots(a.image.Read, h)
	if err != nil || !slices.ContainsFunc(all, func(s qcow2.Snapshot) bool { return s.ExtraSize < 16 }) {
		return err
	}
	_, err = check.RebuildRefcounts(a.image.Store)
	return err
}

// refcountWidth makes new refcounts of another width.
func (a *amendment) refcountWidth() error {
	h, err := a.image.header()
	if err != nil || !a.o.Has("refcount_bits") || a.o.Number("refcount_bits") == 1<<h.RefcountOrder {
		return err
	}
	order := uint32(bits.TrailingZeros64(a.o.Number("refcount_bits")))
	err = check.ChangeWidth(a.image.Store, order)
	var narrow *check.WidthError
	if errors.As(err, &narrow) {
		return Wordedf("Cannot decrease refcount entry width to %d bits: Cluster at offset %#x has a refcount of %d", 1<<order, narrow.Offset, narrow.Count)
	}
	return err
}

// header changes what stands in the header alone.
func (a *amendment) header() error {
	if !a.o.Has("lazy_refcounts") && !a.o.Has("data_file") && !a.o.Has("data_file_raw") {
		return nil
	}
	if a.o.Has("lazy_refcounts") && !a.o.On("lazy_refcounts") {
		// Nothing may stay late: the tables are brought up to date before the bit goes.
		if err := a.tables(func(t *tables) error { return t.Commit() }); err != nil {
			return err
		}
	}
	return a.change(func(h *qcow2.Header) {
		if a.o.Has("lazy_refcounts") && h.Version >= 3 {
			h.Compatible &^= qcow2.LazyRefcounts
			if a.o.On("lazy_refcounts") {
				h.Compatible |= qcow2.LazyRefcounts
			}
		}
		if a.o.Has("data_file") {
			h.SetDataFile(a.o.Text("data_file"))
		}
		if a.o.Has("data_file_raw") && !a.o.On("data_file_raw") {
			h.Autoclear &^= qcow2.RawExternal
		}
	})
}

// size makes the disk smaller or larger: amend has always been allowed to do both.
func (a *amendment) size() error {
	if !a.o.Has("size") {
		return nil
	}
	if err := a.image.named(); err != nil {
		return Wordedf("Could not open '%s': %s", a.r.Name, err.Error())
	}
	return a.tables(func(t *tables) error {
		r := &qcow2Resizer{t}
		now, to := t.Image.Size(), int64(a.o.Number("size"))
		switch {
		case to < now:
			return r.shrink(to)
		case to > now:
			return r.grow(now, to, "")
		}
		return nil
	})
}
