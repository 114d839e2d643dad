// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"net"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/export/vhostblk"
	"github.com/sluice-blk/sluice/internal/node/null"
	"github.com/sluice-blk/sluice/internal/vhostuser"
)

// TestMain lets the test binary be the servers that a comparison starts.
func TestMain(m *testing.M) {
	switch mode := os.Getenv("BENCH_TEST_SERVER"); mode {
	case "":
		os.Exit(m.Run())
	case "serve":
		os.Exit(serveUntilSignalled(os.Args[1]))
	default:
		os.Exit(3)
	}
}

func serveUntilSignalled(socket string) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	l, err := aio.NewLoop(nil)
	if err != nil {
		return 1
	}
	go func() { _ = l.Run(context.Background()) }() // it ends with the process
	dev, err := vhostblk.New(block.NewHandle(null.New(null.Options{Size: 1 << 30}), nil), &vhostblk.Options{Loops: []*aio.Loop{l}})
	if err != nil {
		return 1
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return 1
	}
	if vhostuser.NewServer(listener, dev, nil).Serve(ctx) != nil {
		return 1
	}
	return 0
}

func TestCompareIsInterleavedAndSumsUp(t *testing.T) {
	t.Setenv("BENCH_TEST_SERVER", "serve")
	subjects := []Subject{{"one", []string{os.Args[0], "%S"}}, {"two", []string{os.Args[0], "%S"}}}
	var order []string
	c, err := Compare(t.Context(), subjects, Workload{Runtime: 50 * time.Millisecond}, 3, func(s string) { order = append(order, s) })
	must(t, err)
	if len(order) != 6 || !strings.Contains(order[0], "one") || !strings.Contains(order[1], "two") || !strings.Contains(order[2], "one") {
		t.Errorf("not interleaved: %q", order)
	}
	f := c.Figure(0, func(r *Result) float64 { return r.IOPS() })
	if f.Min > f.Median || f.Median > f.Max || f.Min <= 0 {
		t.Errorf("got %+v", f)
	}
	var out bytes.Buffer
	must(t, c.WriteMarkdown(&out, "extra", func(int) string { return "x" }))
	if lines := strings.Count(out.String(), "\n"); lines != 4 {
		t.Errorf("want a head, a rule and two rows:\n%s", out.String())
	}
}

func TestCompareTellsOfAServerThatEnds(t *testing.T) {
	t.Setenv("BENCH_TEST_SERVER", "fail")
	subjects := []Subject{{"broken", []string{os.Args[0], "%S"}}}
	_, err := Compare(t.Context(), subjects, Workload{Runtime: 50 * time.Millisecond}, 1, func(string) {})
	if err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("got %v", err)
	}
	subjects[0].Args[0] = "/nonexistent"
	if _, err := Compare(t.Context(), subjects, Workload{Runtime: 50 * time.Millisecond}, 1, func(string) {}); err == nil {
		t.Error("a program that does not exist was started")
	}
}

func TestFigureOfEvenRuns(t *testing.T) {
	c := &Comparison{Runs: [][]*Result{{{Elapsed: time.Second, Read: Direction{IOs: 1}}, {Elapsed: time.Second, Read: Direction{IOs: 3}}}, nil}}
	f := c.Figure(0, func(r *Result) float64 { return r.IOPS() })
	if f != (Figure{2, 1, 3}) || f.Spread() != 100 {
		t.Errorf("got %+v with a spread of %v", f, f.Spread())
	}
	if (c.Figure(1, func(r *Result) float64 { return r.IOPS() })) != (Figure{}) {
		t.Error("figures of no runs")
	}
}
