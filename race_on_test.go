// SPDX-License-Identifier: Apache-2.0

//go:build race

package sluice

// raceEnabled tells whether the race detector is compiled in.
const raceEnabled = true
