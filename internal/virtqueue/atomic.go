// SPDX-License-Identifier: Apache-2.0

//go:build amd64 || arm64

package virtqueue

// Rings are little-endian by specification (VERSION_1), and so are both architectures that the build tag admits. The
// ring indices, flags and events are 16 bits wide, for which Go has no atomics: these three are assembly.

// LoadAcquire16 loads *p; no later load or store of the caller moves before it. p must be 2-aligned.
// Safe for concurrent use.
//
//go:noescape
func LoadAcquire16(p *uint16) uint16

// StoreRelease16 stores v to *p, two bytes and no more; no earlier load or store of the caller moves behind it.
// p must be 2-aligned. Safe for concurrent use.
//
//go:noescape
func StoreRelease16(p *uint16, v uint16)

// Fence orders everything before it against everything after it, a store before against a load after included, which
// acquire and release leave free. Safe for concurrent use.
func Fence()
