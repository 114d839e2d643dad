// SPDX-License-Identifier: Apache-2.0

package sys

import "golang.org/x/sys/unix"

// Fchmod changes the mode of an open file (fchmod(2)). On a socket that is not bound yet it is the mode of the file that
// bind(2) will make, less the process's mask (unix(7)).
func Fchmod(fd int, mode uint32) error { return unix.Fchmod(fd, mode) }
