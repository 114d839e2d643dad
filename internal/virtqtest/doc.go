// SPDX-License-Identifier: Apache-2.0

// Package virtqtest plays the guest's side of a split virtqueue: it lays out guest memory in a memfd, with rings and
// buffers, offers chains and takes them back. Tests of everything that serves a queue use it, and so does the load
// generator of the benchmark; nothing else imports it.
//
// A [Driver] is well-behaved and judges the device: an element in the used ring that it did not ask for stops it. Its
// raw methods write whatever a test wants a broken or hostile driver to write, and bypass all bookkeeping.
//
// One thread owns a Driver. A [Memory] may be shared, its allocator not.
package virtqtest
