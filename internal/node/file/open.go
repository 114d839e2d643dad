// SPDX-License-Identifier: Apache-2.0

package file

import (
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/sys"
)

// opened is what was found out about a file when it was opened.
type opened struct {
	fd        int
	isBlock   bool
	protected bool // a device that takes no writes
	direct    bool
	reason    string // direct or buffered, and why
	size      int64

	align, memAlign            int
	logical, physical, optimal int

	discard                  bool
	discardAlign, discardMax int64
}

// openFile opens the file in the way that the cache mode asks for.
func openFile(o Options) (*opened, error) {
	switch o.Cache {
	case block.CacheNone:
		f, why, err := openDirect(o)
		if err != nil {
			return nil, err
		}
		if why != "" {
			return nil, fmt.Errorf("cache mode none is not possible: %s: %w (use cache=writeback)", why, syscall.EINVAL)
		}
		f.reason = "direct I/O was asked for"
		return f, nil
	case block.CacheDefault:
		f, why, err := openDirect(o)
		if err != nil {
			return nil, err
		}
		if why == "" {
			f.reason = "direct I/O, which the file allows"
			return f, nil
		}
		return openBuffered(o, "through the page cache: "+why)
	}
	return openBuffered(o, "through the page cache, as cache mode "+o.Cache.String()+" asks")
}

// openDirect opens the file with O_DIRECT. why tells what speaks against it, with f nil; err is for what would go wrong
// without O_DIRECT as well.
func openDirect(o Options) (f *opened, why string, err error) {
	fd, err := sys.Open(o.Path, openFlags(o)|sys.O_DIRECT, 0)
	if errnoIs(err, syscall.EINVAL) {
		return nil, "the file system refuses O_DIRECT", nil
	}
	if err != nil {
		return nil, "", openError(o, err)
	}
	f = &opened{fd: fd, direct: true}
	if err = f.measure(o); err == nil {
		why, err = f.probeAlign()
	}
	if why == "" && err == nil && f.size%int64(f.align) != 0 && !o.Growable {
		why = fmt.Sprintf("the size of %d bytes is no multiple of the %d that direct I/O needs", f.size, f.align)
	}
	if why != "" || err != nil {
		return nil, why, closeWith(fd, err)
	}
	return f, "", nil
}

func openBuffered(o Options, reason string) (*opened, error) {
	fd, err := sys.Open(o.Path, openFlags(o), 0)
	if err != nil {
		return nil, openError(o, err)
	}
	f := &opened{fd: fd, reason: reason, align: 1, memAlign: 1}
	if err := f.measure(o); err != nil {
		return nil, closeWith(fd, err)
	}
	return f, nil
}

// closeWith closes fd on the way out with err, which tells more than what Close could add.
func closeWith(fd int, err error) error {
	cerr := sys.Close(fd)
	if err == nil && cerr != nil {
		return fmt.Errorf("close: %w", cerr)
	}
	return err
}

// openFlags opens a FIFO without waiting for its other end: it is refused after that, as every other special file.
func openFlags(o Options) int {
	flags := sys.O_RDWR
	if o.ReadOnly {
		flags = sys.O_RDONLY
	}
	return flags | sys.O_CLOEXEC | sys.O_NONBLOCK
}

func openError(o Options, err error) error {
	if !o.ReadOnly && errnoIs(err, syscall.EACCES, syscall.EROFS, syscall.EPERM) {
		return fmt.Errorf("%w (set readonly, or give write permission)", err)
	}
	return err
}

// measure finds the kind, the size and the blocks of the file.
func (f *opened) measure(o Options) error {
	var st sys.Stat_t
	if err := sys.Fstat(f.fd, &st); err != nil {
		return fmt.Errorf("fstat: %w", err)
	}
	switch st.Mode & syscall.S_IFMT {
	case syscall.S_IFREG:
		f.size = st.Size
		f.logical, f.physical, f.optimal = sector, int(st.Blksize), int(st.Blksize)
		f.discard, f.discardAlign = true, int64(st.Blksize)
		return nil
	case syscall.S_IFBLK:
		f.isBlock = true
		if err := f.measureDevice(uint64(st.Rdev)); err != nil {
			return err
		}
		if f.protected && !o.ReadOnly { // the kernel opens it all the same, and fails each write
			return openError(o, fmt.Errorf("the device is write-protected: %w", syscall.EROFS))
		}
		return nil
	}
	return fmt.Errorf("neither a regular file nor a block device: %w", syscall.ENOTSUP)
}

func (f *opened) measureDevice(rdev uint64) error {
	size, err := sys.BlkGetSize64(f.fd)
	if err != nil {
		return fmt.Errorf("ask for the size of the device: %w", err)
	}
	if f.logical, err = sys.BlkSszGet(f.fd); err != nil {
		return fmt.Errorf("ask for the block size of the device: %w", err)
	}
	f.size = int64(size)
	if f.physical, err = sys.BlkPbszGet(f.fd); err != nil {
		f.physical = f.logical
	}
	f.askQueue(rdev)
	return nil
}
