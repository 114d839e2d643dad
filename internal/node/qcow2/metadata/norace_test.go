// SPDX-License-Identifier: Apache-2.0

//go:build !race

package metadata

// raced tells that the race detector is on, under which everything takes ten times as long.
const raced = false
