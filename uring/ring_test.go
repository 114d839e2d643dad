// SPDX-License-Identifier: Apache-2.0

//go:build linux

// The goal of the tests of this package: every call does what its comment says on the running kernel, whichever that is.
// The method: the real kernel wherever it can be brought to answer so, the Enter seam where it cannot. What the running
// kernel lacks is skipped with the reason. They need no network and nothing writable but the temporary directory.
package uring

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/sluice-blk/sluice/internal/sys"
)

// patience is how long a test waits for what must come. It is never waited for when all is well.
const patience = 60 * time.Second

func TestMain(m *testing.M) {
	startPoller()
	before := openFDs()
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			os.Stderr.WriteString(err.Error() + "\n")
			code = 1
		}
		if after := openFDs(); len(after) > len(before) {
			os.Stderr.WriteString("descriptors leaked: " + strings.Join(after, ", ") + "\n")
			code = 1
		}
	}
	os.Exit(code)
}

// startPoller makes the Go runtime open the descriptors that it keeps for good.
func startPoller() {
	if r, w, err := os.Pipe(); err == nil {
		r.Close()
		w.Close()
	}
}

// openFDs lists the process's open descriptors; it is empty where /proc is not mounted.
func openFDs() []string {
	dir, _ := os.ReadDir("/proc/self/fd")
	var open []string
	for _, e := range dir {
		// What is gone already was the descriptor of the directory itself.
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil {
			open = append(open, e.Name()+" "+target)
		}
	}
	return open
}

// newTestRing makes a ring on a locked thread and closes it when the test ends. A kernel without io_uring, or without
// what o asks for, skips the test.
func newTestRing(t testing.TB, entries uint32, o *Options) *Ring {
	t.Helper()
	runtime.LockOSThread()
	r, err := New(entries, o)
	if err != nil {
		runtime.UnlockOSThread()
		var flags SetupFlags
		if o != nil {
			flags = o.flags()
		}
		skipIfMissing(t, err, flags)
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		runtime.UnlockOSThread()
	})
	return r
}

// flagsSince tells which kernel brought the youngest of the set-up flags.
func flagsSince(f SetupFlags) string {
	switch {
	case f&SetupNoSQArray != 0:
		return "6.6"
	case f&SetupDeferTaskrun != 0:
		return "6.1"
	case f&SetupSingleIssuer != 0:
		return "6.0"
	case f&(SetupCoopTaskrun|SetupTaskrunFlag|SetupSQE128|SetupCQE32) != 0:
		return "5.19"
	case f&SetupSubmitAll != 0:
		return "5.18"
	}
	return "5.10"
}

// skipIfMissing skips the test if err, of a set-up with flags, says that this kernel does not have what was asked for.
func skipIfMissing(t testing.TB, err error, flags SetupFlags) {
	t.Helper()
	switch {
	case errors.Is(err, syscall.ENOSYS), errors.Is(err, syscall.EPERM):
		t.Skipf("needs io_uring, which this system does not offer: %v", err)
	case errors.Is(err, syscall.EINVAL):
		missing(t, "set-up flags "+flags.String(), flagsSince(flags))
	}
}

// missing skips the test because the kernel lacks something that came with Linux since. A kernel that is not older does
// not lack it: then the test fails.
func missing(t testing.TB, what, since string) {
	t.Helper()
	_, release, _, _, err := sys.Uname()
	if err != nil {
		t.Fatal(err)
	}
	if kernelNumber(t, release) >= kernelNumber(t, since) {
		t.Fatalf("no %s on Linux %s, which has it since %s", what, release, since)
	}
	t.Skipf("needs %s of Linux %s", what, since)
}

// kernelNumber makes the first two parts of a kernel's version comparable.
func kernelNumber(t testing.TB, version string) int {
	t.Helper()
	var major, minor int
	if _, err := fmt.Sscanf(version, "%d.%d", &major, &minor); err != nil {
		t.Fatalf("kernel version %q: %v", version, err)
	}
	return major*1000 + minor
}

// needOp skips the test if the kernel lacks an operation.
func needOp(t testing.TB, r *Ring, op uint8, since string) {
	t.Helper()
	p, err := r.Probe()
	if err != nil {
		t.Fatal(err)
	}
	if !p.Supports(op) {
		missing(t, fmt.Sprintf("operation %d", op), since)
	}
}

// sqe takes an entry that must be there.
func sqe(t testing.TB, r *Ring) *SQE {
	t.Helper()
	s := r.GetSQE()
	if s == nil {
		t.Fatal("submission queue is full")
	}
	return s
}

// wait submits and collects n completions.
func wait(t testing.TB, r *Ring, n int) []CQE {
	t.Helper()
	deadline := time.Now().Add(patience)
	got := make([]CQE, 0, n)
	var buf [64]CQE
	for len(got) < n {
		if _, err := r.SubmitAndWait(1, patience); err != nil && !errors.Is(err, syscall.EINTR) {
			t.Fatalf("wait for completion %d of %d: %v (%d entries pending, %d completions ready, flags %#x)", len(got)+1, n, err,
				r.SQPending(), r.CQReady(), *r.sq.flags)
		}
		got = append(got, buf[:r.Reap(buf[:min(len(buf), n-len(got))])]...)
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d completions after %v", len(got), n, patience)
		}
	}
	return got
}

// one submits what is queued and returns the one completion, which must carry userData.
func one(t testing.TB, r *Ring, userData uint64) CQE {
	t.Helper()
	c := wait(t, r, 1)[0]
	if c.UserData != userData {
		t.Fatalf("completion of request %d, want %d", c.UserData, userData)
	}
	return c
}

// run submits one request and returns its completion.
func run(t testing.TB, r *Ring, prep func(*SQE)) CQE {
	t.Helper()
	s := sqe(t, r)
	prep(s)
	s.UserData = 4711
	return one(t, r, 4711)
}

// must is run of a request that must give res.
func must(t testing.TB, r *Ring, what string, res int32, prep func(*SQE)) {
	t.Helper()
	if c := run(t, r, prep); c.Res != res {
		t.Fatalf("%s: result %d (%v), want %d", what, c.Res, c.Err(), res)
	}
}

// fails is run of a request that must fail with errno.
func fails(t testing.TB, r *Ring, what string, errno syscall.Errno, prep func(*SQE)) {
	t.Helper()
	must(t, r, what, -int32(errno), prep)
}

// byUserData sorts completions into a map; two of one request fail the test.
func byUserData(t testing.TB, cs []CQE) map[uint64]CQE {
	t.Helper()
	m := make(map[uint64]CQE, len(cs))
	for _, c := range cs {
		if _, twice := m[c.UserData]; twice {
			t.Fatalf("request %d completed twice", c.UserData)
		}
		m[c.UserData] = c
	}
	return m
}

// wantRes checks the result of one request among several.
func wantRes(t testing.TB, m map[uint64]CQE, userData uint64, res int32) {
	t.Helper()
	if c, ok := m[userData]; !ok || c.Res != res {
		t.Errorf("request %d: result %d (%v, completed: %t), want %d", userData, c.Res, c.Err(), ok, res)
	}
}

// quiet checks that no completion is there or comes by getting events.
func quiet(t testing.TB, r *Ring) {
	t.Helper()
	if _, err := r.SubmitAndGetEvents(); err != nil {
		t.Fatal(err)
	}
	if c := r.PeekCQE(); c != nil {
		t.Fatalf("unexpected completion %+v", *c)
	}
}

// pipe makes a pipe of blocking descriptors that live as long as the test.
func pipe(t testing.TB) (r, w int) {
	t.Helper()
	var p [2]int
	if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		syscall.Close(p[0])
		syscall.Close(p[1])
	})
	return p[0], p[1]
}

// put writes to a descriptor behind the ring's back.
func put(t testing.TB, fd int, text string) {
	t.Helper()
	if n, err := syscall.Write(fd, []byte(text)); n != len(text) {
		t.Fatalf("wrote %d bytes: %v", n, err)
	}
}

// tempFile makes a file with content and returns its descriptor and path.
func tempFile(t testing.TB, content string) (int, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	fd, err := syscall.Open(path, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	return fd, path
}

// forEachKind runs f on a ring of each kind whose code paths differ.
func forEachKind(t *testing.T, f func(t *testing.T, r *Ring)) {
	for _, k := range []struct {
		name string
		o    Options
	}{
		{"plain", Options{}},
		{"no_sqarray", Options{NoSQArray: true}},
		{"coop", Options{CoopTaskrun: true, TaskrunFlag: true}},
		{"defer", Options{SingleIssuer: true, DeferTaskrun: true, TaskrunFlag: true, SubmitAll: true}},
		{"sqe128_cqe32", Options{SQE128: true, CQE32: true}},
		{"sqpoll", Options{SQPoll: true, SQPollIdle: 10 * time.Millisecond}},
	} {
		t.Run(k.name, func(t *testing.T) { f(t, newTestRing(t, 8, &k.o)) })
	}
	t.Run("without_ext_arg", func(t *testing.T) {
		r := newTestRing(t, 8, nil)
		r.extArg = false // as on 5.10
		f(t, r)
	})
	t.Run("registered_fd", func(t *testing.T) {
		r := newTestRing(t, 8, nil)
		if err := r.RegisterRingFD(); err != nil {
			if errors.Is(err, syscall.EINVAL) {
				missing(t, "registered rings", "5.18")
			}
			t.Fatal(err)
		}
		f(t, r)
	})
}

func TestEveryRequestCompletesOnceInAllKindsOfRings(t *testing.T) {
	forEachKind(t, func(t *testing.T, r *Ring) {
		const total = 1000 // wraps the 8 entries many times
		seen := make([]int, total)
		for next, done := 0, 0; done < total; {
			for ; next < total && next-done < int(r.CQEntries()); next++ {
				s := r.GetSQE()
				if s == nil {
					break
				}
				s.PrepNop()
				s.UserData = uint64(next)
			}
			if next == done { // SQPOLL: the last completion was here before the places were given back
				if err := r.WaitSQ(); err != nil && !errors.Is(err, syscall.EINTR) {
					t.Fatal(err)
				}
				continue
			}
			for _, c := range wait(t, r, 1) {
				if c.Res != 0 {
					t.Fatalf("NOP %d gave %v", c.UserData, c.Err())
				}
				seen[c.UserData]++
				done++
			}
		}
		for i, n := range seen {
			if n != 1 {
				t.Errorf("request %d completed %d times", i, n)
			}
		}
		// SQPOLL: the kernel gives the places of a batch back behind its completions.
		for deadline := time.Now().Add(patience); r.SQPending() != 0 && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond)
		}
		if r.SQPending() != 0 || r.CQReady() != 0 {
			t.Errorf("%d entries and %d completions left over", r.SQPending(), r.CQReady())
		}
	})
}
