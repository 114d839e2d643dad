// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/export/vhostblk"
	"github.com/sluice-blk/sluice/internal/node/fault"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/vhostuser"
)

// A pattern must see each way in which a disk can lie.
func TestPatternSeesEveryLie(t *testing.T) {
	const bs = 4096
	p := newPattern(7, 64*bs, bs)
	write := func(block int64) []byte {
		b := make([]byte, bs)
		p.generation[block]++
		p.fill(b, block*bs, p.generation[block])
		return b
	}
	old := write(3)
	now := write(3)
	other := write(4)
	if err := p.check(now, 3*bs); err != nil {
		t.Errorf("the right data: %v", err)
	}
	for name, b := range map[string][]byte{
		"lost write":      old,
		"misplaced write": other,
		"zeros":           make([]byte, bs),
		"torn write":      append(slices.Clone(now[:512]), old[512:]...),
	} {
		if p.check(b, 3*bs) == nil {
			t.Errorf("%s was not seen", name)
		}
	}
	for i := range bs {
		b := slices.Clone(now)
		b[i] ^= 1
		if p.check(b, 3*bs) == nil {
			t.Fatalf("a flipped bit in byte %d was not seen", i)
		}
	}
}

// serve serves node from this process and answers the socket's path.
func serve(t *testing.T, node block.Node, queues int) string {
	t.Helper()
	l, err := aio.NewLoop(nil)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	loopEnded := make(chan error, 1)
	go func() { loopEnded <- l.Run(ctx) }()
	h := block.NewHandle(node, nil)
	dev, err := vhostblk.New(h, &vhostblk.Options{Queues: queues, Loops: []*aio.Loop{l}})
	must(t, err)
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	must(t, err)
	serveCtx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- vhostuser.NewServer(listener, dev, nil).Serve(serveCtx) }()
	t.Cleanup(func() {
		stop()
		must(t, <-served)
		_ = listener.Close() // Serve may have closed it
		must(t, dev.Close())
		must(t, h.Close())
		cancel()
		must(t, <-loopEnded)
	})
	return socket
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func memDisk(t *testing.T) block.Node {
	t.Helper()
	n, err := mem.New(mem.Options{Size: 16 << 20})
	must(t, err)
	return n
}

func TestWorkloadsAgainstADisk(t *testing.T) {
	socket := serve(t, memDisk(t), 4)
	for _, w := range []Workload{
		{RW: "randread"},
		{RW: "read", IODepth: 64},
		{RW: "write", IODepth: 8, Fsync: 4},
		{RW: "randrw", IODepth: 64, NumJobs: 4, Verify: true, Fsync: 16},
		{RW: "randrw", IODepth: 256, Verify: true},
		{RW: "randrw", IODepth: 16, BS: 64 << 10, Verify: true, Batch: 4},
		{RW: "randtrim", IODepth: 4},
		{RW: "randread", IODepth: 4, Poll: true},
		{RW: "randread", IODepth: 32, NoEvent: true},
	} {
		t.Run(w.RW+"/"+w.String(), func(t *testing.T) {
			w.Runtime, w.RampTime = 150*time.Millisecond, 20*time.Millisecond
			r, err := Run(t.Context(), socket, w)
			must(t, err)
			if r.IOs() == 0 || r.Elapsed <= 0 || r.Main().P99 < r.Main().P50 {
				t.Errorf("nothing was measured: %+v", r)
			}
			if w.Verify && r.Verified == 0 {
				t.Error("nothing was verified")
			}
			if w.Fsync > 0 && r.Flushes == 0 {
				t.Error("nothing was flushed")
			}
			if w.Poll && r.Calls != 0 {
				t.Errorf("a polling job was called %d times", r.Calls)
			}
		})
	}
}

// A run fails on whatever a guest would see go wrong.
func TestRunsFailLoudly(t *testing.T) {
	failing, err := fault.New(memDisk(t), "read error=EIO after=100")
	must(t, err)
	_, err = Run(t.Context(), serve(t, failing, 1), Workload{IODepth: 8, Runtime: 20 * time.Second})
	if err == nil || !strings.Contains(err.Error(), "status 1") {
		t.Errorf("an error of the disk: got %v", err)
	}
	hanging, err := fault.New(memDisk(t), "read delay=3s after=100 count=1")
	must(t, err)
	_, err = Run(t.Context(), serve(t, hanging, 1), Workload{Runtime: 20 * time.Second, Hang: 300 * time.Millisecond})
	if err == nil || !strings.Contains(err.Error(), "nothing completed") {
		t.Errorf("a hang: got %v", err)
	}
	socket := serve(t, memDisk(t), 1)
	for name, w := range map[string]Workload{
		"more jobs than queues": {NumJobs: 2},
		"larger than the disk":  {Size: 1 << 40},
		"unknown workload":      {RW: "sideways"},
		"odd block size":        {BS: 1000},
		"depth beyond queues":   {IODepth: 2000},
		"verify of trims":       {RW: "trim", Verify: true},
	} {
		w.Runtime = 10 * time.Millisecond
		if _, err := Run(t.Context(), socket, w); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}

// A server that is not there, and one that serves somebody else, are told within the time that was given.
func TestNobodyAnswers(t *testing.T) {
	w := Workload{Runtime: 10 * time.Millisecond, Connect: 100 * time.Millisecond}
	if _, err := Run(t.Context(), filepath.Join(t.TempDir(), "none"), w); err == nil || !strings.Contains(err.Error(), "connect to") {
		t.Errorf("no socket: %v", err)
	}
	socket := serve(t, memDisk(t), 1)
	first, err := net.Dial("unix", socket)
	must(t, err)
	defer first.Close()
	if _, err := Run(t.Context(), socket, w); err == nil || !strings.Contains(err.Error(), "another front-end") {
		t.Errorf("a busy server: %v", err)
	}
}

func TestResultIsJSONWithFiosNames(t *testing.T) {
	r := Result{Workload: Workload{RW: "randread", BS: 4096}, Elapsed: time.Second, Read: Direction{IOs: 1000, Bytes: 4096000, P50: 5000, P99: 9000},
		Server: &ServerCounters{Requests: 1000, Submissions: 100, Submitted: 1000}}
	var b bytes.Buffer
	must(t, r.WriteJSON(&b))
	var v struct {
		Jobs []struct {
			Read struct {
				IOPS float64 `json:"iops"`
				Clat struct {
					Percentile map[string]float64 `json:"percentile"`
				} `json:"clat_ns"`
			} `json:"read"`
		} `json:"jobs"`
	}
	must(t, json.Unmarshal(b.Bytes(), &v))
	if len(v.Jobs) != 1 || v.Jobs[0].Read.IOPS != 1000 || v.Jobs[0].Read.Clat.Percentile["99.000000"] != 9000 {
		t.Errorf("got %s", b.Bytes())
	}
	if r.Server.PerSubmission() != 10 {
		t.Errorf("%v requests a submission, want 10", r.Server.PerSubmission())
	}
}
