// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"path"
	"strings"
)

// The file types of st_mode, as the "newc" format stores them (kernel: Documentation/driver-api/early-userspace/
// buffer-format.rst).
const (
	cpioDir     = 0o040000
	cpioRegular = 0o100000
	cpioSymlink = 0o120000

	cpioTrailer = "TRAILER!!!"
	// cpioBlock pads the end of an archive, as cpio(1) does: the next archive of a concatenation then begins aligned
	// to 4 bytes, which is what the kernel asks for.
	cpioBlock = 512
	// cpioPathMax is the kernel's PATH_MAX: it skips an entry with a longer name without a word.
	cpioPathMax = 4096
)

// A cpioWriter writes one archive of the kind that the kernel unpacks as its initramfs ("newc", no checksums). Owners
// and times are zero, so equal contents make equal archives. Parent directories are made as needed. The first error
// sticks. It is not safe for concurrent use.
type cpioWriter struct {
	w    io.Writer
	size int64
	ino  uint32
	seen map[string]uint32 // path to file type
	err  error
}

func newCPIOWriter(w io.Writer) *cpioWriter {
	return &cpioWriter{w: w, seen: map[string]uint32{".": cpioDir}}
}

// Dir adds a directory; one that is there already is left as it is.
func (c *cpioWriter) Dir(name string, perm fs.FileMode) error {
	name, err := c.enter(name)
	if err != nil {
		return err
	}
	if c.seen[name] == cpioDir {
		return nil
	}
	return c.entry(name, cpioDir, perm, 0, nil)
}

// File adds a regular file whose contents are exactly size bytes of r.
func (c *cpioWriter) File(name string, perm fs.FileMode, size int64, r io.Reader) error {
	name, err := c.enter(name)
	if err != nil {
		return err
	}
	return c.entry(name, cpioRegular, perm, size, r)
}

// Symlink adds a symbolic link.
func (c *cpioWriter) Symlink(name, target string) error {
	name, err := c.enter(name)
	if err != nil {
		return err
	}
	return c.entry(name, cpioSymlink, 0o777, int64(len(target)), strings.NewReader(target))
}

// Close ends the archive; it does not close the writer below.
func (c *cpioWriter) Close() error {
	if c.err != nil {
		return c.err
	}
	c.header(cpioTrailer, 0, 0, 0)
	c.pad(cpioBlock)
	err := c.err
	if c.err == nil {
		c.err = errors.New("archive is closed")
	}
	return err
}

// enter cleans a path and makes its parents.
func (c *cpioWriter) enter(name string) (string, error) {
	if c.err != nil {
		return "", c.err
	}
	clean := strings.TrimPrefix(path.Clean("/"+name), "/")
	if clean == "" || strings.Contains(name, "\x00") || len(clean) >= cpioPathMax || clean == cpioTrailer {
		return "", c.fail(fmt.Errorf("add %q to the archive: bad path", name))
	}
	if dir := path.Dir(clean); c.seen[dir] != cpioDir {
		if err := c.Dir(dir, 0o755); err != nil {
			return "", err
		}
	}
	return clean, nil
}

func (c *cpioWriter) entry(name string, kind uint32, perm fs.FileMode, size int64, r io.Reader) error {
	if _, twice := c.seen[name]; twice {
		return c.fail(fmt.Errorf("add %q to the archive: it is there already", name))
	}
	if size < 0 || size > math.MaxUint32 {
		return c.fail(fmt.Errorf("add %q to the archive: %d bytes do not fit the format (limit 4 GiB)", name, size))
	}
	c.seen[name] = kind
	c.ino++
	c.header(name, c.ino, kind|uint32(perm.Perm()), size)
	if c.err != nil || r == nil {
		return c.err
	}
	n, err := io.Copy(c, io.LimitReader(r, size))
	if err == nil && n < size {
		err = fmt.Errorf("%w: %d of %d bytes", io.ErrUnexpectedEOF, n, size)
	}
	if err != nil {
		return c.fail(fmt.Errorf("add %q to the archive: %w", name, err))
	}
	return c.pad(4)
}

func (c *cpioWriter) header(name string, ino, mode uint32, size int64) {
	nlink := 1
	if mode&cpioDir == cpioDir {
		nlink = 2
	}
	// magic, inode, mode, uid, gid, nlink, mtime, size, device 2x, special device 2x, name size with its NUL, check.
	fmt.Fprintf(c, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		ino, mode, 0, 0, nlink, 0, size, 0, 0, 0, 0, len(name)+1, 0, name)
	c.pad(4)
}

// Write passes bytes down and counts them. It is for the methods above and for io.Copy.
func (c *cpioWriter) Write(p []byte) (int, error) {
	if c.err != nil {
		return 0, c.err
	}
	n, err := c.w.Write(p)
	c.size += int64(n)
	if err != nil {
		c.fail(err)
	}
	return n, err
}

func (c *cpioWriter) pad(to int64) error {
	var zeros [cpioBlock]byte
	if over := c.size % to; over != 0 {
		c.Write(zeros[:to-over])
	}
	return c.err
}

func (c *cpioWriter) fail(err error) error {
	if c.err == nil {
		c.err = err
	}
	return c.err
}
