// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// crashTables does a small list with our tables, and looks at the image as a crash at many points would leave it.
func crashTables(b *bed, seed uint64, extras int) (points int, err error) {
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
	d, err := newDisk(b, m, seed)
	if err != nil {
		return 0, err
	}
	d.record = true
	c := &crash{Rand: rand.New(rand.NewPCG(seed, 4)), extras: extras, durable: m.clone(), backing: d.backing}
	file, data := d.inMemory()
	c.stable = [2][]byte{slices.Clone(file.file), slices.Clone(dataOf(data))}
	if err := d.all(l, m); err != nil {
		return 0, err
	}
	c.events, c.steps, c.judge = d.events, d.steps, b.repairs(c)
	err = c.run(d.now)
	return c.points, err
}

// repairs lets the peer repair some of the images that a crash leaves: giving back what is leaked must be enough.
func (b *bed) repairs(c *crash) func(files [2][]byte, n *naive) error {
	return func(files [2][]byte, n *naive) error {
		const dirty = 1
		if n.incompatible&dirty != 0 || b.memory != nil || c.IntN(300) > 0 {
			return nil
		}
		if err := errors.Join(b.store(imageName, files[0]), b.store(dataName, files[1])); err != nil {
			return err
		}
		if err := qemuImg(b.dir, "check", "-q", "-f", "qcow2", "-r", "leaks", imageName); err != nil {
			return err
		}
		return b.check(imageName)
	}
}

// crashes runs small lists until there are enough points, and keeps the one that fails.
func crashes(t *testing.T, enough int, run func(b *bed, seed uint64, extras int) (int, error)) {
	root := room(t)
	first := number(t, "SLUICE_SEED", 1)
	const shards = 4
	for shard := range shards {
		t.Run(fmt.Sprintf("shard %d", shard), func(t *testing.T) {
			t.Parallel()
			points := 0
			for seed := first + shard; points < enough/shards; seed += shards {
				r := func(b *bed) error {
					n, err := run(b, uint64(seed), 2)
					points += n
					return err
				}
				l := GenerateSmall(uint64(seed))
				if err := runner(r).run(root, l); err != nil {
					runner(r).keep(t, root, l, fmt.Sprintf("crash%d", seed), err)
					return
				}
			}
			t.Logf("%d points", points)
		})
	}
}

// points is how many crashes a test looks at: n, or a million in a soak.
func points(t testing.TB, n int) int {
	t.Helper()
	if soaking() {
		n = 1_000_000
	}
	return number(t, "SLUICE_POINTS", n)
}

func TestOurTablesSurviveCrashes(t *testing.T) { crashes(t, points(t, 10_000), crashTables) }
