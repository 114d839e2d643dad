// SPDX-License-Identifier: Apache-2.0

package file

import (
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/sys"
)

// QEMU tells others what it does with an image, and what it does not stand that they do, by shared locks on single
// bytes of the image file: byte 100+p says "I do p", byte 200+p says "nobody else may do p". Whoever opens an image sets
// the locks of what it does and of what it does not stand, and then looks whether the opposite byte is locked by
// somebody else. The locks belong to the open file (OFD locks), so they end with it, however the process ends.
const (
	doesBase    = 100
	forbidsBase = 200
)

// permission is p above: QEMU's numbers of what one can do with an image.
type permission int64

const (
	permRead   permission = 0 // rely on consistent contents
	permWrite  permission = 1
	permResize permission = 3
)

func (p permission) String() string {
	switch p {
	case permRead:
		return "read"
	case permWrite:
		return "write"
	case permResize:
		return "resize"
	}
	return "use"
}

// A writer does what a QEMU guest's disk does; a reader does not stand that the image changes under it.
var (
	writerDoes   = []permission{permRead, permWrite, permResize}
	readerDoes   = []permission{permRead}
	bothForbid   = []permission{permWrite, permResize}
	errInUseHint = "stop whoever uses it, or look on without a lock: readonly with lock=shared; QEMU's tools: -U"
)

// LockError tells what stands in the way of a lock.
type LockError struct {
	// Permission is what was wanted: read, write or resize.
	Permission string
	// Shared tells that others have that permission, which was to be kept from them; else somebody keeps it from us.
	Shared bool
	err    error
}

// Error says it in our words.
func (e *LockError) Error() string { return e.err.Error() }

// Unwrap gives the cause, which carries EAGAIN.
func (e *LockError) Unwrap() error { return e.err }

// LockImage locks the image behind fd, as its only writer or as a reader that keeps writers away, or says who is in the
// way, as a *LockError. The locks go when fd is closed. Safe for concurrent use.
func LockImage(fd int, readOnly bool) error {
	does := writerDoes
	if readOnly {
		does = readerDoes
	}
	// First set, then look: of two who come at the same time at least one sees the other.
	if err := setLocks(fd, doesBase, does); err != nil {
		return err
	}
	if err := setLocks(fd, forbidsBase, bothForbid); err != nil {
		return err
	}
	for _, p := range does {
		if taken, err := lockedByOther(fd, forbidsBase+int64(p)); err != nil {
			return err
		} else if taken {
			return &LockError{Permission: p.String(), err: fmt.Errorf("lock image for %s: another process, or another disk of this one, has it open and does not share that: %w (%s)", p, syscall.EAGAIN, errInUseHint)}
		}
	}
	for _, p := range bothForbid {
		if taken, err := lockedByOther(fd, doesBase+int64(p)); err != nil {
			return err
		} else if taken {
			return &LockError{Permission: p.String(), Shared: true, err: fmt.Errorf("lock image against %s by others: another process, or another disk of this one, has it open for that: %w (%s)", p, syscall.EAGAIN, errInUseHint)}
		}
	}
	return nil
}

func setLocks(fd int, base int64, perms []permission) error {
	for _, p := range perms {
		err := sys.OfdSetlk(fd, sys.F_RDLCK, base+int64(p), 1)
		switch {
		case err == nil:
		case errnoIs(err, syscall.EAGAIN, syscall.EACCES):
			return fmt.Errorf("lock image for %s: another process holds the file locked whole: %w (%s)", p, err, errInUseHint)
		default:
			return fmt.Errorf("lock image for %s: %w (if the file system has no locks, turn them off: lock=off)", p, err)
		}
	}
	return nil
}

// lockedByOther tells whether another open file holds a lock on the byte.
func lockedByOther(fd int, at int64) (bool, error) {
	kind, err := sys.OfdGetlk(fd, sys.F_WRLCK, at, 1)
	if err != nil {
		return false, fmt.Errorf("look for locks of the image: %w", err)
	}
	return kind != sys.F_UNLCK, nil
}
