// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"fmt"
	"os"
	"runtime"
	"testing"
)

// benchRing makes the best ring there is.
func benchRing(b *testing.B) *Ring {
	b.Helper()
	runtime.LockOSThread()
	r, err := NewBest(64, nil)
	if err != nil {
		runtime.UnlockOSThread()
		skipIfMissing(b, err, 0)
		b.Fatal(err)
	}
	b.Cleanup(func() {
		r.Close()
		runtime.UnlockOSThread()
	})
	return r
}

// benchBatches runs b.N requests, batch at a time: one call submits a batch and waits for all of it.
func benchBatches(b *testing.B, r *Ring, batch int, prep func(s *SQE, i int)) {
	var cqes [64]CQE
	b.ReportAllocs()
	b.ResetTimer()
	for done := 0; done < b.N; {
		for i := range batch {
			prep(r.GetSQE(), i)
		}
		for got := 0; got < batch; {
			_, _ = r.SubmitAndWait(uint32(batch-got), -1)
			n := r.Reap(cqes[:])
			for i := range cqes[:n] {
				if cqes[i].Res < 0 {
					b.Fatal(cqes[i].Err())
				}
			}
			got += n
		}
		done += batch
	}
}

func BenchmarkNop(b *testing.B) {
	for _, batch := range []int{1, 8, 32} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			benchBatches(b, benchRing(b), batch, func(s *SQE, _ int) { s.PrepNop() })
		})
	}
}

func BenchmarkCachedRead4k(b *testing.B) {
	const size, block = 4 << 20, 4096
	fd, path := tempFile(b, "")
	if err := os.WriteFile(path, make([]byte, size), 0o600); err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, 32*block)
	for _, batch := range []int{1, 32} {
		b.Run(fmt.Sprintf("batch=%d", batch), func(b *testing.B) {
			b.SetBytes(block)
			at := uint64(1)
			benchBatches(b, benchRing(b), batch, func(s *SQE, i int) {
				at = at*6364136223846793005 + 1442695040888963407
				s.PrepRead(fd, buf[i*block:(i+1)*block], at>>33%(size/block)*block)
			})
		})
	}
}
