// SPDX-License-Identifier: Apache-2.0

package sys

import "golang.org/x/sys/unix"

// CopyFileRange has the kernel copy up to n bytes from offset from of in to offset to of out, and tells how many it was; 0
// is the end of in (copy_file_range(2)). File systems that can share the bytes.
func CopyFileRange(in int, from int64, out int, to, n int64) (int64, error) {
	const most = 1 << 30
	for {
		got, err := unix.CopyFileRange(in, &from, out, &to, int(min(n, most)), 0)
		if err != unix.EINTR {
			return int64(got), err
		}
	}
}
