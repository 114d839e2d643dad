// SPDX-License-Identifier: Apache-2.0

package block

import (
	"errors"
	"fmt"
	"syscall"
)

// Error is a cause that everybody above can test for with errors.Is, and that carries the errno which stands for it.
type Error struct {
	text  string
	errno syscall.Errno
}

// Error is the text.
func (e *Error) Error() string { return e.text }

// Unwrap gives the errno, so that errors.As finds a syscall.Errno.
func (e *Error) Unwrap() error { return e.errno }

// The causes. They are returned as they are on the data plane, and wrapped with more words elsewhere.
var (
	// ErrNotSupported carries EOPNOTSUPP.
	ErrNotSupported = &Error{"operation is not supported", syscall.EOPNOTSUPP}
	// ErrReadOnly carries EROFS.
	ErrReadOnly = &Error{"disk is read-only", syscall.EROFS}
	// ErrRange carries EIO: a guest that reads past the end gets an I/O error.
	ErrRange = &Error{"request reaches beyond the end of the disk", syscall.EIO}
	// ErrCorrupt carries EIO. See Corruptf.
	ErrCorrupt = &Error{"image is corrupt", syscall.EIO}
	// ErrMalformed carries EINVAL: an unknown operation, or segments that do not add up to the length.
	ErrMalformed = &Error{"request is malformed", syscall.EINVAL}
	// ErrTooDeep carries EIO: more layers want the request back than there is room for. The graph refuses to build so
	// deep a stack.
	ErrTooDeep = &Error{"too many layers intercept the request", syscall.EIO}
	// ErrBusy carries EBUSY: what should be closed is in use.
	ErrBusy = &Error{"in use", syscall.EBUSY}
)

// Corruptf describes what is wrong with an image, and where. errors.Is(err, ErrCorrupt) holds.
func Corruptf(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
}

// Errno gives the errno that err carries, or EIO when it carries none. It is 0 for nil.
func Errno(err error) syscall.Errno {
	if err == nil {
		return 0
	}
	var errno syscall.Errno
	if errors.As(err, &errno) && errno != 0 {
		return errno
	}
	return syscall.EIO
}
