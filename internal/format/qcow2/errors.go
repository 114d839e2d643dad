// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"fmt"
	"math/bits"
	"strings"
	"syscall"
)

// CorruptError says that an image breaks the rules of the format, and where. It carries EIO.
type CorruptError struct {
	Offset int64  // of the structure in the file
	What   string // lower case, what is wrong
}

// Error is the text.
func (e *CorruptError) Error() string {
	return fmt.Sprintf("%s (at %#x of the image)", e.What, e.Offset)
}

// Unwrap gives the errno.
func (e *CorruptError) Unwrap() error { return syscall.EIO }

func corruptf(off int64, format string, args ...any) error {
	return &CorruptError{Offset: off, What: fmt.Sprintf(format, args...)}
}

// InvalidError says that a file cannot be opened as what its header says: no qcow2 at all, or a header whose fields
// contradict each other or the limits of this package. It carries EINVAL.
type InvalidError struct{ What string }

// Error is the text.
func (e *InvalidError) Error() string { return e.What }

// Unwrap gives the errno.
func (e *InvalidError) Unwrap() error { return syscall.EINVAL }

func invalidf(format string, args ...any) error {
	return &InvalidError{What: fmt.Sprintf(format, args...)}
}

// ErrNotQcow2 is the refusal of a file whose first bytes are not those of a qcow2 image.
var ErrNotQcow2 error = &InvalidError{What: "file is not a qcow2 image"}

// UnsupportedError says that an image is sound as far as can be told, and uses what this package does not know. It
// carries EOPNOTSUPP.
type UnsupportedError struct {
	What string
	// Unknown are the incompatible feature bits that are not known, when these are the reason.
	Unknown uint64
	// Names are the names that the image itself gives to some of these bits, in the order of the bits.
	Names []string
	// Unnamed are the others.
	Unnamed uint64
}

// Error is the text.
func (e *UnsupportedError) Error() string { return e.What }

// Unwrap gives the errno.
func (e *UnsupportedError) Unwrap() error { return syscall.EOPNOTSUPP }

func unsupportedf(format string, args ...any) error {
	return &UnsupportedError{What: fmt.Sprintf(format, args...)}
}

// unknownFeatures names each bit of mask, by the image's own table where it has an entry for it.
func unknownFeatures(mask uint64, table []FeatureName) error {
	var words, names []string
	unnamed := mask
	for m := mask; m != 0; m &= m - 1 {
		bit := uint8(bits.TrailingZeros64(m))
		word := fmt.Sprintf("bit %d", bit)
		for _, n := range table {
			if n.Type == FeatureIncompatible && n.Bit == bit && n.Name != "" {
				word = fmt.Sprintf("%q (bit %d)", n.Name, bit)
				names = append(names, n.Name)
				unnamed &^= 1 << bit
				break
			}
		}
		words = append(words, word)
	}
	return &UnsupportedError{
		What:    "image needs features that are not known here: " + strings.Join(words, ", "),
		Unknown: mask, Names: names, Unnamed: unnamed,
	}
}

// limitError is an *InvalidError's sibling for what is sound but too large. It carries EFBIG.
type limitError struct{ what string }

func (e *limitError) Error() string { return e.what }
func (e *limitError) Unwrap() error { return syscall.EFBIG }
