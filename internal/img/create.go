// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"
	"slices"
)

// fileOptions are what the file below any image takes.
var fileOptions = []OptionInfo{
	{Name: "nocow", Kind: OptionBool, Help: "Turn off copy-on-write (valid only on btrfs)"},
	{Name: "preallocation", Kind: OptionString, Help: "Preallocation mode (allowed values: off, falloc, full)"},
	{Name: "extent_size_hint", Kind: OptionSize, Help: "Extent size hint for the image file, 0 to disable"},
}

var rawOptions = []OptionInfo{
	{Name: "size", Kind: OptionSize, Help: "Virtual disk size"},
}

// qcow2Options stand in the order in which create tells them.
var qcow2Options = []OptionInfo{
	{Name: "encryption", Kind: OptionBool, Help: "Encrypt the image with format 'aes'. (Deprecated in favor of encrypt.format=aes)"},
	{Name: "encrypt.format", Kind: OptionString, Help: "Encrypt the image, format choices: 'aes', 'luks'"},
	{Name: "encrypt.key-secret", Kind: OptionString, Help: "ID of secret providing qcow AES key or LUKS passphrase"},
	{Name: "encrypt.cipher-alg", Kind: OptionString, Help: "Name of encryption cipher algorithm"},
	{Name: "encrypt.cipher-mode", Kind: OptionString, Help: "Name of encryption cipher mode"},
	{Name: "encrypt.ivgen-alg", Kind: OptionString, Help: "Name of IV generator algorithm"},
	{Name: "encrypt.ivgen-hash-alg", Kind: OptionString, Help: "Name of IV generator hash algorithm"},
	{Name: "encrypt.hash-alg", Kind: OptionString, Help: "Name of encryption hash algorithm"},
	{Name: "encrypt.iter-time", Kind: OptionNumber, Help: "Time to spend in PBKDF in milliseconds"},
	{Name: "cluster_size", Kind: OptionSize, Help: "qcow2 cluster size", Default: "65536"},
	{Name: "extended_l2", Kind: OptionBool, Help: "Extended L2 tables", Default: "off"},
	{Name: "preallocation", Kind: OptionString, Help: "Preallocation mode (allowed values: off, metadata, falloc, full)"},
	{Name: "compression_type", Kind: OptionString, Help: "Compression method used for image cluster compression", Default: "zlib"},
	{Name: "size", Kind: OptionSize, Help: "Virtual disk size"},
	{Name: "compat", Kind: OptionString, Help: "Compatibility level (v2 [0.10] or v3 [1.1])"},
	{Name: "backing_file", Kind: OptionString, Help: "File name of a base image"},
	{Name: "backing_fmt", Kind: OptionString, Help: "Image format of the base image"},
	{Name: "data_file", Kind: OptionString, Help: "File name of an external data file"},
	{Name: "data_file_raw", Kind: OptionBool, Help: "The external data file must stay valid as a raw image"},
	{Name: "lazy_refcounts", Kind: OptionBool, Help: "Postpone refcount updates", Default: "off"},
	{Name: "refcount_bits", Kind: OptionNumber, Help: "Width of a reference count entry in bits", Default: "16"},
}

// CreateOptions are the options that a new image of a format takes; withFile adds those of the file below it. It is nil
// for a format that cannot be made.
func CreateOptions(format string, withFile bool) []OptionInfo {
	var table []OptionInfo
	switch format {
	case FormatRaw:
		table = rawOptions
	case FormatQcow2:
		table = qcow2Options
	default:
		return nil
	}
	if !withFile {
		return table
	}
	table = slices.Clone(table)
	for _, o := range fileOptions {
		if !slices.ContainsFunc(table, func(have OptionInfo) bool { return have.Name == o.Name }) {
			table = append(table, o)
		}
	}
	return table
}

// Create makes an image of a format, under a name that may begin with file:, with options of its table, of which size has
// been set. It opens no backing file. A file that was not there before is removed again when it fails.
func Create(name, format string, o *Options) error {
	at, err := ParseName(name)
	if err != nil {
		return err
	}
	path := at.Path
	switch format {
	case FormatRaw:
		return createRaw(path, o)
	case FormatQcow2:
		return createQcow2(path, o)
	}
	return Wordedf("Format driver '%s' does not support image creation", format)
}

// inNewFile makes the file of an image, locks it and lets fill write it.
func inNewFile(path string, fill func(s *Store) error) error {
	s, err := CreateStore(path, StoreOptions{})
	if err != nil {
		return Wordedf("%s", createText(path, err))
	}
	if err := fill(s); err != nil {
		return errors.Join(err, s.Undo())
	}
	return s.Close()
}

func createRaw(path string, o *Options) (err error) {
	size := o.Number("size")
	if size > maxDisk {
		return Wordedf("Image size too large: %d", size)
	}
	length := int64(size+511) &^ 511
	mode := o.Text("preallocation")
	switch mode {
	case "", "off", "falloc", "full":
	case "metadata":
		return Wordedf("Unsupported preallocation mode: %s", mode)
	default:
		return Wordedf("Parameter 'preallocation' does not accept value '%s'", mode)
	}
	return inNewFile(path, func(s *Store) error {
		if s.Device() {
			return rawOnDevice(s, length)
		}
		if err := s.Truncate(length); err != nil {
			return Wordedf("Could not resize file: %s", err)
		}
		return Preallocate(s, 0, length, mode)
	})
}

// rawOnDevice makes a device a raw image: what it began with must not be taken for an image of another format.
func rawOnDevice(s *Store, length int64) error {
	if size, err := s.Size(); err != nil || length > size {
		return errors.Join(err, Wordedf("Cannot grow device files"))
	}
	return errors.Join(s.Zero(0, 512), s.Flush())
}

// Preallocate takes the space of [off, off+n) of the file: not at all, by the file system ("falloc"), or by writing zeros
// ("full").
func Preallocate(s *Store, off, n int64, mode string) error {
	switch {
	case n == 0:
	case mode == "falloc":
		if err := s.Allocate(off, n); err != nil {
			return Wordedf("Could not preallocate data: %s", err)
		}
	case mode == "full":
		if err := s.writeZeros(off, n); err != nil {
			return Wordedf("Could not write zeros for preallocation: %s", err)
		}
	}
	return nil
}
