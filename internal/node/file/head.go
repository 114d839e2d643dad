// SPDX-License-Identifier: Apache-2.0

package file

import (
	"fmt"

	"github.com/sluice-blk/sluice/internal/sys"
)

// Head reads the first size bytes of the file, less where it is shorter, whatever alignment the file needs. Control plane;
// safe for concurrent use.
func (n *Node) Head(size int) ([]byte, error) {
	align := max(n.info.Align, n.info.MemAlign)
	buf, err := sys.MmapAnon((size + align - 1) / align * align)
	if err != nil {
		return nil, fmt.Errorf("read the beginning of %q: map memory: %w", n.o.Path, err)
	}
	defer func() { _ = sys.Munmap(buf) }() // ours, and of no more use
	got, err := sys.Pread(n.fd, buf, 0)
	if err != nil {
		return nil, fmt.Errorf("read the beginning of %q: %w", n.o.Path, err)
	}
	return append([]byte(nil), buf[:min(got, size)]...), nil
}
