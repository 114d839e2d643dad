// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-blk/sluice/internal/sys"
)

// Observation says what a run watches besides the answers. The zero value watches the processor time of the server's
// process and of its threads.
type Observation struct {
	// Device is the directory below /sys/dev/block of the device under the served file; empty: none is watched.
	Device string
	// SysCalls counts the server's system calls with the kernel's own tracepoint. That slows the server, so the times of
	// such a run are worth nothing.
	SysCalls bool
	// Mallocs counts the allocations of this process, for a server that runs in it.
	Mallocs bool
}

// observer watches a server's process and the machine over the measured part of a run.
type observer struct {
	what     Observation
	pid      int
	counters []int // descriptors, one a thread
	before   reading
	after    reading
}

// reading is what the kernel tells at one moment.
type reading struct {
	at       time.Time
	cpu      time.Duration
	threads  map[int]time.Duration
	machine  machineTimes
	device   deviceTimes
	sysCalls uint64
	mallocs  uint64
}

// watch takes readings when the measured part begins and ends. What it answers is called when the jobs have ended, with
// the processor time of their threads, and books what was seen.
func (g *guest) watch(ctx context.Context, what Observation) func(*Result) {
	o := &observer{what: what, pid: g.serverPID()}
	done := make(chan struct{})
	go func() {
		defer close(done)
		sleep(ctx, g.w.RampTime)
		o.begin()
		sleep(ctx, g.w.Runtime)
		o.end()
	}()
	return func(r *Result) {
		<-done
		o.book(r)
	}
}

func (o *observer) ours() bool { return o.pid == os.Getpid() }

func (o *observer) begin() {
	if o.what.SysCalls && o.pid > 0 {
		o.counters = openSysCallCounters(o.pid)
	}
	o.before = o.read()
	if o.what.Mallocs && o.ours() {
		o.before.mallocs = mallocs()
	}
}

func (o *observer) end() {
	var m uint64
	if o.what.Mallocs && o.ours() {
		m = mallocs() // before the reading, which allocates
	}
	o.after = o.read()
	o.after.mallocs = m
	for _, fd := range o.counters {
		_ = sys.Close(fd) // it was read
	}
}

func mallocs() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.Mallocs
}

func (o *observer) read() reading {
	r := reading{at: time.Now(), machine: readMachine("/proc/stat"), device: readDevice(o.what.Device)}
	switch {
	case o.pid <= 0:
	case o.ours():
		r.cpu = sys.ProcessCPU()
	default:
		r.cpu, r.threads = sys.ProcessCPUOf(o.pid), threadCPU(o.pid)
	}
	for _, fd := range o.counters {
		n, err := sys.PerfEventCount(fd)
		if err == nil {
			r.sysCalls += n
		}
	}
	return r
}

// book adds what was seen to the result, which knows already what the jobs used.
func (o *observer) book(r *Result) {
	window := o.after.at.Sub(o.before.at)
	r.ServerCPU = o.after.cpu - o.before.cpu
	if o.ours() {
		r.ServerCPU -= r.DriverCPU
	}
	r.ServerCPU = max(r.ServerCPU, 0)
	if len(o.counters) > 0 {
		r.SysCalls = perSecond(o.after.sysCalls-o.before.sysCalls, window) * r.Elapsed.Seconds()
	}
	r.Mallocs = o.after.mallocs - o.before.mallocs
	r.Limits = limits(&o.before, &o.after, window)
	r.Limits.DriverThread = busiest(r.driverThreads, r.Elapsed)
	r.Limits.others(r.ServerCPU+r.DriverCPU, r.Elapsed)
}

// sysCallTracepoint is passed by each system call of each thread. The directory is root's.
var sysCallTracepoint = "/sys/kernel/tracing/events/raw_syscalls/sys_enter/id"

// openSysCallCounters counts for each thread of a process and those that they start. It answers none where the machine
// does not allow it.
func openSysCallCounters(pid int) (fds []int) {
	b, err := os.ReadFile(sysCallTracepoint)
	if err != nil {
		return nil
	}
	id, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return nil
	}
	for _, tid := range threads(pid) {
		if fd, err := sys.PerfEventTracepoint(id, tid); err == nil {
			fds = append(fds, fd)
		}
	}
	return fds
}

func taskDir(pid int) string { return "/proc/" + strconv.Itoa(pid) + "/task/" }

func threads(pid int) (tids []int) {
	entries, err := os.ReadDir(taskDir(pid))
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if tid, err := strconv.Atoi(e.Name()); err == nil {
			tids = append(tids, tid)
		}
	}
	return tids
}

// threadCPU is what the scheduler knows of each thread; nothing on a kernel without CONFIG_SCHED_INFO.
func threadCPU(pid int) map[int]time.Duration {
	m := make(map[int]time.Duration)
	for _, tid := range threads(pid) {
		b, err := os.ReadFile(taskDir(pid) + strconv.Itoa(tid) + "/schedstat")
		if err != nil {
			continue // the thread ended
		}
		if ns, _, ok := strings.Cut(string(b), " "); ok {
			n, _ := strconv.ParseInt(ns, 10, 64)
			m[tid] = time.Duration(n)
		}
	}
	return m
}

// workerCPU is the time of the threads that the kernel has made for a process's rings.
func workerCPU(pid int) (sum time.Duration) {
	for tid, cpu := range threadCPU(pid) {
		if strings.HasPrefix(text(taskDir(pid)+strconv.Itoa(tid)+"/comm"), "iou-") {
			sum += cpu
		}
	}
	return sum
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
