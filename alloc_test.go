// SPDX-License-Identifier: Apache-2.0

//go:build !race

package sluice

import "testing"

// The race detector makes sync.Pool forget on purpose, so that this holds without it only.
func TestACallAllocatesNothing(t *testing.T) {
	d, err := OpenMemory(t.Context(), testSize, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	p := make([]byte, 4096)
	if n := testing.AllocsPerRun(100, func() {
		if _, err := d.ReadAt(p, 0); err != nil {
			t.Fatal(err)
		}
	}); n >= 1 { // below one: the pool may be emptied in between
		t.Errorf("a read allocates %v times", n)
	}
}
