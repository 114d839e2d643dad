// SPDX-License-Identifier: Apache-2.0

package file

import (
	"fmt"
	"io"

	"github.com/sluice-blk/sluice/internal/sys"
)

// Head reads the first size bytes of the file, less where it is shorter, whatever alignment the file needs. Control plane;
// safe for concurrent use.
func (n *Node) Head(size int) ([]byte, error) {
	buf := make([]byte, size)
	got, err := n.ReadAt(buf, 0)
	if err != nil && err != io.EOF {
		return nil, err
	}
	return buf[:got], nil
}

// readPiece bounds the aligned memory of one ReadAt.
const readPiece = 1 << 20

// ReadAt implements io.ReaderAt, whatever alignment the file needs: for the tables of an image that is opened. Control
// plane; safe for concurrent use.
func (n *Node) ReadAt(p []byte, offset int64) (int, error) {
	align := max(n.info.Align, n.info.MemAlign)
	buf, err := sys.MmapAnon(min(len(p), readPiece)/align*align + 2*align)
	if err != nil {
		return 0, fmt.Errorf("read %q at %d: map memory: %w", n.o.Path, offset, err)
	}
	defer func() { _ = sys.Munmap(buf) }() // ours, and of no more use
	for done := 0; ; {
		start := (offset + int64(done)) &^ int64(align-1)
		skip := int(offset + int64(done) - start)
		got, err := sys.Pread(n.fd, buf, start)
		if err != nil {
			return done, fmt.Errorf("read %q at %d: %w", n.o.Path, start, err)
		}
		if got > skip {
			done += copy(p[done:], buf[skip:got])
		}
		if done == len(p) {
			return done, nil
		}
		if got < len(buf) {
			return done, io.EOF
		}
	}
}
