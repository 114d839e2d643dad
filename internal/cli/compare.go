// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
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
	buffer  bool
	image   string
	engines []string
	batch   []string
	ours    oursFlags
	servers []string
	peer    peerFlags
	report  reportFlags
	work    workloadFlags
}

func newCompare(s Streams) *cobra.Command {
	f := &compareFlags{}
	cmd := &cobra.Command{
		Use:   "compare --file PATH|--null [--peer qemu-storage-daemon[=PROGRAM]|none] ...",
		Short: "Measure sluice beside qemu-storage-daemon, fio, or any other server",
		Long: strings.TrimSpace(`
Serve the same file in turn by sluice with batching, by sluice without, and by
qemu-storage-daemon with each of its engines on its main loop and on a thread of
its own; drive each with the same workload, and do so --rounds times,
interleaved. Writing workloads overwrite the file.

Printed are medians, the spread (the distance of the extremes in percent of the
median), ratios to the best of the peer's rows in that figure, and below the
table ratios with the interval that holds them with 90 %. Processor time is the
server process's, workers of the kernel included. A first round warms up and is
discarded; in it the kernel counts system calls, where it allows that (root, or
kernel.perf_event_paranoid), else our own count is shown and marked.

Requests per submission are counted by our server; those per kick and per call
by the driver. "limited by" names what was busy all the time.`),
		Example: `  sluice bench compare --file /dev/shm/disk.raw --iodepth=64 --rounds auto --fio
  sluice bench compare --null --iodepth=64 --peer none --server 'old=/tmp/old/sluice serve --disk driver=null,size=1G --vhost-user %S'`,
		Args: noArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error { return f.run(cmd.Context(), s) }),
	}
	set := cmd.Flags()
	set.SortFlags = false
	set.StringVar(&f.file, "file", "", "the image or block device to serve")
	set.StringVar(&f.image, "image-format", bench.FormatRaw, "format of the file: raw or qcow2 (fio is left out then)")
	set.BoolVar(&f.null, "null", false, "serve null disks in place of a file")
	set.BoolVar(&f.buffer, "buffered", false, "go through the page cache in place of O_DIRECT")
	set.StringSliceVar(&f.engines, "engine", []string{"auto"}, "our engines")
	set.StringSliceVar(&f.batch, "batch", []string{"on", "off"}, "our batching: on, off")
	f.ours.add(set)
	set.StringArrayVar(&f.servers, "server", nil, "NAME=COMMAND of another server; %S stands for the socket, %F for the file")
	f.peer.add(set)
	f.report.add(set, "5", false)
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
	if f.image != bench.FormatRaw && f.image != "qcow2" {
		return &usage{fmt.Errorf("--image-format is %q (want raw or qcow2)", f.image)}
	}
	rounds, err := f.report.parse()
	if err != nil {
		return &usage{err}
	}
	peer, fio, err := f.peer.find()
	if err != nil {
		return err
	}
	e, err := f.experiment(w, peer, fio)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(parent, os.Interrupt, syscall.SIGTERM)
	defer stop()
	r := &bench.Report{Title: "sluice bench compare", Environment: environment(ctx, peer, fio, []bench.Medium{e.Medium})}
	c, err := bench.Compare(ctx, e, f.report.options(s, rounds))
	if err != nil {
		return err
	}
	r.Comparisons = append(r.Comparisons, c)
	return f.report.write(s, r, "compare")
}

// experiment is what the flags ask for.
func (f *compareFlags) experiment(w bench.Workload, peer, fio string) (bench.Experiment, error) {
	self, err := os.Executable()
	if err != nil {
		return bench.Experiment{}, fmt.Errorf("find our own program: %w", err)
	}
	m := bench.Medium{Name: "null"}
	if !f.null {
		m = bench.Medium{Name: "file", Path: f.file, Buffered: f.buffer, Format: f.image}
	}
	e := bench.Experiment{ID: "compare", Title: w.String() + " on " + m.Title(), Medium: m, Workload: w}
	engines := f.engines
	if f.null {
		engines = engines[:min(len(engines), 1)]
	}
	for _, engine := range engines {
		for _, batch := range f.batch {
			ours := bench.Sluice{Program: self, Engine: engine, Batch: batch, More: f.ours.more, Keys: f.ours.keys}
			e.Subjects = append(e.Subjects, ours.Subject(m, w.NumJobs))
		}
	}
	for _, v := range f.servers {
		name, line, ok := strings.Cut(v, "=")
		if !ok || strings.TrimSpace(line) == "" {
			return e, &usage{fmt.Errorf("--server is %q (want NAME=COMMAND)", v)}
		}
		e.Subjects = append(e.Subjects, bench.Command(name, line, m))
	}
	if peer != "" {
		for _, p := range bench.Configurations(peer, m, f.peer.aio, f.peer.loops) {
			e.Subjects = append(e.Subjects, p.Subject(m, w.NumJobs))
		}
	}
	if fio != "" && !f.null && f.image == bench.FormatRaw {
		for _, one := range bench.Fios(fio, &w) {
			e.Subjects = append(e.Subjects, one.Subject(m, &w))
		}
	}
	return e, nil
}
