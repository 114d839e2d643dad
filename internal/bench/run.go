// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhosttest"
	"github.com/sluice-blk/sluice/internal/vhostuser"
	"github.com/sluice-blk/sluice/internal/virtqtest"
)

// guestBase is where the driver's memory begins for the guest; anything but 0, so that a null address is a bad one.
const guestBase = 1 << 30

// Run connects to the vhost-user socket, drives the workload, and disconnects. It returns an error for whatever a guest
// would see go wrong: a refused message, a bad status or length, a hang, wrong data.
func Run(ctx context.Context, socket string, w Workload) (*Result, error) {
	return Observe(ctx, socket, w, Observation{})
}

// Observe is [Run] and watches what it is told to.
func Observe(ctx context.Context, socket string, w Workload, what Observation) (*Result, error) {
	w.Defaults()
	if err := w.Check(); err != nil {
		return nil, err
	}
	f, err := dial(ctx, socket, w.Connect)
	if err != nil {
		return nil, err
	}
	g := &guest{f: f, w: &w}
	res, err := g.run(ctx, what)
	return res, errors.Join(err, g.close())
}

// dial connects and waits for the first answer, which a server that is busy with another front-end does not give.
func dial(ctx context.Context, socket string, patience time.Duration) (*vhosttest.Frontend, error) {
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	f, err := vhosttest.Dial(within, socket)
	if err != nil {
		return nil, err
	}
	f.Timeout = patience
	stop := context.AfterFunc(ctx, func() { _ = f.Close() }) // so that nobody waits for it in vain
	_, err = f.AskU64(vhostuser.GetFeatures)
	if !stop() && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	f.Timeout = 0
	if err != nil {
		return nil, errors.Join(fmt.Errorf("no answer at %s within %v: %w (another front-end may be connected: a disk has one at a time)", socket, patience, err), f.Close())
	}
	return f, nil
}

// guest is the connection with its memory and jobs.
type guest struct {
	f      *vhosttest.Frontend
	w      *Workload
	mem    *virtqtest.Memory
	jobs   []*job
	config virtioblk.Config
}

func (g *guest) run(ctx context.Context, what Observation) (*Result, error) {
	if err := g.attach(); err != nil {
		return nil, err
	}
	watching, cancel := context.WithCancel(ctx) // a run that fails early is watched no longer
	defer cancel()
	book := g.watch(watching, what)
	if err := g.drive(ctx); err != nil {
		return nil, err
	}
	res := g.result()
	book(res)
	return res, g.stopRings()
}

// attach brings the device up to the point where it waits for kicks.
func (g *guest) attach() error {
	if err := g.negotiate(); err != nil {
		return err
	}
	if err := g.layOut(); err != nil {
		return err
	}
	if err := g.f.SetMemTable(g.mem.Region()); err != nil {
		return fmt.Errorf("hand over memory: %w", err)
	}
	for i, j := range g.jobs {
		desc, avail, used := j.driver.Addrs()
		err := g.f.SetVring(vhosttest.Vring{Index: i, Size: int(j.driver.Size()), Desc: desc, Avail: avail, Used: used,
			Kick: j.kick, Call: j.call, Err: -1})
		if err != nil {
			return fmt.Errorf("set up queue %d: %w", i, err)
		}
	}
	return nil
}

func (g *guest) negotiate() error {
	features := vhostuser.FeatureVersion1 | vhostuser.FeatureIndirectDesc | vhostuser.FeatureProtocolFeatures |
		virtioblk.FeatureSegMax | virtioblk.FeatureBlkSize | virtioblk.FeatureFlush | virtioblk.FeatureMQ |
		virtioblk.FeatureRO | virtioblk.FeatureDiscard | virtioblk.FeatureWriteZeroes
	if !g.w.NoEvent {
		features |= vhostuser.FeatureEventIdx
	}
	protocol := vhostuser.ProtocolMQ | vhostuser.ProtocolConfig | vhostuser.ProtocolReplyAck
	if err := g.f.Negotiate(features, protocol); err != nil {
		return fmt.Errorf("negotiate: %w", err)
	}
	if g.f.ProtocolFeatures&vhostuser.ProtocolConfig == 0 {
		return errors.New("negotiate: the server has no configuration space (protocol feature CONFIG)")
	}
	b, err := g.f.GetConfig(0, virtioblk.ConfigSize)
	if err != nil {
		return fmt.Errorf("read configuration space: %w", err)
	}
	g.config = virtioblk.DecodeConfig(b)
	return g.fits()
}

// fits checks the workload against what the disk is.
func (g *guest) fits() error {
	k := kinds[g.w.RW]
	capacity := int64(g.config.Capacity) * virtioblk.SectorSize
	if g.w.Size == 0 {
		g.w.Size = capacity
	}
	readOnly := g.f.Features&virtioblk.FeatureRO != 0
	queues := max(g.f.Queues, 1)
	switch {
	case g.w.Size > capacity:
		return fmt.Errorf("--size=%d is more than the disk's %d bytes", g.w.Size, capacity)
	case g.w.Size/int64(g.w.NumJobs) < int64(g.w.BS)*int64(g.w.IODepth):
		return fmt.Errorf("%d bytes are too few for %d jobs of depth %d", g.w.Size, g.w.NumJobs, g.w.IODepth)
	case g.w.NumJobs > queues:
		return fmt.Errorf("--numjobs=%d needs as many virtqueues; the server offers %d (queues=N on its --disk)", g.w.NumJobs, queues)
	case readOnly && (k.writes || k.trims):
		return fmt.Errorf("--rw=%s on a read-only disk", g.w.RW)
	case k.trims && g.f.Features&virtioblk.FeatureDiscard == 0:
		return fmt.Errorf("--rw=%s on a disk without discard", g.w.RW)
	}
	return nil
}

// tableSize is the most segments of a chain: header, data, status.
const tableSize = 4

// layOut makes guest memory with the rings and buffers of all jobs, and gives each job its part of the disk. The parts
// are disjoint, so that jobs cannot disturb each other's verification.
func (g *guest) layOut() error {
	w := g.w
	const ringAndTable = 32 + tableSize*16 // bytes for each descriptor of a queue
	perSlot := roundUp(w.BS, 4096) + 4096
	perQueue := w.QueueSize*ringAndTable + w.IODepth*perSlot + 64<<10
	var err error
	if g.mem, err = virtqtest.NewMemory(guestBase, roundUp(perQueue*w.NumJobs, 2<<20)); err != nil {
		return err
	}
	part := w.Size / int64(w.NumJobs) / int64(w.BS) * int64(w.BS)
	for i := range w.NumJobs {
		d, err := virtqtest.NewDriver(g.mem, virtqtest.DriverConfig{
			Size: uint16(w.QueueSize), TableSize: tableSize,
			EventIdx: g.f.Features&vhostuser.FeatureEventIdx != 0,
			Indirect: g.f.Features&vhostuser.FeatureIndirectDesc != 0,
		})
		if err != nil {
			return err
		}
		j, err := newJob(w, i, g.mem, d)
		if err != nil {
			return err
		}
		j.first, j.size = part*int64(i), part
		if w.Verify {
			j.pattern = newPattern(w.Seed+uint64(i), part, w.BS)
		}
		if w.Poll {
			d.DisarmCalls()
		}
		g.jobs = append(g.jobs, j)
	}
	return nil
}

func roundUp(n, to int) int { return (n + to - 1) / to * to }

// drive runs all jobs; the first failure stops the others.
func (g *guest) drive(ctx context.Context) error {
	var stop atomic.Bool
	var wg sync.WaitGroup
	errs := make([]error, len(g.jobs))
	for i, j := range g.jobs {
		wg.Go(func() {
			if errs[i] = j.run(ctx, &stop); errs[i] != nil {
				stop.Store(true)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// stopRings checks at the end that the server took what was placed, and nothing else.
func (g *guest) stopRings() error {
	for i, j := range g.jobs {
		base, err := g.f.GetVringBase(i)
		if err != nil {
			return fmt.Errorf("stop queue %d: %w", i, err)
		}
		if want := j.driver.AvailIdx(); base != want {
			return fmt.Errorf("queue %d: the server says that it took requests up to %d, %d were placed", i, base, want)
		}
	}
	return nil
}

func (g *guest) close() error {
	errs := []error{g.f.Close()}
	for _, j := range g.jobs {
		errs = append(errs, j.close())
	}
	if g.mem != nil {
		errs = append(errs, g.mem.Close())
	}
	return errors.Join(errs...)
}

func (g *guest) serverPID() (pid int) {
	raw, err := g.f.Conn().SyscallConn()
	if err != nil {
		return 0
	}
	if err := raw.Control(func(fd uintptr) { pid, _ = sys.SocketPeer(int(fd)) }); err != nil {
		return 0
	}
	return pid
}
