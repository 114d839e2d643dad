// SPDX-License-Identifier: Apache-2.0

package aio

import (
	"runtime"
	"testing"

	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/uring"
)

// benchLoop is a loop that the benchmark turns by hand.
func benchLoop(b *testing.B, kind PollerKind) *Loop {
	b.Helper()
	o := LoopOptions{Poller: kind}
	needPoller(b, &o)
	runtime.LockOSThread()
	b.Cleanup(runtime.UnlockOSThread)
	l, err := NewLoop(&o)
	if err != nil {
		b.Fatal(err)
	}
	if err := l.poller.start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := l.Close(); err != nil {
			b.Error(err)
		}
	})
	b.ReportAllocs()
	return l
}

func eachPollerBench(b *testing.B, bench func(b *testing.B, kind PollerKind)) {
	for _, kind := range []PollerKind{PollerIOUring, PollerEpoll, PollerPoll} {
		b.Run(kind.String(), func(b *testing.B) { bench(b, kind) })
	}
}

// BenchmarkTurn is a turn that looks and finds nothing.
func BenchmarkTurn(b *testing.B) {
	eachPollerBench(b, func(b *testing.B, kind PollerKind) {
		l := benchLoop(b, kind)
		for b.Loop() {
			l.turn(0)
		}
	})
}

// BenchmarkKick is an eventfd that becomes ready, its wait, its handler and its read.
func BenchmarkKick(b *testing.B) {
	eachPollerBench(b, func(b *testing.B, kind PollerKind) {
		l := benchLoop(b, kind)
		fd, err := sys.Eventfd(0, sys.EFD_NONBLOCK|sys.EFD_CLOEXEC)
		if err != nil {
			b.Fatal(err)
		}
		defer sys.Close(fd)
		w, err := l.Watch(fd, EventRead, readyFunc(func(w *Watch, _ Events) { _, _ = sys.EventfdRead(w.fd) }))
		if err != nil {
			b.Fatal(err)
		}
		defer w.Close()
		for b.Loop() {
			_ = sys.EventfdWrite(fd, 1)
			l.turn(-1)
		}
	})
}

// BenchmarkNOP is entries that do nothing, 32 a turn: what the loop itself costs a request. One operation is one entry.
func BenchmarkNOP(b *testing.B) {
	l := benchLoop(b, PollerIOUring)
	const batch = 32
	left := 0
	var h CQEHandler = cqeFunc(func(uring.CQE) { left-- })
	prep := prepNop
	for i := 0; i < b.N; i += batch {
		l.inTurn = true // as in a handler
		for range batch {
			left++
			if err := l.AddSQE(prep, h); err != nil {
				b.Fatal(err)
			}
		}
		l.inTurn = false
		for left > 0 {
			l.turn(-1)
		}
	}
}

// BenchmarkPost is a function that another goroutine posts to a loop that sleeps, and its answer.
func BenchmarkPost(b *testing.B) {
	eachPollerBench(b, func(b *testing.B, kind PollerKind) {
		o := LoopOptions{Poller: kind}
		needPoller(b, &o)
		r := start(b, o, nil)
		answer := make(chan bool, 1)
		fn := func() { answer <- true }
		b.ReportAllocs()
		for b.Loop() {
			r.Post(fn)
			<-answer
		}
	})
}
