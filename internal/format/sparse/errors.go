// SPDX-License-Identifier: Apache-2.0

package sparse

import (
	"fmt"
	"io"
	"syscall"
)

// CorruptError tells that an image contradicts its format or itself. It carries EIO.
type CorruptError struct{ text string }

// Error implements error.
func (e *CorruptError) Error() string { return e.text }

// Unwrap gives the errno.
func (e *CorruptError) Unwrap() error { return syscall.EIO }

// UnsupportedError tells that an image uses something that is not read here. It carries ENOTSUP.
type UnsupportedError struct{ text string }

// Error implements error.
func (e *UnsupportedError) Error() string { return e.text }

// Unwrap gives the errno.
func (e *UnsupportedError) Unwrap() error { return syscall.ENOTSUP }

// Corruptf makes a CorruptError.
func Corruptf(format string, args ...any) error {
	return &CorruptError{fmt.Sprintf(format, args...)}
}

// Unsupportedf makes an UnsupportedError.
func Unsupportedf(format string, args ...any) error {
	return &UnsupportedError{fmt.Sprintf(format, args...)}
}

// ReadFull fills p from offset of a file of size bytes. A range that reaches beyond the end is a corrupt image; what names
// it in the message.
func ReadFull(r io.ReaderAt, size int64, p []byte, offset int64, what string) error {
	if offset < 0 || int64(len(p)) > size || offset > size-int64(len(p)) {
		return Corruptf("%s: %d bytes at %d are not inside the file of %d bytes", what, len(p), offset, size)
	}
	n, err := r.ReadAt(p, offset)
	if n == len(p) {
		return nil
	}
	if err == nil || err == io.EOF {
		return Corruptf("%s: the file ends at %d", what, offset+int64(n))
	}
	return fmt.Errorf("read %s at %d: %w", what, offset, err)
}
