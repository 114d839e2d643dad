// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"fmt"
	"syscall"
	"testing"
)

// BenchmarkEngineReads reads pages of a file in memory, one or 32 in a batch. The figure to compare is the process's
// CPU time per read, which holds what threads and kernel workers cost too.
func BenchmarkEngineReads(b *testing.B) {
	for _, s := range []engineSetup{
		{EngineLinuxAIO, PollerEpoll, false},
		{EngineLinuxAIO, PollerIOUring, false},
		{EngineThreads, PollerEpoll, false},
		{EngineIOUring, PollerIOUring, false},
	} {
		for _, batch := range []int{1, 32} {
			b.Run(fmt.Sprintf("%s/%s/batch=%d", s.kind, s.poller, batch), func(b *testing.B) { benchmarkReads(b, s, batch) })
		}
	}
}

func benchmarkReads(b *testing.B, s engineSetup, batch int) {
	bed := newEngineBed(b, s, nil)
	f := bed.file(256 * page)
	bed.must(f, bed.ask(OpWrite, 0, bed.buffer(256*page)))
	asks := make([]*ask, batch)
	for i := range asks {
		asks[i] = bed.ask(OpRead, int64(i*5%256)*page, bed.buffer(page))
	}
	b.ReportAllocs()
	before := cpuTime()
	b.ResetTimer()
	for n := 0; n < b.N; n += batch {
		bed.l.Plug()
		for _, a := range asks {
			f.Submit(&a.Request)
		}
		bed.l.Unplug()
		bed.until(batch)
	}
	b.StopTimer()
	b.ReportMetric(float64(cpuTime()-before)/float64(b.N), "cpu-ns/op")
}

// cpuTime is what the process has used, user and system, in nanoseconds.
func cpuTime() int64 {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return u.Utime.Nano() + u.Stime.Nano()
}
