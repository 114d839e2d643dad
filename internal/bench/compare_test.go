// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/export/vhostblk"
	"github.com/sluice-blk/sluice/internal/node/null"
	"github.com/sluice-blk/sluice/internal/vhostuser"
)

// TestMain lets the test binary be the servers that a comparison starts, and fio.
func TestMain(m *testing.M) {
	switch mode := os.Getenv("BENCH_TEST_SERVER"); mode {
	case "":
		os.Exit(m.Run())
	case "serve":
		os.Exit(serveUntilSignalled(os.Args[1:]))
	case "stubborn":
		signal.Ignore(syscall.SIGTERM)
		os.Exit(serveUntilSignalled(os.Args[1:]))
	default:
		os.Exit(3)
	}
}

// serveUntilSignalled serves null disks on each argument that is a socket's path, and prints what a server of ours logs
// at its end. With --name it plays fio.
func serveUntilSignalled(args []string) int {
	if strings.HasPrefix(args[0], "--name=") {
		fmt.Print(fioSample)
		return 0
	}
	ctx, stop := context.WithCancel(context.Background())
	if !signal.Ignored(syscall.SIGTERM) {
		ctx, stop = signal.NotifyContext(ctx, syscall.SIGTERM)
	}
	defer stop()
	l, err := aio.NewLoop(nil)
	if err != nil {
		return 1
	}
	go func() { _ = l.Run(context.Background()) }() // it ends with the process
	served := make(chan error)
	n := 0
	for _, socket := range args {
		if !strings.HasSuffix(socket, "sock") && !strings.HasSuffix(socket, "/s") {
			continue
		}
		dev, err := vhostblk.New(block.NewHandle(null.New(null.Options{Size: 1 << 30}), nil), &vhostblk.Options{Loops: []*aio.Loop{l}})
		if err != nil {
			return 1
		}
		listener, err := net.Listen("unix", socket)
		if err != nil {
			return 1
		}
		n++
		go func() { served <- vhostuser.NewServer(listener, dev, nil).Serve(ctx) }()
	}
	for range n {
		if <-served != nil {
			return 1
		}
	}
	fmt.Println(`not a line of the log`)
	fmt.Println(`{"msg":"export served","requests":640,"kicks":20,"notifications":10}`)
	fmt.Println(`{"msg":"loop served","poller":"io_uring","syscalls":22,"submitted":640,"submissions":20}`)
	return 0
}

// playServer makes the test binary, when it is started as a server, behave so.
func playServer(t *testing.T, mode string) {
	t.Helper()
	t.Setenv("BENCH_TEST_SERVER", mode)
	t.Setenv("GORACE", "atexit_sleep_ms=0") // the race detector's reports come at once all the same
}

func testServer(name string, role Role) Subject {
	return Subject{Name: name, Role: role, Args: []string{os.Args[0], "%S"}}
}

const briefly = 40 * time.Millisecond

func TestCompareIsInterleavedAndSumsUp(t *testing.T) {
	playServer(t, "serve")
	e := Experiment{Title: "t", Workload: Workload{Runtime: briefly}, Subjects: []Subject{testServer("one", Ours), testServer("two", Peer)}}
	var order []string
	c, err := Compare(t.Context(), e, Options{Rounds: Rounds{Min: 2, Max: 2}, Progress: func(s string) { order = append(order, s) }})
	must(t, err)
	want := []string{"warm-up: one", "warm-up: two", "round 1: one", "round 1: two", "round 2: two", "round 2: one"}
	if len(order) != len(want) {
		t.Fatalf("got %q, want %q", order, want)
	}
	for i := range want {
		if !strings.Contains(order[i], want[i]) {
			t.Errorf("run %d is %q, want %q", i, order[i], want[i])
		}
	}
	f := c.Figure(0, IOPS)
	if f.Min > f.Median || f.Median > f.Max || f.Min <= 0 || f.N != 2 {
		t.Errorf("got %+v", f)
	}
	if c.Figure(0, CPU).Median <= 0 {
		t.Error("a server that works uses no processor time")
	}
	if r := c.Ratio(0, 1, IOPS); r.N != 2 || r.Low <= 0 || r.Low > r.High || r.Verdict() != "too few rounds for a verdict" {
		t.Errorf("got %+v: %s", r, r.Verdict())
	}
	s := c.Rows[0].Runs[0].Server
	if s == nil || s.PerSubmission() != 32 || s.PerNotification() != 64 || s.Poller != "io_uring" {
		t.Errorf("the counters that the server logged: %+v", s)
	}
	if n, by := c.Rows[0].SysCallsPerIO(); n <= 0 || by != "kernel" && by != "server" {
		t.Errorf("%v system calls a request, counted by %q", n, by)
	}
}

// A run that others disturb is repeated, but not for ever: nothing is as quiet as a bound of next to nothing asks for,
// since this process and the kernel are others, too.
func TestRunsAreRepeatedForQuiet(t *testing.T) {
	playServer(t, "serve")
	old := quietPause
	quietPause = 0
	defer func() { quietPause = old }()
	e := Experiment{Workload: Workload{Runtime: briefly}, Subjects: []Subject{testServer("one", Ours)}}
	c := &comparing{Comparison: &Comparison{Experiment: e, Rows: []Row{{Subject: e.Subjects[0]}}}, dir: t.TempDir(), o: Options{OthersMax: 1e-12}}
	c.Workload.Defaults()
	res, err := c.quiet(t.Context(), &c.Rows[0])
	must(t, err)
	if c.starts > quietTries || c.starts < quietTries && res.Limits.Others > 0 {
		t.Errorf("%d runs, others used %v %%", c.starts, res.Limits.Others)
	}
	before := c.starts
	c.o.OthersMax = 0
	if _, err := c.quiet(t.Context(), &c.Rows[0]); err != nil || c.starts != before+1 {
		t.Errorf("%d runs where nobody asks for quiet: %v", c.starts-before, err)
	}
}

// With rounds left to the spread, a comparison of one subject with itself ends at the limit or alike, and never before
// there are enough for a verdict.
func TestCompareGoesOnUntilItIsDecided(t *testing.T) {
	playServer(t, "serve")
	e := Experiment{Workload: Workload{Runtime: time.Millisecond}, Subjects: []Subject{testServer("one", Ours), testServer("two", Peer)}}
	c, err := Compare(t.Context(), e, Options{Rounds: Rounds{Min: MinRounds, Max: MinRounds + 1}})
	must(t, err)
	if c.Rounds < MinRounds || c.Rounds > MinRounds+1 {
		t.Errorf("%d rounds", c.Rounds)
	}
	e.Bounds = []Bound{{IOPS, Peer, 1e-9}} // nobody can miss it: the first rounds decide
	c, err = Compare(t.Context(), e, Options{Rounds: Rounds{Min: MinRounds, Max: 50}})
	must(t, err)
	if c.Rounds != MinRounds {
		t.Errorf("%d rounds for what %d decide", c.Rounds, MinRounds)
	}
}

func TestCompareTellsOfAServerThatEnds(t *testing.T) {
	playServer(t, "fail")
	e := Experiment{Workload: Workload{Runtime: briefly}, Subjects: []Subject{testServer("broken", Ours)}}
	o := Options{Rounds: Rounds{Min: 1, Max: 1}}
	_, err := Compare(t.Context(), e, o)
	if err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "broken") {
		t.Errorf("got %v", err)
	}
	e.Subjects[0].Args[0] = "/nonexistent"
	if _, err := Compare(t.Context(), e, o); err == nil {
		t.Error("a program that does not exist was started")
	}
	e.Subjects[0].Role = Direct
	if _, err := Compare(t.Context(), e, o); err == nil {
		t.Error("a fio that does not exist was started")
	}
}

// A peer that does not end is killed, and told of; of ours it is a failure.
func TestServersThatDoNotEnd(t *testing.T) {
	playServer(t, "stubborn")
	old := serverEndMax
	serverEndMax = 100 * time.Millisecond
	defer func() { serverEndMax = old }()
	e := Experiment{Workload: Workload{Runtime: time.Millisecond}, Subjects: []Subject{testServer("theirs", Peer)}}
	c, err := Compare(t.Context(), e, Options{Rounds: Rounds{Min: 1, Max: 1}})
	must(t, err)
	if lines := strings.Join(c.verdicts(), "\n"); !strings.Contains(lines, "theirs: did not end at SIGTERM in 1 of 1 rounds") {
		t.Errorf("it is not told of: %q", lines)
	}
	e.Subjects[0].Role = Ours
	if _, err := Compare(t.Context(), e, Options{Rounds: Rounds{Min: 1, Max: 1}}); err == nil || !strings.Contains(err.Error(), "SIGTERM") {
		t.Errorf("got %v", err)
	}
}

func TestCompareMeasuresFio(t *testing.T) {
	playServer(t, "serve")
	w := Workload{IODepth: 64, Runtime: briefly}
	w.Defaults()
	fios := Fios(os.Args[0], &w)
	if len(fios) != 4 {
		t.Fatalf("want both engines, one by one and in batches: %+v", fios)
	}
	e := Experiment{Workload: w, Subjects: []Subject{fios[1].Subject(Medium{Path: "/x"}, &w)}}
	c, err := Compare(t.Context(), e, Options{Rounds: Rounds{Min: 1, Max: 1}})
	must(t, err)
	// 530972 requests in 1.001 s; 40 % user and 60 % system of one second.
	if got := c.Figure(0, IOPS).Median; distance(got, 530441) > 1 {
		t.Errorf("%v requests a second", got)
	}
	if got := c.Figure(0, CPU).Median; distance(got, 1e6/530972) > 0.001 {
		t.Errorf("%v us a request", got)
	}
	if got := c.Figure(0, P999).Median; distance(got, 978.944) > 0.001 {
		t.Errorf("99.9 %% below %v us", got)
	}
}

const fioSample = `fio: a warning
{"jobs": [{"error": 0, "job_runtime": 1000, "usr_cpu": 40.0, "sys_cpu": 60.0,
  "read": {"io_bytes": 2174861312, "runtime": 1001, "total_ios": 530972,
    "clat_ns": {"min": 13641, "max": 3053777, "mean": 110185.8, "percentile": {"50.000000": 107008, "99.000000": 264192, "99.900000": 978944}}},
  "write": {"total_ios": 0}, "trim": {"total_ios": 0}}]}
`

func TestFioThatFailsIsAnError(t *testing.T) {
	for name, text := range map[string]string{
		"nothing":  "",
		"no jobs":  `{"jobs": []}`,
		"an error": `{"jobs": [{"error": 5}]}`,
		"no work":  `{"jobs": [{"job_runtime": 1000}]}`,
	} {
		if _, err := parseFio([]byte(text), Workload{}); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestIdleDisksAndAttach(t *testing.T) {
	playServer(t, "serve")
	c, err := MeasureIdle(t.Context(), os.Args[0], t.TempDir(), 3, briefly)
	must(t, err)
	if c.Disks != 3 || c.CPUPercent < 0 || c.CPUPercent > 300 {
		t.Errorf("got %+v", c)
	}
	took, err := MeasureAttach(t.Context(), testServer("one", Ours), 64<<20)
	must(t, err)
	if took <= 0 {
		t.Errorf("it took %v", took)
	}
	playServer(t, "fail")
	if _, err := MeasureIdle(t.Context(), os.Args[0], t.TempDir(), 1, briefly); err == nil {
		t.Error("a server that ends is idle")
	}
	if _, err := MeasureAttach(t.Context(), testServer("one", Ours), 64<<20); err == nil {
		t.Error("a server that ends took memory")
	}
}

// Where the kernel does not let anybody count system calls, our own count stands in, marked.
func TestSysCallsWithoutTheKernel(t *testing.T) {
	playServer(t, "serve")
	old := sysCallTracepoint
	sysCallTracepoint = filepath.Join(t.TempDir(), "none")
	defer func() { sysCallTracepoint = old }()
	e := Experiment{Workload: Workload{Runtime: time.Millisecond}, Subjects: []Subject{testServer("one", Ours)}}
	c, err := Compare(t.Context(), e, Options{Rounds: Rounds{Min: 1, Max: 1}})
	must(t, err)
	if n, by := c.Rows[0].SysCallsPerIO(); by != "server" || n != 32.0/640 {
		t.Errorf("%v counted by %q", n, by)
	}
	if !strings.Contains(sysCallText(&c.Rows[0]), "own count") {
		t.Error("the table does not say who counted")
	}
}
