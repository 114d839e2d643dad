// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// tables are the tables of an open qcow2 image, with the stores that they stand on.
type tables struct {
	*metadata.Image
	image *Image
	src   Source
	data  *Store // the external data file, nil when there is none
}

// tables opens the tables of an image, which they own from then on. The error says "Could not open".
func (i *Image) tables(src Source, o metadata.Options) (*tables, error) {
	t := &tables{image: i, src: src}
	if err := t.open(o); err != nil {
		return nil, Wordedf("Could not open '%s': %s", src.Name, err.Error())
	}
	return t, nil
}

// open opens data file and tables.
func (t *tables) open(o metadata.Options) error {
	h, err := t.image.header()
	if err != nil {
		return err
	}
	if h.IsCorrupt() && !t.src.Store.ReadOnly && !o.KeepCorrupt {
		return Wordedf("qcow2: Image is corrupt; cannot be opened read/write")
	}
	if h.HasDataFile() {
		if t.data, err = t.image.openData(h, t.src.Store); err != nil {
			return err
		}
	}
	if h.IsDirty() && !t.src.Store.ReadOnly {
		err = t.repair()
	}
	if err == nil {
		err = t.reopenWith(o)
	}
	if err != nil {
		return errors.Join(err, t.closeData())
	}
	return nil
}

// repair counts the refcounts of an image anew that was not closed, before it is changed.
func (t *tables) repair() error {
	o := &check.Options{Repair: check.Everything, Report: func(f check.Finding) { t.src.warn(f.Text + "\n") }}
	found, err := check.Run(t.image.Store, o)
	if err == nil && (found.Corruptions != 0 || found.CheckErrors != 0) {
		err = Wordedf("qcow2: Image was not closed, and has errors that cannot be repaired")
	}
	return err
}

// reopen opens the tables again, after they have been closed and somebody else has used the files.
func (t *tables) reopen() error { return t.reopenWith(metadata.Options{}) }

func (t *tables) reopenWith(o metadata.Options) (err error) {
	o.ReadOnly = t.src.Store.ReadOnly
	if t.data != nil {
		o.Data = t.data
	}
	t.Image, err = metadata.Open(t.image.Store, &o)
	return err
}

// closeTables commits what was changed. The files stay open, and reopen opens the tables again.
func (t *tables) closeTables() error {
	m := t.Image
	if m == nil {
		return nil
	}
	t.Image = nil
	return m.Close()
}

func (t *tables) closeData() error {
	if t.data == nil {
		return nil
	}
	return t.data.Close()
}

// openData opens the external data file of an image.
func (i *Image) openData(h *qcow2.Header, o StoreOptions) (*Store, error) {
	name := i.DataFile
	switch {
	case name != "":
	case h.DataFile() == "":
		return nil, Wordedf("'data-file' is required for this image")
	default:
		name = Beside(i.Name, h.DataFile())
	}
	at, err := ParseName(name)
	if err != nil {
		return nil, err
	}
	s, err := OpenStore(at.Path, o)
	if err != nil {
		return nil, Wordedf("%s", OpenText(name, err))
	}
	return s, nil
}

// Close commits what was changed and closes the files.
func (t *tables) Close() error {
	return errors.Join(t.closeTables(), t.closeData(), t.image.Close())
}

// dataStore is where guest data lie.
func (t *tables) dataStore() *Store {
	if t.data != nil {
		return t.data
	}
	return t.image.Store
}

// allocate gives host clusters to a range that reads as zeros, whole clusters or up to the end of the disk; fill makes
// a range of the file read as zeros.
func (t *tables) allocate(off, n int64, fill func(off, n int64) error) error {
	var a metadata.Allocation
	ticket := t.Enter()
	defer t.Exit(ticket)
	for end := off + n; off < end; off += a.Length {
		if err := t.BeginWrite(&a, off, end-off); err != nil {
			return err
		}
		if err := fill(a.Host-a.Head, a.Head+a.Length+a.Tail); err != nil {
			t.Abort(&a)
			return err
		}
		t.Link(&a)
	}
	return nil
}
