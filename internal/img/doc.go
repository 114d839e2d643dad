// SPDX-License-Identifier: Apache-2.0

// Package img is the work behind `sluice img`: what can be done to image files that nobody serves at the moment.
//
// It owns files while a verb runs: each is opened with the locks that QEMU and our own daemon respect, worked on with
// plain blocking calls, and closed. The verbs that change or read metadata (create, info, check, resize, snapshot, amend,
// measure, bitmap) use the tables of an image directly over a [Store]; those that move data (convert, compare, commit,
// rebase, dd, bench, map) build a graph of nodes and run it on loops.
//
// Its results are data: structs whose JSON is that of `qemu-img --output=json`, beside functions that write the text
// which people and scripts know. Messages of errors that scripts may look for are worded as qemu-img words them.
//
// Control plane: ordinary goroutines. Nothing here is safe for concurrent use unless its comment says so.
//
// It does not parse command lines (internal/cli does), and it never guesses the format of an image that it writes to when
// a guest could have written what it would guess from.
package img
