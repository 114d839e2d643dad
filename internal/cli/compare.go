// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/sluice-blk/sluice/internal/bench"
)

// compareFlags are the flags of bench compare.
type compareFlags struct {
	file    string
	null    bool
	peer    string
	peerAIO []string
	engines []string
	rounds  int
	buffer  bool
	work    workloadFlags
}

func newCompare(s Streams) *cobra.Command {
	f := &compareFlags{}
	cmd := &cobra.Command{
		Use:   "compare --file PATH|--null [--peer PROGRAM] ...",
		Short: "Measure sluice, with batching on and off, beside qemu-storage-daemon",
		Long: strings.TrimSpace(`
Serve the same file in turn by sluice with batching, by sluice without, and by
qemu-storage-daemon, drive each with the same workload, and do so --rounds times,
interleaved. Print medians, the spread (the distance of the extremes in percent
of the median), and ratios to the last row. Writing workloads overwrite the file.

Requests per submission are counted by our server; the peer does not count.`),
		Example: `  sluice bench compare --file /dev/shm/disk.raw --iodepth=64 --rounds 5
  sluice bench compare --null --iodepth=64`,
		Args: noArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context(), s) }),
	}
	set := cmd.Flags()
	set.SortFlags = false
	set.StringVar(&f.file, "file", "", "the raw image or block device to serve")
	set.BoolVar(&f.null, "null", false, "serve null disks in place of a file")
	set.StringVar(&f.peer, "peer", "qemu-storage-daemon", "the peer's program")
	set.StringSliceVar(&f.peerAIO, "peer-aio", []string{"native", "io_uring"}, "the peer's engines: native, io_uring, threads")
	set.StringSliceVar(&f.engines, "engine", []string{"auto"}, "our engines")
	set.BoolVar(&f.buffer, "buffered", false, "go through the page cache in place of O_DIRECT")
	set.IntVar(&f.rounds, "rounds", 5, "how often each is measured")
	f.work.add(set)
	return cmd
}

func (f *compareFlags) run(parent context.Context, s Streams) error {
	w, err := f.work.workload()
	if err != nil {
		return &usage{err}
	}
	if (f.file == "") == !f.null {
		return &usage{errors.New("give either --file or --null")}
	}
	if f.rounds < 1 {
		return &usage{fmt.Errorf("--rounds is %d (want at least 1)", f.rounds)}
	}
	subjects, err := f.subjects(&w)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(parent, os.Interrupt, syscall.SIGTERM)
	defer stop()
	c, err := bench.Compare(ctx, subjects, w, f.rounds, func(line string) { fmt.Fprintln(s.Err, line) })
	if err != nil {
		return err
	}
	fmt.Fprintf(s.Out, "%s, %d rounds\n\n", w.String(), f.rounds)
	return c.WriteMarkdown(s.Out, "requests/submission", func(i int) string { return perSubmission(c.Logs[i]) })
}

// subjects are ours and the peer's command lines.
func (f *compareFlags) subjects(w *bench.Workload) ([]bench.Subject, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find our own program: %w", err)
	}
	var list []bench.Subject
	engines := f.engines
	if f.null {
		engines = []string{"auto"}
	}
	for _, engine := range engines {
		for _, batch := range []string{"on", "off"} {
			disk := "driver=null,size=1G"
			if !f.null {
				disk = strings.ReplaceAll(f.file, ",", ",,") + ",engine=" + engine + ",cache=" + f.cache()
			}
			list = append(list, bench.Subject{
				Name: fmt.Sprintf("sluice engine=%s batch=%s", engine, batch),
				Args: []string{self, "serve", "--batch", batch, "--log-format", "json",
					"--disk", fmt.Sprintf("%s,queues=%d", disk, w.NumJobs), "--vhost-user", "%S"},
			})
		}
	}
	peer, err := exec.LookPath(f.peer)
	if err != nil {
		return nil, fmt.Errorf("find the peer: %w (Debian has it in qemu-system-common)", err)
	}
	aios := f.peerAIO
	if f.null {
		aios = aios[:1]
	}
	for _, aio := range aios {
		list = append(list, bench.Subject{Name: f.peerName(aio), Args: f.peerArgs(peer, aio, w.NumJobs)})
	}
	return list, nil
}

func (f *compareFlags) cache() string {
	if f.buffer {
		return "writeback"
	}
	return "none"
}

func (f *compareFlags) peerName(aio string) string {
	if f.null {
		return "qemu-storage-daemon null-co"
	}
	return "qemu-storage-daemon aio=" + aio
}

func (f *compareFlags) peerArgs(peer, aio string, queues int) []string {
	nodes := []string{"--blockdev", "driver=null-co,node-name=d,size=1073741824,read-zeroes=off"}
	if !f.null {
		direct := "on"
		if f.buffer {
			direct = "off"
		}
		nodes = []string{
			"--blockdev", fmt.Sprintf("driver=file,node-name=f,filename=%s,cache.direct=%s,aio=%s", strings.ReplaceAll(f.file, ",", ",,"), direct, aio),
			"--blockdev", "driver=raw,node-name=d,file=f",
		}
	}
	return append(append([]string{peer}, nodes...), "--export",
		fmt.Sprintf("type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path=%%S,writable=on,num-queues=%d", queues))
}

// perSubmission reads the mean of requests per submission out of what our servers logged when they stopped.
func perSubmission(logs [][]byte) string {
	var sum, n float64
	for _, log := range logs {
		for line := range bytes.Lines(log) {
			var l struct {
				Requests    float64 `json:"submitted"`
				Submissions float64 `json:"submissions"`
			}
			if json.Unmarshal(line, &l) == nil && l.Submissions > 0 {
				sum += l.Requests / l.Submissions
				n++
			}
		}
	}
	if n == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f", sum/n)
}
