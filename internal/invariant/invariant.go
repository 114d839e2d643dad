// SPDX-License-Identifier: Apache-2.0

// Package invariant holds assertions about our own mistakes, never about what a guest, a peer or an image sent.
//
// They exist only under the build tag "invariants"; without it they compile to nothing.
package invariant

// Assert stops the program when cond is false and the build has the invariants tag.
// Guard a costly condition with `if invariant.Enabled`.
func Assert(cond bool, msg string) {
	if Enabled && !cond {
		panic("invariant violated: " + msg)
	}
}
