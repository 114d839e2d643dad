// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"
	"fmt"
	"strings"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

// Source says which image is meant, and how it is to be opened.
type Source struct {
	Name      string // as a person gave it; messages say it
	Format    string // "" to look at the image
	ImageOpts bool   // Name is a list of properties
	Store     StoreOptions
	// Warn is told what a person should know, in whole lines; nil tells nobody.
	Warn func(text string)
}

func (src *Source) warn(text string) {
	if src.Warn != nil {
		src.Warn(text)
	}
}

// Image is the file of an image, open for the verbs that work on metadata.
type Image struct {
	*Store
	Name   string // as given, without the wrapping of json: or file:
	Format string
	Probed bool // nobody named the format
	// DataFile is in place of the external data file that the image names.
	DataFile string
	NoLock   bool // it is not locked
}

// OpenImage opens the file of an image and finds out its format. It does not look into the image further, and opens no
// other file. The error says "Could not open".
func OpenImage(src Source) (*Image, error) {
	i, err := openImage(src)
	if err != nil {
		return nil, Wordedf("Could not open '%s': %s", src.Name, OpenText(src.Name, err))
	}
	return i, nil
}

func openImage(src Source) (*Image, error) {
	at, err := src.locate()
	if err != nil {
		return nil, err
	}
	if src.Store.Shared && !src.Store.ReadOnly {
		return nil, Wordedf("force-share=on can only be used with read-only images")
	}
	switch {
	case at.Format != "" && !KnownFormat(at.Format) && NamedFormat(at.Format):
		return nil, Wordedf("Format '%s' is not supported", at.Format)
	case at.Format != "" && !KnownFormat(at.Format):
		return nil, Wordedf("Unknown driver '%s'", at.Format)
	}
	o := src.Store
	o.NoLock = o.NoLock || at.NoLock
	s, err := OpenStore(at.Path, o)
	if err != nil {
		return nil, err
	}
	i := &Image{Store: s, Name: at.Path, Format: at.Format, DataFile: at.DataFile, NoLock: o.NoLock}
	if i.Format == "" {
		i.Probed = true
		if i.Format, err = Probe(s); err != nil {
			return nil, errors.Join(err, s.Close())
		}
	}
	return i, nil
}

// locate finds path and format from the name and what was said beside it.
func (src *Source) locate() (at Location, err error) {
	if src.ImageOpts {
		at, err = ParseImageOpts(src.Name)
	} else {
		at, err = ParseName(src.Name)
	}
	if err == nil && src.Format != "" {
		if at.Format != "" && at.Format != src.Format && !src.ImageOpts {
			return at, Wordedf("Driver specified twice")
		}
		at.Format = src.Format
	}
	return at, err
}

// ProbedRaw tells that the image was taken for raw because nothing else was recognised: a guest could have written, or
// could write, what it is recognised by.
func (i *Image) ProbedRaw() bool { return i.Probed && i.Format == FormatRaw }

// RawWarning is what a person should know of an image that is ProbedRaw and is going to be changed.
func RawWarning(name string) string {
	return fmt.Sprintf(`WARNING: Image format was not specified for '%s' and probing guessed raw.
         Automatically detecting the format is dangerous for raw images, write operations on block 0 will be restricted.
         Specify the 'raw' format explicitly to remove the restrictions.
`, name)
}

// header reads and checks the header of a qcow2 image.
func (i *Image) header() (*qcow2.Header, error) {
	h, err := qcow2.ReadHeader(i.Read)
	if err != nil {
		return nil, qcow2Error(err)
	}
	return h, nil
}

// qcow2Error words what is wrong with a header as qemu-img does, where scripts look for it.
func qcow2Error(err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(err, qcow2.ErrNotQcow2) {
		return Wordedf("Image is not in qcow2 format")
	}
	var unsupported *qcow2.UnsupportedError
	if errors.As(err, &unsupported) && unsupported.Unknown != 0 {
		return Wordedf("Unsupported qcow2 feature(s): %s", featureText(unsupported))
	}
	return err
}

// featureText lists unknown features by the names that the image gives them; those without one as a mask.
func featureText(u *qcow2.UnsupportedError) string {
	parts := u.Names
	if u.Unnamed != 0 {
		parts = append(parts, fmt.Sprintf("Unknown incompatible feature: %x", u.Unnamed))
	}
	return strings.Join(parts, ", ")
}

// rawSize is the size of the disk of an image of a format that has no size of its own: whole sectors.
func (i *Image) rawSize() (int64, error) {
	n, err := i.Size()
	return (n + 511) &^ 511, err
}
