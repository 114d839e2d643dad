// SPDX-License-Identifier: Apache-2.0

package sluice

import (
	"errors"
	"syscall"

	"github.com/sluice-blk/sluice/internal/block"
)

// Causes that errors.Is finds in the errors of this package. What the kernel answered is found as a [syscall.Errno].
var (
	// ErrClosed is the answer of a disk that was closed.
	ErrClosed = errors.New("disk is closed")
	// ErrInUse means that another process has the image open in a way that does not go with ours.
	ErrInUse = errors.New("image is in use")
	// ErrReadOnly means that a disk that was opened read-only should change.
	ErrReadOnly error = block.ErrReadOnly
	// ErrRange means that a range reaches beyond the disk, or begins before it.
	ErrRange error = block.ErrRange
	// ErrNotSupported means that the disk, or the file system beneath, cannot do it.
	ErrNotSupported error = block.ErrNotSupported
)

// inUse marks an error of opening with ErrInUse.
type inUse struct{ error }

func (e *inUse) Is(target error) bool { return target == ErrInUse }
func (e *inUse) Unwrap() error        { return e.error }

// openError marks the answer of a lock that another process holds.
func openError(err error) error {
	if errors.Is(err, syscall.EAGAIN) {
		return &inUse{err}
	}
	return err
}
