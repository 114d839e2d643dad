// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/sluice-blk/sluice/internal/block"
	node "github.com/sluice-blk/sluice/internal/node/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// inMemory lets a machine drive the image of the bed in memory.
func (k *machine) inMemory(b *bed, m *model, seed uint64) (file, data *ram, below []byte, err error) {
	n, err := b.naive(m)
	if err != nil {
		return nil, nil, nil, err
	}
	rng := rand.New(rand.NewPCG(seed, 8))
	k.log.lenient = b.l.Image.Overlap
	align := 1
	if rng.IntN(2) == 0 {
		align = 512
	}
	file = &ram{log: k.log, Rand: rng, file: n.file, align: align}
	if b.l.Data != "" {
		data = &ram{log: k.log, Rand: rng, file: n.data, of: 1, align: align}
	}
	var o node.Options
	if rng.IntN(2) == 0 {
		o.L2CacheBytes, o.RefcountCacheBytes = 1+rng.Int64N(8)*n.cluster, 1+rng.Int64N(6)*n.cluster
	}
	k.open = func() (block.Node, error) {
		q, err := node.Open(file, &o)
		if err != nil {
			return nil, err
		}
		if data != nil {
			err = q.SetDataFile(data)
		}
		if n.backing != nil {
			q.SetBacking(&ram{log: new(log), Rand: rng, file: n.backing, fixed: true, fault: file.fault})
		}
		return q, err
	}
	k.verb = func(o Op) error { return k.offlineInMemory(o, file, data, n) }
	return file, data, n.backing, nil
}

// offlineInMemory does what is done while no guest uses the image.
func (k *machine) offlineInMemory(o Op, file, data *ram, n *naive) error {
	s := &scheduler{Rand: file.Rand, log: k.log}
	d := &disk{scheduler: s, file: &device{s: s, file: file.file}, backing: n.backing, packing: n.compression}
	d.o = metadata.Options{Waiter: s}
	if data != nil {
		d.data = &device{s: s, of: 1, file: data.file}
		d.o.Data = d.data
	}
	if err := d.open(); err != nil {
		return err
	}
	var err error
	d.scheduler.start(func() {
		if o.Kind == Compressed {
			err = d.request(o)
		} else {
			err = d.alone(o)
		}
		err = errors.Join(err, d.m.Close())
	})
	err = errors.Join(d.run(), err)
	fileNow, dataNow := d.inMemory()
	file.file = fileNow.file
	if data != nil {
		data.file = dataNow.file
	}
	return err
}

// crashNode does a small list with our node on files in memory, and looks at them as a crash would leave them.
func crashNode(b *bed, seed uint64, extras int) (points int, err error) {
	l, ok := forTables(b.l)
	if !ok {
		return 0, nil
	}
	b.l = l
	b.inMemory()
	m := newModel(l)
	if err := b.make(); err != nil {
		return 0, err
	}
	k, err := newMachine()
	if err != nil {
		return 0, err
	}
	file, data, below, err := k.inMemory(b, m, seed)
	if err != nil {
		return 0, errors.Join(err, k.close())
	}
	k.log.record = true
	c := &crash{Rand: rand.New(rand.NewPCG(seed, 4)), extras: extras, durable: m.clone(), backing: below}
	c.stable[0] = slices.Clone(file.file)
	if data != nil {
		c.stable[1] = slices.Clone(data.file)
	}
	if err := errors.Join(k.all(l, m), k.close()); err != nil {
		return 0, err
	}
	c.events, c.steps, c.judge = k.log.events, k.steps, b.repairs(c)
	err = c.run(k.log.now)
	return c.points, err
}

func TestOurNodeSurvivesCrashes(t *testing.T) { crashes(t, points(t, 10_000), crashNode) }
