// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/sluice-blk/sluice/internal/daemon"
	"github.com/sluice-blk/sluice/internal/export/vhostblk"
)

func writeStatus(out io.Writer, s *daemon.Status) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "process %d, up %v\n", s.PID, time.Duration(s.UptimeNanos).Round(time.Second))
	for _, l := range s.Loops {
		fmt.Fprintf(w, "%s: waits in %s (%s)\n", l.Name, l.Poller, l.Why)
	}
	for _, d := range s.Disks {
		access := "read-write"
		if d.ReadOnly {
			access = "read-only"
		}
		fmt.Fprintf(w, "disk %s: %d bytes, %s, cache %s\n  engine %s\n  %s\n", d.Name, d.Size, access, d.Cache, d.Engine, d.Durability)
		for _, e := range d.Exports {
			fmt.Fprintf(w, "  export %s: %d of %d queues run, %d sessions so far\n", e.Name, e.Running, e.Queues, e.Sessions)
		}
	}
	return w.Flush()
}

// writeReport prints what was counted in all.
func writeReport(out io.Writer, r *daemon.Report) error {
	fmt.Fprintf(out, "process %d, up %v\n", r.PID, time.Duration(r.UptimeNanos).Round(time.Second))
	for i := range r.Loops {
		writeLoop(out, &r.Loops[i])
	}
	for i := range r.Disks {
		d := &r.Disks[i]
		b := &d.Block
		fmt.Fprintf(out, "disk %s: %d errors, %d bounced, %d split, %d held at the door; %s\n", d.Name, b.Errors, b.Bounced, b.Split, b.Held, d.Engine)
		if d.Image != nil {
			writeImage(out, d.Image)
		}
		for k := range d.Exports {
			e := &d.Exports[k]
			fmt.Fprintf(out, "  export %s: %d sessions, %d broken off\n", e.Name, e.Sessions, e.Broken)
			for n := range e.Queues {
				if err := writeQueue(out, &e.Queues[n]); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// writeImage tells how an image's tables do.
func writeImage(out io.Writer, i *daemon.ImageReport) {
	share := func(hits, misses uint64) float64 { return 100 * each(hits, hits+misses) }
	fmt.Fprintf(out, "  image: %d requests handed on as they came, %d by way of a coroutine\n", i.Direct, i.Indirect)
	fmt.Fprintf(out, "    tables: %.1f%% of %d looks found in memory (%.1f MiB cover %.1f GiB); refcounts: %.1f%% of %d\n",
		share(i.L2Hits, i.L2Misses), i.L2Hits+i.L2Misses, mib(uint64(i.L2CacheBytes)), mib(uint64(i.L2CacheCovers))/1024,
		share(i.RefcountHits, i.RefcountMisses), i.RefcountHits+i.RefcountMisses)
	fmt.Fprintf(out, "    clusters: %d made, %d freed, %d pending; %d commits, %d flushes of the file", i.Allocated, i.Freed, i.Pending, i.Commits, i.FileFlushes)
	if i.UnpackHits+i.UnpackMisses > 0 {
		fmt.Fprintf(out, "; compressed clusters: %d unpacked, %d times again", i.UnpackMisses, i.UnpackHits)
	}
	if i.Corrupt {
		fmt.Fprint(out, "; the image is DAMAGED and takes no more writes")
	}
	fmt.Fprintln(out)
}

func writeLoop(out io.Writer, l *daemon.LoopReport) {
	fmt.Fprintf(out, "%s: %s, %d turns, %d system calls, %d sleeps, %d wake-ups", l.Name, l.Poller, l.Turns, l.SysCalls, l.Sleeps, l.Wakeups)
	if l.Polls > 0 {
		fmt.Fprintf(out, ", polled %d times for %v in all, %d hits", l.Polls, time.Duration(l.PollNanos).Round(time.Millisecond), l.PollHits)
	}
	fmt.Fprintln(out)
	for _, e := range l.Engines {
		fmt.Fprintf(out, "  %s: %d requests, %d submissions (%.1f each), %d again, %d errors\n", e.Name, e.Requests, e.Submissions,
			e.PerSubmission.Mean, e.Again+e.Resubmits, e.Errors)
	}
}

func writeQueue(out io.Writer, q *daemon.QueueReport) error {
	state := "stopped"
	if q.Running {
		state = "runs"
	}
	fmt.Fprintf(out, "    queue %d on %s, %s: %d requests, %d errors\n", q.Index, q.Loop, state, q.Requests, q.Errors)
	fmt.Fprintf(out, "      read %d (%.1f MiB, %.1f us), write %d (%.1f MiB, %.1f us), flush %d (%.1f us), discard %d\n",
		q.Reads, mib(q.ReadBytes), meanMicros(q.ReadNanos, q.Reads), q.Writes, mib(q.WriteBytes), meanMicros(q.WriteNanos, q.Writes),
		q.Flushes, meanMicros(q.FlushNanos, q.Flushes), q.Discards)
	fmt.Fprintf(out, "      %d kicks; %.1f requests a look at the ring, %.1f a publication, %.1f a notification (%d)", q.Kicks,
		q.PerBatch.Mean, q.PerPublish.Mean, q.PerNotification.Mean, q.Notifications)
	if q.Merges > 0 {
		fmt.Fprintf(out, "; %d merged into %d", q.Merged, q.Merges)
	}
	fmt.Fprintln(out)
	return writeStages(out, "      ", q.Stages)
}

// writeStages is the table of latencies, in microseconds.
func writeStages(out io.Writer, indent string, stages map[string]daemon.LatencyReport) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "%sstage\tcount\tmean us\tp50\tp90\tp99\tp99.9\tp99.99\tmax\t\n", indent)
	for s := range vhostblk.StageCount {
		l := stages[s.String()]
		if l.Count == 0 {
			continue
		}
		fmt.Fprintf(w, "%s%s\t%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t\n", indent, s, l.Count, micros(l.Mean), micros(l.P50), micros(l.P90), micros(l.P99),
			micros(l.P999), micros(l.P9999), micros(l.Max))
	}
	return w.Flush()
}

// writeInterval prints one line a queue, in the manner of iostat.
func writeInterval(out io.Writer, r *daemon.Report) error {
	seconds := time.Duration(r.UptimeNanos).Seconds()
	rate := func(n uint64) float64 {
		if seconds <= 0 {
			return 0
		}
		return float64(n) / seconds
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "disk\tqueue\tr/s\tw/s\trMiB/s\twMiB/s\tr_us\tw_us\tp50\tp99\tp99.9\treq/kick\treq/call\terr\t")
	for i := range r.Disks {
		for k := range r.Disks[i].Exports {
			for n := range r.Disks[i].Exports[k].Queues {
				q := &r.Disks[i].Exports[k].Queues[n]
				total := q.Stages[vhostblk.StageTotal.String()]
				fmt.Fprintf(w, "%s\t%d\t%.0f\t%.0f\t%.1f\t%.1f\t%.1f\t%.1f\t%s\t%s\t%s\t%.1f\t%.1f\t%d\t\n", r.Disks[i].Name, q.Index, rate(q.Reads),
					rate(q.Writes), mib(1)*rate(q.ReadBytes), mib(1)*rate(q.WriteBytes), meanMicros(q.ReadNanos, q.Reads),
					meanMicros(q.WriteNanos, q.Writes), micros(total.P50), micros(total.P99), micros(total.P999), each(q.Requests, q.Kicks),
					q.PerNotification.Mean, q.Errors)
			}
		}
	}
	return w.Flush()
}

func mib(bytes uint64) float64 { return float64(bytes) / (1 << 20) }

func micros(nanos uint64) string { return fmt.Sprintf("%.1f", float64(nanos)/1e3) }

func meanMicros(nanos, n uint64) float64 { return each(nanos, n) / 1e3 }

func each(sum, n uint64) float64 {
	if n == 0 {
		return 0
	}
	return float64(sum) / float64(n)
}
