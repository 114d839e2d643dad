// SPDX-License-Identifier: Apache-2.0

// Package blocktest tests nodes of the block graph and the handle before them.
//
// Conform runs one suite of named tests over whatever a factory opens, bare where the node can be asked directly and
// through a Handle; Random compares a node with a model under a random list of operations, which it prints with its seed
// when they differ; NthFailure makes the n-th request fail for every n. A Disk is a loop's face of a node for code that
// waits, and Shape is a node that asks for alignment and limits, and fails the test when it does not get them.
//
// It is for tests alone. Its functions are called from the test's goroutine; the loops that it makes are its own.
package blocktest
