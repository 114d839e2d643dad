// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"runtime/debug"
	"syscall"
)

// SetPanicOnFault makes a memory fault of this goroutine a panic that recover can take, instead of the end of the
// process. The setting belongs to the goroutine: each one that touches memory shared with another process calls this
// first, every coroutine included.
//
// Shared memory can vanish under us: whoever holds the memfd may truncate it, and the next access is a SIGBUS.
// May be called from any goroutine.
func SetPanicOnFault() {
	debug.SetPanicOnFault(true)
}

// IsFault tells whether r, as recover returned it, is a memory fault of the kind that [SetPanicOnFault] turns into a
// panic. A nil dereference and an index out of range are not: they are mistakes of ours and must not be swallowed.
// Safe for concurrent use.
func IsFault(r any) bool {
	// The runtime documents the Addr method for exactly this case, and gives it to no other error.
	_, ok := r.(interface {
		error
		RuntimeError()
		Addr() uintptr
	})
	return ok
}

// Faulted tells whether r, as recover returned it, is such a fault, false when there was no panic. Any other panic goes on:
//
//	defer func() {
//		if sys.Faulted(recover()) {
//			err = syscall.EFAULT
//		}
//	}()
func Faulted(r any) bool {
	if r != nil && !IsFault(r) {
		panic(r)
	}
	return r != nil
}

// CopyGuarded copies src to dst as the built-in copy does, and answers [syscall.EFAULT] where either side faults. What
// was copied until then is not told. Safe for concurrent use, on memory that nobody else writes.
func CopyGuarded(dst, src []byte) error {
	return Guarded(func() { copy(dst, src) })
}

// Guarded runs fn, which touches memory that may vanish, and answers [syscall.EFAULT] where it faults. Any other panic
// goes on.
//
// It sets the goroutine's fault mode for the length of the call, so it needs no [SetPanicOnFault] before it.
// Safe for concurrent use.
func Guarded(fn func()) (err error) {
	before := debug.SetPanicOnFault(true)
	defer func() {
		debug.SetPanicOnFault(before)
		if Faulted(recover()) {
			err = syscall.EFAULT
		}
	}()
	fn()
	return nil
}
