// SPDX-License-Identifier: Apache-2.0

package sluice

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/graph"
	"github.com/sluice-blk/sluice/internal/sys"
)

// Prealloc says what of a new image takes space at once.
type Prealloc string

const (
	// PreallocOff makes a sparse file: space is taken when it is written.
	PreallocOff Prealloc = ""
	// PreallocFalloc reserves the space without writing it (fallocate).
	PreallocFalloc Prealloc = "falloc"
	// PreallocFull writes zeros to all of it.
	PreallocFull Prealloc = "full"
)

// CreateOptions say how an image is made. The zero value, and a nil pointer, make a sparse file that only its owner and
// group can read.
type CreateOptions struct {
	Prealloc Prealloc
	// Overwrite replaces what is in the file at path, which must not be in use. Without it an existing file is an error
	// that errors.Is knows as fs.ErrExist.
	Overwrite bool
	// Mode is the new file's permissions before the umask; 0 is 0640.
	Mode fs.FileMode
}

// sectorSize is the unit of a disk's size.
const sectorSize = 512

// Create makes a raw image of size bytes, a multiple of 512, at path. All of it reads as zeros. When it fails, a file that
// it made is removed.
func Create(path string, size int64, o *CreateOptions) error {
	if o == nil {
		o = &CreateOptions{}
	}
	if err := o.create(path, size); err != nil {
		return fmt.Errorf("create %s: %w", path, err)
	}
	return nil
}

func (o *CreateOptions) create(path string, size int64) (err error) {
	switch {
	case size <= 0 || size%sectorSize != 0:
		return fmt.Errorf("size is %d (want a multiple of %d)", size, sectorSize)
	case o.Prealloc != PreallocOff && o.Prealloc != PreallocFalloc && o.Prealloc != PreallocFull:
		return fmt.Errorf("unknown preallocation %q (want falloc or full)", o.Prealloc)
	}
	mode := o.Mode
	if mode == 0 {
		mode = 0o640
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, mode)
	if errors.Is(err, fs.ErrExist) && o.Overwrite {
		return o.overwrite(path, size)
	}
	if err != nil {
		return cause(err)
	}
	if err = o.fill(f, size); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

// overwrite empties a file that nobody uses, and fills it under the lock that says so.
func (o *CreateOptions) overwrite(path string, size int64) error {
	lock, err := graph.Build(context.Background(), graph.Spec{Path: path, Cache: block.CacheWriteback}, graph.AnyPath)
	if err != nil {
		return openError(err)
	}
	defer lock.Close()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_TRUNC, 0)
	if err != nil {
		return cause(err)
	}
	return o.fill(f, size)
}

// fill gives the file its size and closes it.
func (o *CreateOptions) fill(f *os.File, size int64) error {
	err := f.Truncate(size)
	switch {
	case err != nil:
	case o.Prealloc == PreallocFalloc:
		if err = sys.Fallocate(int(f.Fd()), 0, 0, size); errors.Is(err, syscall.EOPNOTSUPP) {
			err = fmt.Errorf("reserve the space: %w (the file system cannot; use full)", err)
		}
	case o.Prealloc == PreallocFull:
		err = writeZeros(f, size)
	}
	if err == nil && o.Prealloc != PreallocOff {
		err = f.Sync()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	return cause(err)
}

func writeZeros(f *os.File, size int64) error {
	const chunk = 1 << 20
	zeros := make([]byte, chunk)
	for off := int64(0); off < size; off += chunk {
		if _, err := f.WriteAt(zeros[:min(chunk, size-off)], off); err != nil {
			return err
		}
	}
	return nil
}

// cause strips the path and operation that os adds, which our messages name already.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}
