// SPDX-License-Identifier: Apache-2.0

package img

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/sys"
)

// Store is a regular file or a block device for those who work on it with blocking calls: the tables of an image stand on
// it. Offsets and lengths are bytes. Not safe for concurrent use, but for Read, which any number of goroutines may call.
type Store struct {
	f      *os.File
	path   string
	device bool
	fresh  bool // the file was made by us
	unsafe bool // Flush does nothing
	size   int64
}

// StoreOptions say how a file is opened. The zero value is read-write, as the only writer.
type StoreOptions struct {
	ReadOnly bool
	// Shared looks on without a lock, also while somebody writes. It needs ReadOnly.
	Shared bool
	// NoLock takes no lock of a file that this process has locked already.
	NoLock bool
	// Unsafe leaves out flushes, for a file that is of no use when it is not finished.
	Unsafe bool
}

// OpenStore opens a file that exists.
func OpenStore(path string, o StoreOptions) (*Store, error) {
	flags := os.O_RDWR
	if o.ReadOnly {
		flags = os.O_RDONLY
	}
	return openStore(path, flags, o)
}

// CreateStore makes a file, or empties the one that is there; a block device keeps its size and what is on it. The file
// is emptied when it has been locked, so that nobody's image is.
func CreateStore(path string, o StoreOptions) (*Store, error) {
	s, err := openStore(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, o)
	switch {
	case err == nil:
		s.fresh = true
	case errors.Is(err, os.ErrExist):
		s, err = openStore(path, os.O_RDWR|os.O_CREATE, o)
	}
	if err != nil {
		return nil, err
	}
	if err := s.Truncate(0); err != nil && !s.device {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

func openStore(path string, flags int, o StoreOptions) (*Store, error) {
	// A FIFO is opened without waiting for its other end, and refused after that.
	f, err := os.OpenFile(path, flags|syscall.O_NONBLOCK, 0o644)
	if err != nil {
		return nil, err
	}
	s := &Store{f: f, path: path, unsafe: o.Unsafe}
	if err := s.prepare(o); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return s, nil
}

func (s *Store) prepare(o StoreOptions) error {
	st, err := s.f.Stat()
	switch {
	case err != nil:
		return err
	case st.Mode().IsRegular():
	case st.Mode()&os.ModeDevice != 0 && st.Mode()&os.ModeCharDevice == 0:
		s.device = true
		size, err := sys.BlkGetSize64(s.fd())
		if err != nil {
			return fmt.Errorf("ask for the size of %q: %w", s.path, err)
		}
		s.size = int64(size)
	default:
		return &specialError{s.path}
	}
	if o.Shared || o.NoLock {
		return nil
	}
	return file.LockImage(s.fd(), o.ReadOnly)
}

// specialError refuses what is neither a regular file nor a block device.
type specialError struct{ path string }

func (e *specialError) Error() string {
	return fmt.Sprintf("open %q: neither a regular file nor a block device", e.path)
}

func (e *specialError) Unwrap() error { return syscall.ENOTSUP }

func (s *Store) fd() int { return int(s.f.Fd()) }

// Path is the name it was opened by.
func (s *Store) Path() string { return s.path }

// Device tells whether it is a block device, whose size is not ours to change.
func (s *Store) Device() bool { return s.device }

// Close closes the file, which gives up its locks. A second Close does no harm.
func (s *Store) Close() error {
	if err := s.f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// Undo closes the file, and removes it when CreateStore made it.
func (s *Store) Undo() error {
	err := s.Close()
	if s.fresh {
		err = errors.Join(err, os.Remove(s.path))
	}
	return err
}

// Read fills p from off on; bytes beyond the end of the file are zero. Safe for concurrent use.
func (s *Store) Read(p []byte, off int64) error {
	n, err := s.f.ReadAt(p, off)
	if err == io.EOF {
		clear(p[n:])
		return nil
	}
	return err
}

// Write writes all of p at off. A regular file grows for it.
func (s *Store) Write(p []byte, off int64) error {
	_, err := s.f.WriteAt(p, off)
	return err
}

// Size is the length of the file, or of the device.
func (s *Store) Size() (int64, error) {
	if s.device {
		return s.size, nil
	}
	st, err := s.f.Stat()
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}

// Truncate sets the length of a regular file. A device can only be left as long as it is: shorter is harmless, and what
// is longer than the device is ENOTSUP.
func (s *Store) Truncate(n int64) error {
	switch {
	case !s.device:
		return s.f.Truncate(n)
	case n <= s.size:
		return nil
	}
	return fmt.Errorf("make %q %d bytes long: a device has the size it has: %w", s.path, n, syscall.ENOTSUP)
}

// Flush makes everything written before durable.
func (s *Store) Flush() error {
	if s.unsafe {
		return nil
	}
	return sys.Fdatasync(s.fd())
}

// Zero makes [off, off+n) read as zeros, without taking space for it where that can be had. A regular file grows for it.
func (s *Store) Zero(off, n int64) error {
	if n <= 0 {
		return nil
	}
	if s.device {
		if off%512 == 0 && n%512 == 0 && sys.BlkZeroout(s.fd(), off, n) == nil {
			return nil
		}
		return s.writeZeros(off, n)
	}
	size, err := s.Size()
	if err != nil {
		return err
	}
	if inside := min(off+n, size) - off; inside > 0 {
		if err := s.punch(off, inside); err != nil {
			if err := s.writeZeros(off, inside); err != nil {
				return err
			}
		}
	}
	if off+n > size {
		return s.f.Truncate(off + n)
	}
	return nil
}

func (s *Store) punch(off, n int64) error {
	return sys.Fallocate(s.fd(), sys.FALLOC_FL_PUNCH_HOLE|sys.FALLOC_FL_KEEP_SIZE, off, n)
}

func (s *Store) writeZeros(off, n int64) error {
	zeros := make([]byte, min(n, 1<<20))
	for n > 0 {
		p := zeros[:min(n, int64(len(zeros)))]
		if err := s.Write(p, off); err != nil {
			return err
		}
		off, n = off+int64(len(p)), n-int64(len(p))
	}
	return nil
}

// Discard gives the space of [off, off+n) back where the file system can; what it reads as afterwards is not said.
func (s *Store) Discard(off, n int64) error {
	if n <= 0 {
		return nil
	}
	var err error
	if s.device {
		err = sys.BlkDiscard(s.fd(), off, n)
	} else {
		err = s.punch(off, n)
	}
	if errors.Is(err, syscall.EOPNOTSUPP) || errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENOTTY) {
		return nil
	}
	return err
}

// Allocate takes the space of [off, off+n) of a regular file, so that writes to it cannot fail for want of space.
func (s *Store) Allocate(off, n int64) error {
	if n <= 0 || s.device {
		return nil
	}
	return sys.Fallocate(s.fd(), 0, off, n)
}

// WriteZeros writes zeros to [off, off+n), so that the space is taken and initialised.
func (s *Store) WriteZeros(off, n int64) error { return s.writeZeros(off, n) }

// Allocated is how many bytes the file takes of its file system; 0 for a device.
func (s *Store) Allocated() (int64, error) {
	var st sys.Stat_t
	if err := sys.Fstat(s.fd(), &st); err != nil {
		return 0, err
	}
	return st.Blocks * 512, nil
}
