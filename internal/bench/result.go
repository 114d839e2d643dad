// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/sluice-blk/sluice/internal/hist"
)

// Result is what a run measured, seen from the driver.
type Result struct {
	Workload Workload
	Elapsed  time.Duration
	Read     Direction
	Write    Direction
	Trim     Direction
	Flushes  uint64
	Kicks    uint64
	Calls    uint64
	Verified uint64 // blocks read and compared

	DriverCPU time.Duration // of the jobs' threads
	ServerCPU time.Duration // of the server's process in the measured part of the run; 0: not known
	SysCalls  float64       // of the server, counted by the kernel; 0: not counted
	Mallocs   uint64        // of a server in this process, when asked for
	Limits    Limits
	Killed    bool // the server did not end when it was asked to

	driverThreads []time.Duration

	Server *ServerCounters // what our own server counted, where it can be asked
}

// Direction is the figures of reads, writes or trims.
type Direction struct {
	IOs   uint64
	Bytes uint64
	Mean  time.Duration
	Min   time.Duration
	Max   time.Duration
	P50   time.Duration
	P99   time.Duration
	P999  time.Duration
}

// ServerCounters are differences over the run.
type ServerCounters struct {
	Requests      uint64 `json:"requests"`
	Kicks         uint64 `json:"kicks"`
	Notifications uint64 `json:"notifications"`
	Submissions   uint64 `json:"submissions"` // system calls that carried I/O to the kernel
	Submitted     uint64 `json:"submitted"`   // requests in them
	SysCalls      uint64 `json:"syscalls"`    // of the loop: waits and submissions
	Poller        string `json:"poller"`
	Engine        string `json:"engine"`
	// Queues is what each queue counted, in the form in which the server reports it elsewhere.
	Queues any `json:"queues,omitempty"`
}

// PerSubmission is requests a submission, 0 when there was none.
func (c *ServerCounters) PerSubmission() float64 { return ratio(c.Submitted, c.Submissions) }

// PerNotification is requests a notification, 0 when there was none.
func (c *ServerCounters) PerNotification() float64 { return ratio(c.Requests, c.Notifications) }

func ratio(a, b uint64) float64 {
	if b == 0 {
		return 0
	}
	return float64(a) / float64(b)
}

// IOs is the number of reads, writes and trims together.
func (r *Result) IOs() uint64 { return r.Read.IOs + r.Write.IOs + r.Trim.IOs }

// IOPS is requests a second.
func (r *Result) IOPS() float64 {
	if r.Elapsed <= 0 {
		return 0
	}
	return float64(r.IOs()) / r.Elapsed.Seconds()
}

// Main is the direction with the most requests: the one whose latency a table shows.
func (r *Result) Main() *Direction {
	m := &r.Read
	for _, d := range []*Direction{&r.Write, &r.Trim} {
		if d.IOs > m.IOs {
			m = d
		}
	}
	return m
}

// ServerCPUPerIO is microseconds of the server's processor time a request; 0 when it is not known.
func (r *Result) ServerCPUPerIO() float64 {
	if r.IOs() == 0 {
		return 0
	}
	return float64(r.ServerCPU.Nanoseconds()) / 1e3 / float64(r.IOs())
}

// result sums up the jobs.
func (g *guest) result() *Result {
	r := &Result{Workload: *g.w}
	var read, write, trim hist.Hist
	for _, j := range g.jobs {
		o := &j.out
		read.Merge(&o.read)
		write.Merge(&o.write)
		trim.Merge(&o.trim)
		r.Flushes += o.flushes
		r.Kicks += o.kicks
		r.Calls += o.calls
		r.Verified += o.verified
		r.DriverCPU += o.cpu
		r.driverThreads = append(r.driverThreads, o.cpu)
		r.Elapsed = max(r.Elapsed, o.elapsed)
	}
	r.Read = direction(&read, g.w.BS)
	r.Write = direction(&write, g.w.BS)
	r.Trim = direction(&trim, g.w.BS)
	return r
}

func direction(h *hist.Hist, bs int) Direction {
	return Direction{
		IOs: h.Count(), Bytes: h.Count() * uint64(bs), Min: time.Duration(h.Min()), Max: time.Duration(h.Max()),
		Mean: time.Duration(h.Mean()), P50: time.Duration(h.Percentile(50)), P99: time.Duration(h.Percentile(99)),
		P999: time.Duration(h.Percentile(99.9)),
	}
}

// WriteText prints the result for people, in fio's manner.
func (r *Result) WriteText(w io.Writer) {
	fmt.Fprintf(w, "%s: (%.1f s)\n", r.Workload.String(), r.Elapsed.Seconds())
	for _, d := range []struct {
		name string
		*Direction
	}{{"read", &r.Read}, {"write", &r.Write}, {"trim", &r.Trim}} {
		if d.IOs == 0 {
			continue
		}
		fmt.Fprintf(w, "  %s: IOPS=%s, BW=%.1fMiB/s, %d requests\n", d.name, short(float64(d.IOs)/r.Elapsed.Seconds()),
			float64(d.Bytes)/r.Elapsed.Seconds()/(1<<20), d.IOs)
		fmt.Fprintf(w, "    clat (usec): min=%.1f, avg=%.1f, max=%.1f, 50.00th=%.1f, 99.00th=%.1f, 99.90th=%.1f\n",
			us(d.Min), us(d.Mean), us(d.Max), us(d.P50), us(d.P99), us(d.P999))
	}
	if r.Flushes > 0 {
		fmt.Fprintf(w, "  flush: %d\n", r.Flushes)
	}
	fmt.Fprintf(w, "  driver: kicks=%d (%.1f requests each), calls=%d (%.1f each), cpu=%.2f us/request\n",
		r.Kicks, ratio(r.IOs(), r.Kicks), r.Calls, ratio(r.IOs(), r.Calls), ratio(uint64(r.DriverCPU), r.IOs())/1e3)
	if r.ServerCPU > 0 {
		fmt.Fprintf(w, "  server: cpu=%.2f us/request\n", r.ServerCPUPerIO())
	}
	if c := r.Server; c != nil {
		fmt.Fprintf(w, "  server: poller=%s, engine=%s, requests/submission=%.1f, requests/notification=%.1f, system calls/request=%.3f\n",
			c.Poller, c.Engine, c.PerSubmission(), c.PerNotification(), ratio(c.SysCalls, c.Requests))
	}
	if r.Workload.Verify {
		fmt.Fprintf(w, "  verify: %d blocks compared, no difference\n", r.Verified)
	}
}

func us(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// short writes 123456 as fio does: 123k.
func short(v float64) string {
	switch {
	case v >= 1e7:
		return fmt.Sprintf("%.1fM", v/1e6)
	case v >= 1e4:
		return fmt.Sprintf("%.1fk", v/1e3)
	default:
		return fmt.Sprintf("%.0f", v)
	}
}

// WriteJSON prints the result under fio's names, one object.
func (r *Result) WriteJSON(w io.Writer) error {
	side := func(d *Direction) map[string]any {
		return map[string]any{
			"total_ios": d.IOs, "io_bytes": d.Bytes, "iops": perSecond(d.IOs, r.Elapsed), "bw_bytes": perSecond(d.Bytes, r.Elapsed),
			"clat_ns": map[string]any{
				"min": d.Min.Nanoseconds(), "max": d.Max.Nanoseconds(), "mean": d.Mean.Nanoseconds(),
				"percentile": map[string]int64{"50.000000": d.P50.Nanoseconds(), "99.000000": d.P99.Nanoseconds(), "99.900000": d.P999.Nanoseconds()},
			},
		}
	}
	host, _ := os.Hostname()
	job := map[string]any{
		"jobname": r.Workload.RW,
		"job options": map[string]any{
			"rw": r.Workload.RW, "bs": r.Workload.BS, "iodepth": r.Workload.IODepth, "numjobs": r.Workload.NumJobs,
			"runtime": r.Workload.Runtime.Seconds(), "verify": r.Workload.Verify,
		},
		"job_runtime": r.Elapsed.Milliseconds(),
		"read":        side(&r.Read), "write": side(&r.Write), "trim": side(&r.Trim),
		"sync":      map[string]uint64{"total_ios": r.Flushes},
		"kicks":     r.Kicks,
		"calls":     r.Calls,
		"verified":  r.Verified,
		"driver_us": ratio(uint64(r.DriverCPU), r.IOs()) / 1e3,
		"server_us": r.ServerCPUPerIO(),
	}
	if r.Server != nil {
		job["server"] = r.Server
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(map[string]any{"hostname": host, "timestamp": time.Now().Unix(), "jobs": []any{job}})
}

func perSecond(n uint64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return float64(n) / d.Seconds()
}
