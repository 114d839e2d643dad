// SPDX-License-Identifier: Apache-2.0

package virtqueue_test

import (
	"testing"

	"github.com/sluice-blk/sluice/internal/virtqtest"
	"github.com/sluice-blk/sluice/internal/virtqueue"
)

// The driver's work is one store for a whole batch here, so that the figure is the device's.

func BenchmarkPop(b *testing.B) {
	b.Run("direct", func(b *testing.B) { benchServe(b, false) })
	b.Run("indirect", func(b *testing.B) { benchServe(b, true) })
}

// benchServe takes chains of three descriptors and completes them, 32 a batch.
func benchServe(b *testing.B, indirect bool) {
	const batch = 32
	r := newRig(b, virtqtest.DriverConfig{Size: 128, EventIdx: true, Indirect: indirect, TableSize: 4})
	r.c = virtqueue.NewChain(8)
	readable := []virtqtest.Segment{seg(r.buf.Addr, 16)}
	writable := []virtqtest.Segment{seg(r.buf.Addr+4096, 4096), seg(r.buf.Addr+512, 1)}
	heads := make([]uint16, batch)
	for i := range heads {
		heads[i], _ = r.d.Add(readable, writable)
	}
	for i := range r.d.Size() { // the same heads all over the ring
		r.d.SetAvail(i, heads[i%batch])
	}
	b.ReportAllocs()
	b.ResetTimer()
	idx := uint16(0)
	for n := 0; n < b.N; n += batch {
		idx += batch
		r.d.SetAvailIdx(idx)
		for range batch {
			if ok, err := r.q.Pop(r.c); !ok || err != nil {
				b.Fatal(ok, err)
			}
		}
		for _, head := range heads {
			r.q.Push(head, 4097)
		}
		r.q.Publish()
	}
}

func BenchmarkFence(b *testing.B) {
	for b.Loop() {
		virtqueue.Fence()
	}
}

// BenchmarkRoundTrip is both sides in one thread.
func BenchmarkRoundTrip(b *testing.B) {
	r := newRig(b, virtqtest.DriverConfig{Size: 128, EventIdx: true})
	r.c = virtqueue.NewChain(8)
	readable := []virtqtest.Segment{seg(r.buf.Addr, 16)}
	writable := []virtqtest.Segment{seg(r.buf.Addr+4096, 4096), seg(r.buf.Addr+512, 1)}
	b.ReportAllocs()
	for n := 0; n < b.N; n += 32 {
		for range 32 {
			r.d.Add(readable, writable)
		}
		r.d.Publish()
		for {
			ok, err := r.q.Pop(r.c)
			if err != nil {
				b.Fatal(err)
			}
			if !ok {
				break
			}
			r.q.Push(r.c.Head, 4097)
		}
		r.q.EnableKicks()
		r.q.Publish()
		for {
			if _, _, ok := r.d.Used(); !ok {
				break
			}
		}
	}
}
