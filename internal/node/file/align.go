// SPDX-License-Identifier: Apache-2.0

package file

import (
	"fmt"
	"syscall"

	"github.com/sluice-blk/sluice/internal/sys"
)

// maxAlign is the coarsest alignment that is tried; no device with larger blocks is known to take O_DIRECT.
const maxAlign = 4096

// probeAlign finds the alignment that direct I/O on the file needs. The kernel tells it since 6.1; before that a block
// device's is its block size, and that of a regular file is found by reading. why tells that the file takes no direct
// I/O although it could be opened for it.
func (f *opened) probeAlign() (why string, err error) {
	var st sys.Statx_t
	if err := sys.StatxFd(f.fd, sys.STATX_DIOALIGN, &st); err == nil && st.Mask&sys.STATX_DIOALIGN != 0 {
		if st.Dio_offset_align == 0 || st.Dio_mem_align == 0 {
			return "the kernel says that the file takes no direct I/O", nil
		}
		f.align, f.memAlign = int(st.Dio_offset_align), int(st.Dio_mem_align)
		f.physical = max(f.physical, f.align)
		return "", nil
	}
	if f.isBlock {
		f.align, f.memAlign = f.logical, f.logical
		return "", nil
	}
	return f.tryAlign()
}

// tryAlign reads with coarser and coarser alignment until the file takes it. Nothing can be learnt from a file that is
// empty: the coarsest is safe then.
func (f *opened) tryAlign() (why string, err error) {
	buf, err := sys.MmapAnon(2 * maxAlign)
	if err != nil {
		return "", fmt.Errorf("map memory to find the alignment: %w", err)
	}
	defer func() { _ = sys.Munmap(buf) }() // ours, and of no more use
	f.align, f.memAlign = maxAlign, maxAlign
	if f.size == 0 {
		return "", nil
	}
	for align := 1; align <= maxAlign; align *= 2 {
		if align > 1 && align < sector {
			continue
		}
		_, err := sys.Pread(f.fd, buf[align:2*align], 0)
		switch {
		case err == nil:
			f.align, f.memAlign = align, align
			return "", nil
		case !errnoIs(err, syscall.EINVAL):
			return "", fmt.Errorf("read to find the alignment: %w", err)
		}
	}
	return fmt.Sprintf("the file refuses direct reads of %d aligned bytes", maxAlign), nil
}
