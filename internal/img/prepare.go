// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"
	"strconv"
)

// CreateRequest is what a person asks of create.
type CreateRequest struct {
	Path, Format  string
	Size          string   // plain bytes; "" when not given
	Options       []string // lists of -o
	Backing       string
	HasBacking    bool
	BackingFormat string
	Unsafe        bool // the backing file need not exist, and is not opened
}

// PrepareCreate checks a request and completes its options: with -b and -F, and with the size of the backing file.
// Nothing is made yet.
func PrepareCreate(r *CreateRequest) (*Options, error) {
	table := CreateOptions(r.Format, true)
	switch {
	case !NamedFormat(r.Format):
		return nil, Wordedf("Unknown file format '%s'", r.Format)
	case table == nil:
		return nil, Wordedf("Format driver '%s' does not support image creation", r.Format)
	}
	o := NewOptions(table)
	for _, list := range r.Options {
		if err := o.Parse(list); err != nil {
			return nil, err
		}
	}
	if err := r.merge(o); err != nil {
		return nil, err
	}
	if err := r.backing(o); err != nil {
		return nil, err
	}
	if !o.Has("size") {
		return nil, Wordedf("Image creation needs a size parameter")
	}
	return o, nil
}

// merge adds what flags and arguments say to the options.
func (r *CreateRequest) merge(o *Options) error {
	if r.Size != "" {
		if o.Has("size") {
			return Wordedf("The image size must be specified only once")
		}
		if err := o.Set("size", r.Size); err != nil {
			return err
		}
	}
	if r.HasBacking && o.Set("backing_file", r.Backing) != nil {
		return Wordedf("Backing file not supported for file format '%s'", r.Format)
	}
	if r.BackingFormat != "" && o.Set("backing_fmt", r.BackingFormat) != nil {
		return Wordedf("Backing file format not supported for file format '%s'", r.Format)
	}
	return nil
}

// backing looks at the backing file.
func (r *CreateRequest) backing(o *Options) error {
	if !o.Has("backing_file") {
		return nil
	}
	name, format := o.Text("backing_file"), o.Text("backing_fmt")
	switch {
	case name == "":
		return Wordedf("Expected backing file name, got empty string")
	case name == r.Path:
		return Wordedf("Error: Trying to create an image with the same filename as the backing file")
	case r.Unsafe && format == "":
		return Wordedf("Backing file specified without backing format")
	case r.Unsafe:
		return nil
	}
	return r.openBacking(o, name, format)
}

// openBacking looks whether the backing file is what it is said to be, and takes its size where none is given.
func (r *CreateRequest) openBacking(o *Options, name, format string) (err error) {
	at, err := ParseName(r.Path)
	if err != nil {
		return err
	}
	full := Beside(at.Path, name)
	// Only its size is asked for, which may be done while it is in use.
	i, err := openImage(Source{Name: full, Format: format, Store: StoreOptions{ReadOnly: true, Shared: true}})
	if err != nil {
		return Wordedf("%s\nCould not open backing image.", OpenText(full, err))
	}
	defer func() { err = errors.Join(err, i.Close()) }()
	if format == "" {
		return Wordedf("Backing file specified without backing format\nDetected format of %s.", i.Format)
	}
	info, err := i.Info()
	if err != nil {
		return Wordedf("%s\nCould not open backing image.", err.Error())
	}
	if o.Has("size") {
		return nil
	}
	return o.Set("size", strconv.FormatInt(info.VirtualSize, 10))
}
