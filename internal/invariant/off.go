// SPDX-License-Identifier: Apache-2.0

//go:build !invariants

package invariant

// Enabled tells whether assertions are compiled in. It is a constant, so that `if invariant.Enabled { ... }` vanishes.
const Enabled = false
