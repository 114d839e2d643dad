// SPDX-License-Identifier: Apache-2.0

//go:build invariants

package invariant

// Enabled tells whether assertions are compiled in.
const Enabled = true
