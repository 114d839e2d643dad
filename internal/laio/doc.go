// SPDX-License-Identifier: Apache-2.0

// Package laio owns Linux AIO contexts: io_setup, io_submit, io_destroy, and the completion ring that the kernel maps
// into the process.
//
// A context's id is the address of that ring. Completions are taken from it without a system call; where the ring does
// not look as this code knows it, io_getevents takes them instead. The package does not choose what to submit, does not
// retry, and keeps no track of requests: that is the engine's business.
//
// A Context belongs to one goroutine at a time. Nothing in it is locked.
package laio
