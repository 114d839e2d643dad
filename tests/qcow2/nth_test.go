// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/block"
)

// driver is who does the operations of a list: the tables alone, or a node.
type driver interface {
	start() error
	do(ops []Op, m *model) error
	stop() error
	done() []step
}

// failing does a list whose n-th request below fails, once or for ever after. What fails is told and does no harm beyond
// its own bytes; when the fault is gone, all goes on.
type failing struct {
	driver
	l      *List
	m      *model
	faults *faults
}

// faults decides which request fails.
type faults struct {
	n     int // counts down
	once  bool
	off   bool
	seen  int
	fired int
	errno syscall.Errno
}

func (f *faults) ask() error {
	f.seen++
	if f.off {
		return nil
	}
	f.n--
	if f.n == 0 || f.n < 0 && !f.once {
		f.fired++
		return f.errno
	}
	return nil
}

func (f *failing) run() error {
	if err := f.start(); err != nil {
		if f.injected(err) {
			return nil // it does not open: nothing was done
		}
		return err
	}
	for _, ops := range f.l.batches() {
		goOn, err := f.batch(ops)
		if err != nil {
			return err
		}
		if !goOn {
			break
		}
	}
	f.faults.off = true
	return f.goesOn()
}

func (f *failing) injected(err error) bool {
	var errno syscall.Errno
	return f.faults.fired > 0 && errors.As(err, &errno) && errno == f.faults.errno
}

// batch does operations at the same time. What is done to the whole image ends the list when it fails.
func (f *failing) batch(ops []Op) (goOn bool, err error) {
	first := len(f.done())
	err = f.do(ops, f.m)
	steps := f.done()[first:]
	if err != nil && !f.injected(err) {
		return false, err
	}
	for _, s := range steps {
		switch {
		case s.err == nil:
			f.m.apply(&s.op)
		case !f.injected(s.err):
			return false, fmt.Errorf("%s: %w", s.op, s.err)
		case s.op.ranged() && s.op.Kind != Read:
			f.m.doubt(s.op.Off, s.op.Off+s.op.Len)
		case !s.op.io():
			return false, nil
		}
	}
	return true, nil
}

// goesOn wants everything to work now that nothing fails any more.
func (f *failing) goesOn() error {
	size := int64(len(f.m.data))
	for _, o := range []Op{{Kind: Write, Off: size / 3, Len: min(5000, size-size/3), Source: 3}, {Kind: Flush}, {Kind: Read, Len: size}} {
		if err := f.do([]Op{o}, f.m); err != nil {
			return fmt.Errorf("after the faults: %w", err)
		}
		f.m.apply(&o)
	}
	return f.stop()
}

// nth runs a list again and again, with another request failing each time. run makes everything anew.
func nth(seed uint64, most int, run func(f *faults) error) error {
	rng := rand.New(rand.NewPCG(seed, 10))
	dry := &faults{off: true}
	if err := run(dry); err != nil {
		return fmt.Errorf("without faults: %w", err)
	}
	for k := range most {
		f := &faults{n: 1 + rng.IntN(max(dry.seen, 1)), once: k%2 == 0, errno: syscall.EIO}
		if most >= dry.seen*2 {
			f.n = k/2 + 1
		}
		if rng.IntN(4) == 0 {
			f.errno = syscall.ENOSPC
		}
		n := f.n
		if err := run(f); err != nil {
			return fmt.Errorf("request %d of %d below fails (once: %v, %v): %w", n, dry.seen, f.once, f.errno, err)
		}
	}
	return nil
}

// nthTables fails requests under the tables.
func nthTables(b *bed, seed uint64, most int) error {
	l := b.l
	file, data, err := b.madeOnce()
	if err != nil {
		return err
	}
	return nth(seed, most, func(f *faults) error {
		m := newModel(l)
		d, err := newDisk(b, m, seed)
		if err != nil {
			return err
		}
		fileNow, dataNow := d.inMemory()
		fileNow.file, fileNow.fault = slices.Clone(file), func(string) error { return f.ask() }
		if dataNow != nil {
			dataNow.file, dataNow.fault = slices.Clone(data), fileNow.fault
		}
		if err := (&failing{driver: d, l: l, m: m, faults: f}).run(); err != nil {
			return err
		}
		return judgeInMemory(fileNow.file, dataOf(dataNow), d.backing, m)
	})
}

func dataOf(d *device) []byte {
	if d == nil {
		return nil
	}
	return d.file
}

// madeOnce makes the image and gives the bytes of its files.
func (b *bed) madeOnce() (file, data []byte, err error) {
	b.inMemory()
	if err := b.make(); err != nil {
		return nil, nil, err
	}
	if file, err = b.load(imageName); err == nil && b.l.Data != "" {
		data, err = b.load(dataName)
	}
	return file, data, err
}

// judgeInMemory wants leaks at worst, and the content.
func judgeInMemory(file, data, backing []byte, m *model) error {
	n, err := openNaive(file, data, backing)
	if err != nil {
		return err
	}
	if v := n.check(); len(v.errors)+len(v.copied) > 0 {
		return fmt.Errorf("not consistent:\n%s", &v)
	}
	got, err := n.content(n.l1Offset, n.l1Size, n.size)
	if err != nil {
		return err
	}
	return m.compare(0, got)
}

// nthNode fails requests under the node.
func nthNode(b *bed, seed uint64, most int) error {
	l := b.l
	l.Ops = slices.DeleteFunc(slices.Clone(l.Ops), func(o Op) bool { return o.Kind == Compressed }) // for which it is closed
	image, data, err := b.madeOnce()
	if err != nil {
		return err
	}
	return nth(seed, most, func(f *faults) error {
		m := newModel(l)
		k, err := newMachine()
		if err != nil {
			return err
		}
		file, dataFile, below, err := k.inMemory(b, m, seed)
		if err != nil {
			return errors.Join(err, k.close())
		}
		file.file, file.fault = slices.Clone(image), func(block.Op) error { return f.ask() }
		if dataFile != nil {
			dataFile.file, dataFile.fault = slices.Clone(data), file.fault
		}
		err = (&failing{driver: k, l: l, m: m, faults: f}).run()
		f.off = true
		if err := errors.Join(err, k.close()); err != nil {
			return err
		}
		var dataNow []byte
		if dataFile != nil {
			dataNow = dataFile.file
		}
		return judgeInMemory(file.file, dataNow, below, m)
	})
}

// failures runs small lists with failing requests, and keeps the one that goes wrong.
func failures(t *testing.T, run func(b *bed, seed uint64, most int) error) {
	root := room(t)
	first, most := number(t, "SLUICE_SEED", 1), 40
	for seed := first; seed < first+lists(t, 20); seed++ {
		r := func(b *bed) error { return run(b, uint64(seed), most) }
		l := GenerateRequests(uint64(seed))
		if err := runner(r).run(root, l); err != nil {
			runner(r).keep(t, root, l, fmt.Sprintf("nth%d", seed), err)
			return
		}
	}
}

func TestOurTablesWhenTheNthRequestFails(t *testing.T) { failures(t, nthTables) }

func TestOurNodeWhenTheNthRequestFails(t *testing.T) { failures(t, nthNode) }
