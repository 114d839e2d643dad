// SPDX-License-Identifier: Apache-2.0

package vhostblk

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/fault"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/virtqtest"
)

// recorder is a node that writes down what reaches it.
type recorder struct {
	block.Node
	change func(*block.Info)

	mu   sync.Mutex
	seen []string
}

type recorderQueue struct {
	block.Queue
	r *recorder
}

func (r *recorder) Info() block.Info {
	i := r.Node.Info()
	if r.change != nil {
		r.change(&i)
	}
	return i
}

func (r *recorder) Queue(l *aio.Loop) (block.Queue, error) {
	q, err := r.Node.Queue(l)
	return &recorderQueue{q, r}, err
}

func (q *recorderQueue) Submit(r *block.Request) {
	q.r.mu.Lock()
	q.r.seen = append(q.r.seen, fmt.Sprintf("%v %d+%d", r.Op, r.Offset>>9, r.Length>>9))
	q.r.mu.Unlock()
	q.Queue.Submit(r)
}

func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	seen := r.seen
	r.seen = nil
	return seen
}

// piece is one request of a batch, in sectors.
type piece struct {
	kind   virtioblk.RequestType
	sector uint64
	count  int
}

func reads(sector uint64, count, n int) []piece {
	return sequence(virtioblk.TypeIn, sector, count, n)
}

func sequence(kind virtioblk.RequestType, sector uint64, count, n int) []piece {
	var p []piece
	for i := range n {
		p = append(p, piece{kind, sector + uint64(i*count), count})
	}
	return p
}

// batch sends pieces by one kick, waits for all, and answers their requests.
func (q *rigQueue) batch(pieces []piece) []*request {
	q.rig.t.Helper()
	var reqs []*request
	for i, p := range pieces {
		req := q.rig.standard(p.kind, p.sector, 512*p.count)
		if p.kind == virtioblk.TypeOut {
			fillData(req, i)
		}
		q.add(req)
		reqs = append(reqs, req)
	}
	q.ring()
	for q.d.Out() > 0 {
		q.next()
	}
	return reqs
}

// takesAll has the queue take its next batch in one look, however long it is.
func (q *rigQueue) takesAll() {
	q.rig.t.Helper()
	must(q.rig.t, q.rig.loop.Call(context.Background(), func() error {
		q.rig.dev.queues[q.index].share = turnShare
		return nil
	}))
}

func fillData(req *request, seed int) {
	for i := range req.data.Bytes {
		req.data.Bytes[i] = byte(seed*31 + i>>9 + 1)
	}
}

// Goal: what is merged, and what is not. Method: batches of one kick, and the requests that reach the disk.
func TestNeighboursGoOutTogether(t *testing.T) {
	const in, out, flush = virtioblk.TypeIn, virtioblk.TypeOut, virtioblk.TypeFlush
	two := []piece{{in, 0, 8}, {in, 1000, 8}, {in, 8, 8}, {in, 1008, 8}}
	for _, c := range []struct {
		name   string
		pieces []piece
		change func(*block.Info)
		off    bool
		want   []string
	}{
		{name: "reads in order", pieces: reads(0, 8, 8), want: []string{"read 0+64"}},
		{name: "writes in order", pieces: sequence(out, 16, 8, 4), want: []string{"write 16+32"}},
		{name: "switched off", pieces: reads(0, 8, 3), off: true, want: []string{"read 0+8", "read 8+8", "read 16+8"}},
		{name: "one alone", pieces: reads(0, 8, 1), want: []string{"read 0+8"}},
		{name: "a gap", pieces: []piece{{in, 0, 8}, {in, 9, 8}}, want: []string{"read 0+8", "read 9+8"}},
		{name: "backwards", pieces: []piece{{in, 8, 8}, {in, 0, 8}}, want: []string{"read 8+8", "read 0+8"}},
		{name: "two streams", pieces: two, want: []string{"read 0+16", "read 1000+16"}},
		{name: "a read beside a write", pieces: []piece{{in, 0, 8}, {out, 8, 8}}, want: []string{"read 0+8", "write 8+8"}},
		{name: "a flush between", pieces: []piece{{out, 0, 8}, {flush, 0, 0}, {out, 8, 8}}, want: []string{"write 0+8", "flush 0+0", "write 8+8"}},
		{name: "a flush behind", pieces: []piece{{out, 0, 8}, {out, 8, 8}, {flush, 0, 0}}, want: []string{"write 0+16", "flush 0+0"}},
		{name: "more than a merged request may hold", pieces: reads(0, 128, 3), want: []string{"read 0+256", "read 256+128"}},
		{name: "more segments than one may have", pieces: reads(0, 1, mergeSegments+1), want: []string{"read 0+64", "read 64+1"}},
		{name: "more streams than are followed", pieces: []piece{{in, 0, 8}, {in, 100, 8}, {in, 200, 8}, {in, 300, 8}, {in, 400, 8}, {in, 8, 8}, {in, 408, 8}},
			want: []string{"read 0+8", "read 100+8", "read 200+8", "read 300+8", "read 400+16", "read 8+8"}},
		{name: "a write over an open one", pieces: []piece{{out, 0, 8}, {out, 4, 8}, {out, 12, 8}}, want: []string{"write 0+8", "write 4+16"}},
		{name: "a write that would pass one before it", pieces: []piece{{out, 0, 8}, {out, 12, 8}, {out, 8, 8}}, want: []string{"write 12+8", "write 0+16"}},
		{name: "a read that would pass a write", pieces: []piece{{in, 0, 8}, {out, 12, 8}, {in, 8, 8}}, want: []string{"write 12+8", "read 0+16"}},
		{name: "reads that overlap", pieces: []piece{{in, 0, 8}, {in, 4, 8}, {in, 8, 8}}, want: []string{"read 0+16", "read 4+8"}},
		{name: "the disk's longest transfer", pieces: reads(0, 8, 4), change: func(i *block.Info) { i.MaxTransfer = 8192 }, want: []string{"read 0+16", "read 16+16"}},
		{name: "the disk's most segments", pieces: reads(0, 8, 4), change: func(i *block.Info) { i.MaxSegments = 2 }, want: []string{"read 0+16", "read 16+16"}},
		{name: "what the disk carries by way of other memory", pieces: reads(0, 1, 2), change: func(i *block.Info) { i.Align = 4096 }, want: []string{"read 0+8", "read 0+8"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := &recorder{Node: memDisk(t, mem.Options{}), change: c.change}
			r := newRig(t, n, rigOptions{noMerge: c.off})
			r.queues[0].takesAll()
			for i, req := range r.queues[0].batch(c.pieces) {
				if s := virtioblk.Status(req.status.Bytes[0]); s != virtioblk.StatusOK {
					t.Errorf("request %d: status %d", i, s)
				}
			}
			if got := n.take(); !slices.Equal(got, c.want) {
				t.Errorf("the disk saw %q, want %q", got, c.want)
			}
		})
	}
}

// Goal: each part of a merged request has an outcome of its own. Method: one bad sector in the middle of 16 writes and of
// 16 reads that go out as one.
func TestOneBadSectorFailsOneRequest(t *testing.T) {
	const bad = 7
	for _, kind := range []virtioblk.RequestType{virtioblk.TypeOut, virtioblk.TypeIn} {
		n, err := fault.New(memDisk(t, mem.Options{}), fmt.Sprintf("any %d-%d error=EIO", bad*4096+512, bad*4096+1023))
		must(t, err)
		r := newRig(t, n, rigOptions{})
		q := r.queues[0]
		for i, req := range q.batch(sequence(kind, 0, 8, 16)) {
			want := virtioblk.StatusOK
			if i == bad {
				want = virtioblk.StatusIOErr
			}
			if got := virtioblk.Status(req.status.Bytes[0]); got != want {
				t.Errorf("type %d, request %d: status %d, want %d", kind, i, got, want)
			}
		}
		s, err := r.dev.Stats(t.Context())
		must(t, err)
		if s.Merges != 1 || s.Merged != 16 || s.MergesFailed != 1 || s.Errors != 1 {
			t.Errorf("type %d: %d merges of %d requests, %d failed, %d errors; want 1 of 16, 1, 1", kind, s.Merges, s.Merged, s.MergesFailed, s.Errors)
		}
		if kind == virtioblk.TypeOut {
			checkWritten(t, q, bad)
		}
	}
}

// checkWritten reads back what sixteen writes of eight sectors stored, all but one.
func checkWritten(t *testing.T, q *rigQueue, bad int) {
	t.Helper()
	for i := range 16 {
		if i == bad {
			continue
		}
		req := q.rig.standard(virtioblk.TypeIn, uint64(8*i), 4096)
		if status, _ := q.do(req); status != virtioblk.StatusOK {
			t.Fatalf("read %d back: status %d", i, status)
		}
		want := &request{data: virtqtest.Buffer{Bytes: make([]byte, 4096)}}
		fillData(want, i)
		if !bytes.Equal(req.data.Bytes, want.data.Bytes) {
			t.Errorf("what write %d stored is not there", i)
		}
	}
}

// Goal: merging changes nothing that a guest could see, with overlapping requests of one batch taken in their order.
// Method: random batches of short reads and writes on few sectors, against a copy of the disk that does them one by one.
// With a bad sector, which merging must not spread, outcomes alone are compared: a part that is sent again may be passed.
func TestMergedBatchesAreLikeSingleRequests(t *testing.T) {
	const sectors, rounds, bad = 64, 150, 39
	for _, text := range []string{"", fmt.Sprintf("any %d error=EIO", bad*512)} {
		t.Run("fault "+text, func(t *testing.T) {
			n, err := fault.New(memDisk(t, mem.Options{}), text)
			must(t, err)
			r := newRig(t, n, rigOptions{})
			q := r.queues[0]
			disk := make([]byte, sectors*512)
			rnd := rand.New(rand.NewPCG(1, 2))
			for round := range rounds {
				pieces := randomPieces(rnd, sectors)
				for i, req := range q.batch(pieces) {
					p := pieces[i]
					at := disk[p.sector*512 : p.sector*512+uint64(p.count)*512]
					fails := text != "" && p.sector <= bad && p.sector+uint64(p.count) > bad
					if got := virtioblk.Status(req.status.Bytes[0]) != virtioblk.StatusOK; got != fails {
						t.Fatalf("round %d, request %d %v: failed %v, want %v", round, i, p, got, fails)
					}
					if p.kind == virtioblk.TypeOut {
						copy(at, req.data.Bytes)
					} else if text == "" && !bytes.Equal(at, req.data.Bytes) {
						t.Fatalf("round %d, request %d %v read something else", round, i, p)
					}
				}
				if text == "" {
					q.checkDisk(disk)
				}
			}
			s, err := r.dev.Stats(t.Context())
			must(t, err)
			if s.Merges < rounds || (s.MergesFailed > 0) != (text != "") {
				t.Errorf("%d merges, of which %d failed", s.Merges, s.MergesFailed)
			}
		})
	}
}

// randomPieces is a batch in which two of three requests go on where the last one ended.
func randomPieces(rnd *rand.Rand, sectors int) []piece {
	var pieces []piece
	next := 0
	for range 1 + rnd.IntN(24) {
		p := piece{kind: virtioblk.TypeIn, count: 1 + rnd.IntN(4)}
		if rnd.IntN(3) == 0 {
			next = rnd.IntN(sectors)
		}
		if rnd.IntN(2) == 0 {
			p.kind = virtioblk.TypeOut
		}
		next = min(next, sectors-p.count)
		p.sector = uint64(next)
		next += p.count
		pieces = append(pieces, p)
	}
	return pieces
}

func (q *rigQueue) checkDisk(want []byte) {
	q.rig.t.Helper()
	req := q.rig.standard(virtioblk.TypeIn, 0, len(want))
	if status, _ := q.do(req); status != virtioblk.StatusOK || !bytes.Equal(req.data.Bytes, want) {
		q.rig.t.Fatalf("the disk holds something else (status %d)", status)
	}
}

// BenchmarkMerger tells what looking for neighbours costs a request: at random, where there are none, and in order.
func BenchmarkMerger(b *testing.B) {
	for _, random := range []bool{true, false} {
		b.Run(fmt.Sprintf("random=%v", random), func(b *testing.B) {
			const depth = 64
			q := &queue{}
			q.dev = &Device{capacity: 1 << 40}
			m := newMerger(block.Info{})
			slots := make([]slot, depth)
			rnd := rand.New(rand.NewPCG(1, 2))
			for i := range slots {
				slots[i].init(q)
				slots[i].kind, slots[i].length, slots[i].offset = virtioblk.TypeIn, 4096, int64(i)*4096
				slots[i].data = slots[i].inline[:1]
				if random {
					slots[i].offset = rnd.Int64N(1<<28) * 4096
				}
			}
			for b.Loop() {
				for i := range slots {
					m.runs[m.next].list = slotList{} // closed, without a disk
					m.add(&slots[i])
				}
				m.runs = [mergeRuns]run{}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/depth, "ns/request")
		})
	}
}
