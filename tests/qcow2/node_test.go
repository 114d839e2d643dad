// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/graph"
)

// machine drives an image through a guard on a loop, as an export does.
type machine struct {
	loop  *aio.Loop
	end   func() error // of the loop
	open  func() (block.Node, error)
	verb  func(o Op) error // does what is done while the image is not open
	other *other           // nil: nobody else changes the image
	log   *log
	steps []step

	h *block.Handle
	q *block.HandleQueue
}

// newMachine runs a loop. close ends it.
func newMachine() (*machine, error) {
	l, err := aio.NewLoop(nil)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	end := sync.OnceValue(func() error {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			return err
		}
		return nil
	})
	return &machine{loop: l, end: end, log: new(log)}, nil
}

// on runs fn on the loop.
func (k *machine) on(fn func() error) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return k.loop.Call(ctx, fn)
}

// unlocked tries again while the lock of a file is held: each process that another test starts has, for a moment, all
// files of this one open.
func unlocked[T any](open func() (T, error)) (T, error) {
	for tries := 0; ; tries++ {
		x, err := open()
		if !errors.Is(err, syscall.EAGAIN) || tries == 200 {
			return x, err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (k *machine) start() error {
	n, err := unlocked(k.open)
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	k.h = block.NewHandle(n, nil)
	return k.on(func() (err error) {
		k.q, err = k.h.Queue(k.loop)
		return err
	})
}

func (k *machine) stop() error {
	if k.h == nil {
		return nil
	}
	err := k.on(k.q.Close)
	err = errors.Join(err, k.h.Close())
	k.h = nil
	if err != nil {
		return fmt.Errorf("close: %w", err)
	}
	return nil
}

func (k *machine) done() []step { return k.steps }

// close ends everything, also after a failure.
func (k *machine) close() error { return errors.Join(k.stop(), k.end()) }

// ask is one request of a batch.
type ask struct {
	k    *machine
	r    block.Request
	at   int // step
	buf  []byte
	left *atomic.Int32
	done chan struct{}
}

// Complete implements block.Completer.
func (a *ask) Complete(_ *block.Request, err error) {
	s := &a.k.steps[a.at]
	s.end, s.err = a.k.log.tick(), err
	if a.left.Add(-1) == 0 {
		close(a.done)
	}
}

// batch sends requests in one turn and waits for all of them. What is read is compared with m, unless it is nil.
func (k *machine) batch(ops []Op, m *model) error {
	left, done := new(atomic.Int32), make(chan struct{})
	left.Store(int32(len(ops)))
	asks := make([]*ask, len(ops))
	for i, o := range ops {
		a := &ask{k: k, at: len(k.steps) + i, left: left, done: done, r: block.Request{Offset: o.Off, Length: o.Len}}
		a.r.Done = a
		switch o.Kind {
		case Read, Write:
			a.r.Op, a.buf = block.OpRead, make([]byte, o.Len)
			if o.Kind == Write {
				a.r.Op = block.OpWrite
				sourced(a.buf, o.Source)
			}
			for at := int64(0); at < o.Len; at += 40960 {
				a.r.Mem = append(a.r.Mem, aio.IOVecOf(a.buf[at:min(at+40960, o.Len)]))
			}
		case Zero:
			a.r.Op = block.OpWriteZeroes
			if o.Unmap {
				a.r.Flags = block.FlagUnmap
			}
		case Discard:
			a.r.Op = block.OpDiscard
		case Flush:
			a.r.Op = block.OpFlush
		}
		asks[i] = a
	}
	err := k.on(func() error {
		for _, o := range ops {
			k.steps = append(k.steps, step{op: o, start: k.log.tick()})
		}
		for _, a := range asks {
			k.q.Submit(&a.r)
		}
		return nil
	})
	if err != nil {
		return err
	}
	select {
	case <-done:
	case <-time.After(patience / 4):
		return fmt.Errorf("%v: requests do not complete", ops)
	}
	return k.outcome(ops, asks, m)
}

func (k *machine) outcome(ops []Op, asks []*ask, m *model) error {
	errs := append([]error(nil), k.log.complaints...)
	for i, o := range ops {
		err := k.steps[asks[i].at].err
		if o.Kind == Discard && errors.Is(err, block.ErrNotSupported) {
			err = nil
		}
		if o.Kind == Read && err == nil && m != nil && !meets(ops, i) {
			err = m.compare(o.Off, asks[i].buf)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", o, err))
		}
	}
	return errors.Join(errs...)
}

// do does a batch of a list, here or by somebody else in between.
func (k *machine) do(ops []Op, m *model) error {
	if ops[0].io() && (k.other == nil || !k.other.now()) {
		return k.batch(ops, m)
	}
	if ops[0].io() {
		return errors.Join(k.stop(), k.other.do(ops), k.start())
	}
	o := ops[0]
	k.steps = append(k.steps, step{op: o, start: k.log.tick()})
	err := k.stop()
	if err == nil && o.Kind != Reopen {
		err = k.verb(o)
	}
	if err == nil {
		err = k.start()
	}
	s := &k.steps[len(k.steps)-1]
	s.end, s.err = k.log.tick(), err
	if err != nil {
		return fmt.Errorf("%s: %w", o, err)
	}
	return errors.Join(k.log.complaints...)
}

// all does the whole list, from open to close, and brings the model up to date.
func (k *machine) all(l *List, m *model) error {
	if err := k.start(); err != nil {
		return err
	}
	for _, ops := range l.batches() {
		if err := k.do(ops, m); err != nil {
			return err
		}
		m.together(ops)
	}
	if size := k.h.Info().Size; size != int64(len(m.data)) {
		return fmt.Errorf("disk has %d bytes, want %d", size, len(m.data))
	}
	if len(m.data) > 0 {
		if err := k.do([]Op{{Kind: Read, Len: int64(len(m.data))}}, m); err != nil {
			return fmt.Errorf("at the end: %w", err)
		}
	}
	return k.stop()
}

// offline does to an image in a file what is done while no guest uses it: with our tool, or with the peer's.
func (b *bed) offline(o Op, rng *rand.Rand) error {
	if o.Kind == Compressed {
		line, _ := theirLine(&o)
		return b.qemuIO(imageName, []string{line})
	}
	b.tool = "qemu-img"
	if rng.IntN(4) > 0 {
		b.tool = "../ours/qemu-img"
	}
	return b.verb(b.verbArgs(&o)...)
}

// other is the peer, who does a part of a list.
type other struct {
	*rand.Rand
	b *bed
}

func (p *other) now() bool { return p.IntN(8) == 0 }

func (p *other) do(ops []Op) error {
	var lines []string
	for _, o := range ops {
		line, _ := theirLine(&o)
		lines = append(lines, line)
	}
	return p.b.qemuIO(imageName, lines)
}

// nodeRun does a list with our node on files, and judges by the peer's tools.
func nodeRun(b *bed) error { return nodeAlone(b, false) }

// mixedRun does a list partly with our node and partly by the peer, in turns.
func mixedRun(b *bed) error { return nodeAlone(b, true) }

func nodeAlone(b *bed, mixed bool) error {
	m := newModel(b.l)
	if err := b.make(); err != nil {
		return err
	}
	k, err := newMachine()
	if err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(b.l.Image.Seed, 6))
	k.verb = func(o Op) error { return b.offline(o, rng) }
	if mixed {
		k.other = &other{rng, b}
	}
	k.open = func() (block.Node, error) {
		s := graph.Spec{Path: b.path(imageName), Format: graph.FormatQcow2}
		if rng.IntN(2) == 0 {
			s.L2CacheSize, s.RefcountCacheSize = 1+rng.Int64N(8)*b.l.Image.Cluster, 1+rng.Int64N(6)*b.l.Image.Cluster
		}
		s.KeepOnDiscard = rng.IntN(8) == 0 && m.v3 // which in version 2 is to do nothing
		if rng.IntN(3) == 0 {
			s.Cache = block.CacheWriteback
		}
		return graph.Build(context.Background(), s, graph.AnyPath)
	}
	if err := errors.Join(k.all(b.l, m), k.close()); err != nil {
		return err
	}
	return b.judge(m)
}
