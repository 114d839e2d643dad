// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/sluice-blk/sluice/internal/bench"
)

// reportFlags say how often is measured and how the outcome is told; the same for every verb that compares.
type reportFlags struct {
	rounds string
	prune  bool
	others float64
	format string
	chart  string
	out    string
}

// add takes what is said for the rounds when the user says nothing; a programme of many tables prunes by itself.
func (f *reportFlags) add(set *pflag.FlagSet, rounds string, prune bool) {
	set.StringVar(&f.rounds, "rounds", rounds, "how often each is measured: N, or auto[:MAX] for 5 and then more until the spread allows a verdict (MAX is 15)")
	set.BoolVar(&f.prune, "prune", prune, "leave out, after the warm-up, configurations of the peer and of fio that are far behind in everything")
	set.Float64Var(&f.others, "others-max", 0, "repeat a run, a few times, when others use more percent of the machine meanwhile (25 is fair on a shared one); 0 never")
	set.StringVar(&f.format, "format", "text", "text, markdown or json")
	set.StringVar(&f.chart, "chart", "", "draw the figures into this SVG file, too")
	set.StringVar(&f.out, "out", "", "write the report into this directory in all formats, too")
}

// autoRounds are how many there are at most when nothing else is said.
const autoRounds = bench.MinRounds * 3

// parse is the rounds, or a usage error for anything that cannot be.
func (f *reportFlags) parse() (bench.Rounds, error) {
	if !slices.Contains(bench.Formats, f.format) {
		return bench.Rounds{}, fmt.Errorf("--format is %q (want %s)", f.format, strings.Join(bench.Formats, ", "))
	}
	mode, limit, hasLimit := strings.Cut(f.rounds, ":")
	if mode == "auto" {
		r := bench.Rounds{Min: bench.MinRounds, Max: autoRounds}
		if hasLimit {
			n, err := strconv.Atoi(limit)
			if err != nil || n < r.Min {
				return r, fmt.Errorf("--rounds is %q (want auto:MAX with at least %d)", f.rounds, r.Min)
			}
			r.Max = n
		}
		return r, nil
	}
	n, err := strconv.Atoi(f.rounds)
	if err != nil || n < 1 {
		return bench.Rounds{}, fmt.Errorf("--rounds is %q (want a number from 1, or auto)", f.rounds)
	}
	return bench.Rounds{Min: n, Max: n}, nil
}

// options make the comparison's.
func (f *reportFlags) options(s Streams, r bench.Rounds) bench.Options {
	return bench.Options{Rounds: r, Prune: f.prune, OthersMax: f.others, Progress: func(line string) { fmt.Fprintln(s.Err, line) }}
}

// write tells the report wherever it is wanted. name is that of the files in the directory.
func (f *reportFlags) write(s Streams, r *bench.Report, name string) error {
	errs := []error{r.Write(s.Out, f.format)}
	if f.chart != "" {
		errs = append(errs, writeChart(f.chart, r))
	}
	if f.out != "" {
		errs = append(errs, writeAll(f.out, name, r))
	}
	return errors.Join(errs...)
}

func writeChart(path string, r *bench.Report) error {
	return writeFile(path, func(w *os.File) error { return r.WriteSVG(w) })
}

func writeFile(path string, fill func(*os.File) error) error {
	w, err := os.Create(path)
	if err != nil {
		return err
	}
	if err := errors.Join(fill(w), w.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

func writeAll(dir, name string, r *bench.Report) error {
	if err := os.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	errs := []error{writeChart(filepath.Join(dir, name+".svg"), r)}
	for format, ending := range map[string]string{"text": ".txt", "markdown": ".md", "json": ".json"} {
		errs = append(errs, writeFile(filepath.Join(dir, name+ending), func(w *os.File) error { return r.Write(w, format) }))
	}
	return errors.Join(errs...)
}

// oursFlags change how we serve.
type oursFlags struct{ more, keys []string }

func (f *oursFlags) add(set *pflag.FlagSet) {
	set.StringArrayVar(&f.more, "serve-arg", nil, "hand this argument on to sluice serve (repeat it for more)")
	set.StringArrayVar(&f.keys, "disk-key", nil, "add KEY=VALUE to our disk (repeat it for more)")
}

// peerFlags say whom we are measured beside.
type peerFlags struct {
	peer  string
	aio   []string
	loops []string
	fio   string
}

func (f *peerFlags) add(set *pflag.FlagSet) {
	set.StringVar(&f.peer, "peer", "qemu-storage-daemon", "qemu-storage-daemon[=PROGRAM], or none")
	set.StringSliceVar(&f.aio, "peer-aio", []string{"native", "io_uring"}, "the peer's engines: native, io_uring, threads")
	set.StringSliceVar(&f.loops, "peer-loop", []string{"main", "iothread"}, "what the peer serves from: main loop, iothread")
	set.StringVar(&f.fio, "fio", "", "measure fio on the file itself, too; with a value, this program")
	set.Lookup("fio").NoOptDefVal = "fio"
}

// find looks the programs up. peer and fio are empty when they are not wanted.
func (f *peerFlags) find() (peer, fio string, err error) {
	for _, l := range f.loops {
		if l != "main" && l != "iothread" {
			return "", "", &usage{fmt.Errorf("--peer-loop is %q (want main or iothread)", l)}
		}
	}
	if f.peer != "none" {
		name, program, given := strings.Cut(f.peer, "=")
		if filepath.Base(name) != "qemu-storage-daemon" {
			return "", "", &usage{fmt.Errorf("--peer is %q (want qemu-storage-daemon[=PROGRAM] or none; any other server is measured with --server)", f.peer)}
		}
		if !given {
			program = name
		}
		if peer, err = exec.LookPath(program); err != nil {
			return "", "", fmt.Errorf("find the peer: %w (Debian has it in qemu-system-common; --peer none goes without)", err)
		}
	}
	if f.fio != "" {
		if fio, err = exec.LookPath(f.fio); err != nil {
			return "", "", fmt.Errorf("find fio: %w", err)
		}
	}
	return peer, fio, nil
}

// environment describes where the media are and whose versions are measured.
func environment(ctx context.Context, peer, fio string, media []bench.Medium) *bench.Environment {
	var programs []string
	for _, p := range []string{peer, fio} {
		if p != "" {
			programs = append(programs, p)
		}
	}
	return bench.LookAround(ctx, versionLine(), programs, media)
}
