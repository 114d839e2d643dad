// SPDX-License-Identifier: Apache-2.0

package laio

import (
	"os"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/sys"
)

// BenchmarkSignal compares ways to add one to somebody else's eventfd: the plain write, which waits when the eventfd is
// blocking and full; asking for room first, which leaves a gap between answer and write; and the completion of a request
// of no bytes, which never waits.
func BenchmarkSignal(b *testing.B) {
	efd, err := sys.Eventfd(0, sys.EFD_CLOEXEC)
	if err != nil {
		b.Fatal(err)
	}
	defer syscall.Close(efd)
	b.Run("write", func(b *testing.B) {
		b.ReportAllocs()
		cpu := cpuTime()
		for range b.N {
			_ = sys.EventfdWrite(efd, 1)
		}
		report(b, cpu)
	})
	b.Run("ppoll+write", func(b *testing.B) {
		b.ReportAllocs()
		cpu := cpuTime()
		for range b.N {
			if sys.EventfdHasRoom(efd) {
				_ = sys.EventfdWrite(efd, 1)
			}
		}
		report(b, cpu)
	})
	zero, err := os.Open("/dev/zero")
	if err != nil {
		b.Fatal(err)
	}
	defer zero.Close()
	b.Run("aio-read", func(b *testing.B) {
		signalByAIO(b, efd, 1, func(cb *IOCB) { PrepRead(cb, int(zero.Fd()), sys.IOVec{}, 0) })
	})
	b.Run("aio-read/batch=8", func(b *testing.B) {
		signalByAIO(b, efd, 8, func(cb *IOCB) { PrepRead(cb, int(zero.Fd()), sys.IOVec{}, 0) })
	})
	ready, err := sys.Eventfd(1, sys.EFD_CLOEXEC)
	if err != nil {
		b.Fatal(err)
	}
	defer syscall.Close(ready)
	b.Run("aio-poll", func(b *testing.B) {
		signalByAIO(b, efd, 1, func(cb *IOCB) { PrepPoll(cb, ready, sys.POLLIN) })
	})
}

// signalByAIO signals batch times in a submission, as for that many queues with news in one turn.
func signalByAIO(b *testing.B, efd, batch int, prepare func(cb *IOCB)) {
	c, err := New(8, nil)
	if err != nil {
		b.Skipf("needs Linux AIO: %v", err)
	}
	defer c.Close()
	cbs := make([]IOCB, batch)
	ptrs := make([]*IOCB, batch)
	for i := range cbs {
		prepare(&cbs[i])
		Signal(&cbs[i], efd)
		ptrs[i] = &cbs[i]
	}
	events := make([]Event, 8)
	b.ReportAllocs()
	b.ResetTimer()
	cpu := cpuTime()
	for n := 0; n < b.N; n += batch {
		if _, err := c.Submit(ptrs); err != nil {
			b.Fatal(err)
		}
		c.Reap(events)
	}
	report(b, cpu)
}

func cpuTime() int64 {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return u.Utime.Nano() + u.Stime.Nano()
}

func report(b *testing.B, before int64) {
	b.ReportMetric(float64(cpuTime()-before)/float64(b.N), "cpu-ns/op")
}
