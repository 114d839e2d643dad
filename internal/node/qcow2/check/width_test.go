// SPDX-License-Identifier: Apache-2.0

package check

import (
	"errors"
	"fmt"
	"math/bits"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

// From each width to each other one, and whatever call fails on the way: the image is sound, with the old width or the new.
func TestChangeWidth(t *testing.T) {
	for _, from := range []int{1, 16, 64} {
		for _, to := range []int{1, 2, 4, 8, 16, 32, 64} {
			t.Run(fmt.Sprintf("%d to %d", from, to), func(t *testing.T) {
				before, old := image(t, create.Options{ClusterSize: 4096, RefcountBits: from})
				order := uint32(bits.TrailingZeros(uint(to)))
				for n := 1; ; n++ {
					s := before.Clone()
					s.Calls, s.FailAt, s.Forever = 0, n, true
					err := ChangeWidth(s, order)
					through := s.Calls < n
					s.FailAt = 0
					if through != (err == nil) {
						t.Fatalf("call %d fails: %v", n, err)
					}
					h, herr := qcow2.ReadHeader(s.Read)
					if herr != nil || through && h.RefcountOrder != order || h.RefcountOrder != order && h.RefcountOrder != old.RefcountOrder {
						t.Fatalf("call %d fails: header is %+v, %v", n, h, herr)
					}
					if r, said := mustRun(t, s, Nothing); !r.Clean() {
						t.Fatalf("call %d fails: %+v\n%s", n, r, said)
					}
					if through {
						break
					}
				}
			})
		}
	}
}

func TestWidthsThatAreRefused(t *testing.T) {
	v2, _ := image(t, create.Options{Version: 2})
	faulty := broken(t, false)
	sound, _ := image(t, create.Options{})
	shared, h := image(t, create.Options{ClusterSize: 4096})
	l2 := int64(word(t, shared, h.L1Offset) &^ (1 << 63))
	setWord(t, shared, l2+8, word(t, shared, l2)) // two guest clusters in one: too many for one bit
	for name, err := range map[string]error{
		"version 2":       ChangeWidth(v2, 3),
		"image at fault":  ChangeWidth(faulty, 3),
		"too wide":        ChangeWidth(sound, 7),
		"count too large": ChangeWidth(shared, 0),
	} {
		if !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
