// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Operations of futex(2), for threads of one process.
const (
	futexWaitPrivate = 0 | 128
	futexWakePrivate = 1 | 128
)

// FutexWait sleeps while *word is val (futex(2), FUTEX_WAIT). It may end without a wake-up, so that the caller looks
// again: EAGAIN when *word was not val, EINTR when a signal came. word must lie in the Go heap or outside Go.
func FutexWait(word *atomic.Uint32, val uint32) error {
	// SAFETY: the kernel reads *word during the call; the conversion in the argument list keeps it alive, and heap
	// objects do not move.
	_, _, e := syscall.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWaitPrivate, uintptr(val), 0, 0, 0)
	if e != 0 {
		return e
	}
	return nil
}

// FutexWake wakes at most n of those that sleep on word, and answers how many (futex(2), FUTEX_WAKE).
func FutexWake(word *atomic.Uint32, n int) (int, error) {
	// SAFETY: the kernel uses the address alone.
	woken, _, e := syscall.Syscall(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), futexWakePrivate, uintptr(n))
	if e != 0 {
		return 0, e
	}
	return int(woken), nil
}
