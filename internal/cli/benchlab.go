// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/sluice-blk/sluice/internal/bench"
)

// labFlags are what the verbs with a programme of their own (seeds, targets) need to set a laboratory up.
type labFlags struct {
	dir, shm string
	size     string
	runtime  time.Duration
	ours     oursFlags
	peer     peerFlags
	report   reportFlags
}

func (f *labFlags) add(set *pflag.FlagSet, rounds string) {
	set.StringVar(&f.dir, "dir", os.TempDir(), "directory on the disk to measure; an image is made there, and removed")
	set.StringVar(&f.shm, "shm", "/dev/shm", "directory in memory to measure; likewise")
	set.StringVar(&f.size, "image-size", "1G", "size of the images")
	set.DurationVar(&f.runtime, "runtime", 2*time.Second, "how long each run measures")
	f.ours.add(set)
	f.peer.add(set)
	f.report.add(set, rounds, true)
}

// lab is a laboratory with its images, which go with close.
type lab struct {
	bench.Lab
	media  []bench.Medium
	images []string
}

func (f *labFlags) open(ctx context.Context, needs []string) (_ *lab, err error) {
	size, err := parseSize(f.size)
	if err != nil {
		return nil, &usage{fmt.Errorf("--image-size: %w", err)}
	}
	if f.runtime <= 0 {
		return nil, &usage{fmt.Errorf("--runtime is %v (want more than 0)", f.runtime)}
	}
	l := &lab{}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	l.Runtime, l.RampTime, l.More = f.runtime, min(f.runtime/4, 500*time.Millisecond), f.ours.more
	l.Keys = f.ours.keys
	l.PeerAIO, l.PeerLoops = f.peer.aio, f.peer.loops
	if l.Peer, l.Fio, err = f.peer.find(); err != nil {
		return nil, err
	}
	if l.Program, err = os.Executable(); err != nil {
		return nil, fmt.Errorf("find our own program: %w", err)
	}
	l.Media = map[string]bench.Medium{"null": {Name: "null"}}
	for name, dir := range map[string]string{"shm": f.shm, "disk": f.dir} {
		if !slices.Contains(needs, name) {
			continue
		}
		path, err := l.image(ctx, dir, size)
		if err != nil {
			return nil, fmt.Errorf("make an image: %w", err)
		}
		l.Media[name] = bench.Medium{Name: name, Path: path}
		l.media = append(l.media, l.Media[name])
	}
	slices.SortFunc(l.media, func(a, b bench.Medium) int { return strings.Compare(a.Name, b.Name) })
	return l, nil
}

// image makes a file full of what no layer can leave out, and durable, so that nobody still writes it while others read.
func (l *lab) image(ctx context.Context, dir string, size int64) (string, error) {
	w, err := os.CreateTemp(dir, "sluice-bench-*.raw")
	if err != nil {
		return "", err
	}
	l.images = append(l.images, w.Name())
	return w.Name(), errors.Join(fillRandom(ctx, w, size), w.Sync(), w.Close())
}

func fillRandom(ctx context.Context, w *os.File, size int64) error {
	random := rand.NewChaCha8([32]byte{1})
	b := make([]byte, 1<<20)
	for size > 0 {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		b = b[:min(int64(len(b)), size)]
		if _, err := random.Read(b); err != nil {
			return err
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
		size -= int64(len(b))
	}
	return nil
}

func (l *lab) close() error {
	var errs []error
	for _, path := range l.images {
		errs = append(errs, os.Remove(path))
	}
	l.images = nil
	return errors.Join(errs...)
}

// notes tell what a reader must know of the laboratory.
func (l *lab) notes() []string {
	m, ok := l.Media["disk"]
	if ok && bench.DeviceOf(m.Path) == "" {
		return []string{"disk: " + m.Path + " is on no block device: the rows of the disk are not those of a disk (--dir names another place)"}
	}
	return nil
}

// run measures one setup.
func (l *lab) run(ctx context.Context, s bench.Setup, bounds []bench.Bound, o bench.Options) (*bench.Comparison, error) {
	e, err := l.Experiment(s, bounds)
	if err != nil {
		return nil, err
	}
	c, err := bench.Compare(ctx, e, o)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", s.Title(), err)
	}
	return c, nil
}

// wantFio takes fio as a yardstick where it is installed and nothing else was said.
func (f *labFlags) wantFio() {
	if f.peer.fio == "" {
		if _, err := exec.LookPath("fio"); err == nil {
			f.peer.fio = "fio"
		}
	}
}

// mediaOf are the media that setups need.
func mediaOf(setups []bench.Setup) (names []string) {
	for _, s := range setups {
		if !slices.Contains(names, s.Medium) {
			names = append(names, s.Medium)
		}
	}
	return names
}
