// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhosttest"
	"github.com/sluice-blk/sluice/internal/virtqtest"
)

// IdleCost is what disks cost that a guest has attached and does not use.
type IdleCost struct {
	Disks      int
	CPUPercent float64 // of one processor, of all disks together
	DiskMiB    float64 // resident memory of the server for each disk beyond the first
}

// MeasureIdle serves first one disk and then many from one process of ours, files in dir, each attached to a driver that
// is silent. It takes a little more than twice the window.
func MeasureIdle(ctx context.Context, program, dir string, disks int, window time.Duration) (*IdleCost, error) {
	_, first, err := idleServer(ctx, program, dir, 1, 0)
	if err != nil {
		return nil, err
	}
	cpu, all, err := idleServer(ctx, program, dir, disks, window)
	if err != nil {
		return nil, err
	}
	return &IdleCost{Disks: disks, CPUPercent: cpu, DiskMiB: float64(all-first) / float64(max(disks-1, 1)) / (1 << 20)}, nil
}

// settle is how long a server is left alone before it counts as idle.
const settle = time.Second

func idleServer(ctx context.Context, program, dir string, disks int, window time.Duration) (cpuPercent float64, resident int64, err error) {
	dir, err = os.MkdirTemp(dir, "sluice-idle-")
	if err != nil {
		return 0, 0, fmt.Errorf("make a directory for idle disks: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	s := Subject{Name: "sluice", Role: Ours, Args: []string{program, "serve"}}
	for i := range disks {
		path := filepath.Join(dir, strconv.Itoa(i))
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			return 0, 0, err
		}
		if err := os.Truncate(path, 64<<20); err != nil {
			return 0, 0, err
		}
		s.Args = append(s.Args, "--disk", doubleCommas(path), "--vhost-user", path+".sock")
	}
	v, err := startServer(ctx, &s, "")
	if err != nil {
		return 0, 0, err
	}
	err = v.while(ctx, func(ctx context.Context) error {
		var guests []*guest
		defer func() {
			for _, g := range guests {
				_ = g.close() // nothing was asked of it
			}
		}()
		for i := range disks {
			g, err := attachIdle(ctx, filepath.Join(dir, strconv.Itoa(i)+".sock"))
			if err != nil {
				return err
			}
			guests = append(guests, g)
		}
		sleep(ctx, settle)
		pid := v.cmd.Process.Pid
		from, before := time.Now(), sys.ProcessCPUOf(pid)
		sleep(ctx, window)
		if took := time.Since(from); took > 0 {
			cpuPercent = 100 * float64(sys.ProcessCPUOf(pid)-before) / float64(took)
		}
		resident = residentOf(pid)
		return ctx.Err()
	})
	if err = errors.Join(err, v.end()); err != nil {
		err = fmt.Errorf("%w\n%s", err, v.out.Bytes())
	}
	return cpuPercent, resident, err
}

// attachIdle is a driver that has set its queue up and is silent.
func attachIdle(ctx context.Context, socket string) (*guest, error) {
	w := &Workload{}
	w.Defaults()
	f, err := vhosttest.Dial(ctx, socket)
	if err != nil {
		return nil, err
	}
	g := &guest{f: f, w: w}
	if err := g.attach(); err != nil {
		return nil, errors.Join(err, g.close())
	}
	return g, nil
}

// residentOf is the memory of a process that is in RAM, in bytes; 0 when it cannot be read.
func residentOf(pid int) int64 {
	v := strings.TrimSuffix(fieldOf("/proc/"+strconv.Itoa(pid)+"/status", "VmRSS"), " kB")
	kib, err := strconv.ParseInt(v, 10, 64)
	if err != nil {
		return 0
	}
	return kib << 10
}

// MeasureAttach hands guest memory of size bytes to a server of the subject's kind and tells how long it takes to answer
// the table of it. The memory is not touched.
func MeasureAttach(ctx context.Context, s Subject, size int) (took time.Duration, err error) {
	dir, err := os.MkdirTemp("", "sluice-attach-")
	if err != nil {
		return 0, fmt.Errorf("make a directory for the socket: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	socket := filepath.Join(dir, "s")
	v, err := startServer(ctx, &s, socket)
	if err != nil {
		return 0, err
	}
	err = v.while(ctx, func(ctx context.Context) (err error) {
		took, err = attachLarge(ctx, socket, size)
		return err
	})
	if err = errors.Join(err, v.end()); err != nil {
		err = fmt.Errorf("%w\n%s", err, v.out.Bytes())
	}
	return took, err
}

func attachLarge(ctx context.Context, socket string, size int) (took time.Duration, err error) {
	w := &Workload{}
	w.Defaults()
	f, err := vhosttest.Dial(ctx, socket)
	if err != nil {
		return 0, err
	}
	g := &guest{f: f, w: w}
	defer func() { err = errors.Join(err, g.close()) }()
	if err := g.negotiate(); err != nil {
		return 0, err
	}
	if g.mem, err = virtqtest.NewMemory(guestBase, size); err != nil {
		return 0, err
	}
	from := time.Now()
	if err := g.f.SetMemTable(g.mem.Region()); err != nil {
		return 0, fmt.Errorf("hand over %d bytes of memory: %w", size, err)
	}
	return time.Since(from), nil
}
