// SPDX-License-Identifier: Apache-2.0

// Package sys is the only room that makes a system call and the only one that imports golang.org/x/sys/unix.
//
// Each file owns the calls of one subject (rings, files, memory, sockets) as thin wrappers: the kernel's names, the
// kernel's results, and a bare [syscall.Errno] as the error, so that converting it to an interface allocates nothing
// and errors.Is works everywhere above. It holds no policy: no retry, no fallback, no log. Functions are safe for
// concurrent use unless their comment says otherwise, in so far as the kernel object behind the descriptor is.
package sys
