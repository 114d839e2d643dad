// SPDX-License-Identifier: Apache-2.0

//go:build !race

package qcow2_test

import (
	"runtime"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/blocktest"
	"github.com/sluice-blk/sluice/internal/node/mem"
)

// again submits one request again and again, each time when it came back.
type again struct {
	q     block.Queue
	req   block.Request
	model block.Request
	left  int
	err   error
	done  chan struct{}
}

func (a *again) Complete(_ *block.Request, err error) {
	if err != nil {
		a.err = err
	}
	if a.left--; a.left <= 0 || err != nil {
		close(a.done)
		return
	}
	a.submit()
}

func (a *again) submit() {
	m := &a.model
	a.req.Op, a.req.Flags, a.req.Offset, a.req.Length, a.req.Mem = m.Op, m.Flags, m.Offset, m.Length, m.Mem
	a.q.Submit(&a.req)
}

// run carries out the request n times and tells how often memory was allocated.
func (a *again) run(t *testing.T, l *aio.Loop, n int) uint64 {
	t.Helper()
	var before, after runtime.MemStats
	a.left, a.done = n, make(chan struct{})
	a.req.Done = a
	runtime.ReadMemStats(&before)
	if err := blocktest.On(t, l, func() error { a.submit(); return nil }); err != nil {
		t.Fatal(err)
	}
	<-a.done
	runtime.ReadMemStats(&after)
	if a.err != nil {
		t.Fatal(a.err)
	}
	return after.Mallocs - before.Mallocs
}

// Requests allocate nothing, on the straight way and on the coroutine's.
func TestRequestsAllocateNothing(t *testing.T) {
	const cluster = 64 << 10
	n := open(t, inMemory(t, newImage(t, geometries[0].o, 4<<20), mem.Options{}), nil)
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	l := blocktest.Loop(t, nil)
	d := blocktest.Bare(t, l, n)
	buf := make([]byte, 4*cluster)
	// Clusters 1, 0, 3 lie in this order on the host, 2 is zeros, what is behind 4 was never written.
	for _, c := range []int64{1, 0, 3} {
		if err := d.Write(c*cluster, buf[:cluster]); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Zero(2*cluster, cluster, 0); err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]block.Request{
		"read":              {Op: block.OpRead, Offset: 4096, Length: 4096},
		"write in place":    {Op: block.OpWrite, Offset: cluster, Length: 8192},
		"zeros":             {Op: block.OpRead, Offset: 2*cluster + 512, Length: 1024},
		"nothing there":     {Op: block.OpRead, Offset: 9 * cluster, Length: 3 * cluster},
		"read of four runs": {Op: block.OpRead, Offset: 0, Length: 4 * cluster},
		"write across two":  {Op: block.OpWrite, Offset: cluster - 512, Length: 1024},
	} {
		t.Run(name, func(t *testing.T) {
			if r.Length > 0 {
				r.Mem = []block.IOVec{aio.IOVecOf(buf[:r.Length])}
			}
			a := &again{q: d.Q.(block.Queue), model: r}
			a.run(t, l, 100) // so that lists have their size
			const rounds = 2000
			if got := a.run(t, l, rounds); got > rounds/20 {
				t.Errorf("%d allocations for %d requests", got, rounds)
			}
		})
	}
}
