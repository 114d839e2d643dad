// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/zstd"

	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// disk drives the tables of an image as a node does, on devices in memory, as plainly as their rules allow.
type disk struct {
	*scheduler
	file, data metadata.Store // data is nil where there is none
	backing    []byte
	m          *metadata.Image
	o          metadata.Options
	packing    byte   // the kind of compression
	steps      []step // what was asked for, and when
}

// step is one operation and its time.
type step struct {
	op         Op
	start, end int
	err        error
}

// newDisk takes the image that is in the bed.
func newDisk(b *bed, m *model, seed uint64) (*disk, error) {
	n, err := b.naive(m)
	if err != nil {
		return nil, err
	}
	s := &scheduler{Rand: rand.New(rand.NewPCG(seed, 3)), log: new(log)}
	d := &disk{scheduler: s, file: &device{s: s, file: n.file}, backing: n.backing, packing: n.compression}
	d.o = metadata.Options{Waiter: s}
	s.lenient = b.l.Image.Overlap
	// Small caches meet what large ones hide.
	if s.IntN(2) == 0 {
		d.o.L2CacheBytes, d.o.RefcountCacheBytes = 1+s.Int64N(8)*n.cluster, 1+s.Int64N(6)*n.cluster
	}
	d.o.KeepOnDiscard = s.IntN(8) == 0 && m.v3 // which in version 2 is to do nothing
	if b.l.Data != "" {
		d.data = &device{s: s, of: 1, file: n.data}
		d.o.Data = d.data
	}
	return d, nil
}

func (d *disk) open() (err error) {
	d.m, err = metadata.Open(d.file, &d.o)
	return err
}

// start, stop and done are what a driver has.
func (d *disk) start() error { return d.open() }
func (d *disk) stop() error  { return d.m.Close() }
func (d *disk) done() []step { return d.steps }

// stored is where the guest's data are.
func (d *disk) stored() metadata.Store {
	if d.data != nil {
		return d.data
	}
	return d.file
}

// read reads guest bytes; those behind the end of the disk are zeros.
func (d *disk) read(p []byte, off int64) error {
	if over := off + int64(len(p)) - d.m.Size(); over > 0 {
		keep := max(int64(len(p))-over, 0)
		clear(p[keep:])
		p = p[:keep]
	}
	for len(p) > 0 {
		e, ok := d.m.Lookup(off, int64(len(p)))
		if !ok {
			var err error
			if e, err = d.m.Map(off, int64(len(p))); err != nil {
				return err
			}
		}
		if e.Length <= 0 || e.Length > int64(len(p)) {
			return fmt.Errorf("extent of %d bytes for %d at %d", e.Length, len(p), off)
		}
		if err := d.readExtent(p[:e.Length], off, e); err != nil {
			return err
		}
		p, off = p[e.Length:], off+e.Length
	}
	return nil
}

func (d *disk) readExtent(p []byte, off int64, e metadata.Extent) error {
	switch e.Kind {
	case metadata.Zero, metadata.ZeroAllocated:
		clear(p)
	case metadata.Unallocated:
		copy(p, window(d.backing, off, int64(len(p))))
	case metadata.Data:
		return d.stored().Read(p, e.Host)
	case metadata.Compressed:
		packed := make([]byte, e.CompressedLen)
		if err := d.file.Read(packed, e.Host); err != nil {
			return err
		}
		cluster := d.m.Geometry().ClusterSize
		whole := make([]byte, cluster)
		if err := unpack(whole, packed, d.packing); err != nil {
			return fmt.Errorf("%v: %w", err, errCorruptData)
		}
		copy(p, whole[off%cluster:])
	default:
		return fmt.Errorf("extent of kind %v", e.Kind)
	}
	return nil
}

var errCorruptData = errors.New("compressed data are not sound")

// write writes guest bytes.
func (d *disk) write(p []byte, off int64) error {
	for len(p) > 0 {
		n := int64(len(p))
		if e, ok := d.m.Lookup(off, n); ok && e.Kind == metadata.Data && e.InPlace {
			if err := d.stored().Write(p[:e.Length], e.Host); err != nil {
				return err
			}
			p, off = p[e.Length:], off+e.Length
			continue
		}
		var a metadata.Allocation
		if err := d.m.BeginWrite(&a, off, n); err != nil {
			return err
		}
		if a.Offset != off || a.Length <= 0 || a.Length > n {
			return fmt.Errorf("room of %d bytes at %d for %d at %d", a.Length, a.Offset, n, off)
		}
		n = a.Length
		if err := d.fill(&a, p[:n]); err != nil {
			d.m.Abort(&a)
			return err
		}
		d.m.Link(&a)
		p, off = p[n:], off+n
	}
	return nil
}

// fill writes what the allocation is for, and what lies before and behind it in its clusters, in one write or in three.
func (d *disk) fill(a *metadata.Allocation, p []byte) error {
	if a.InPlace {
		return d.stored().Write(p, a.Host)
	}
	head, tail := make([]byte, a.Head), make([]byte, a.Tail)
	if err := errors.Join(d.read(head, a.Offset-a.Head), d.read(tail, a.Offset+a.Length)); err != nil {
		return err
	}
	if d.IntN(2) == 0 {
		return d.stored().Write(slices.Concat(head, p, tail), a.Host-a.Head)
	}
	var errs []error
	if len(head) > 0 && !(a.Fresh && len(bytes.Trim(head, "\x00")) == 0) {
		errs = append(errs, d.stored().Write(head, a.Host-a.Head))
	}
	errs = append(errs, d.stored().Write(p, a.Host))
	if len(tail) > 0 && !(a.Fresh && len(bytes.Trim(tail, "\x00")) == 0) {
		errs = append(errs, d.stored().Write(tail, a.Host+a.Length))
	}
	return errors.Join(errs...)
}

func (d *disk) zero(off, n int64, unmap bool) error {
	for n > 0 {
		done, err := d.m.Zero(off, n, unmap)
		if err != nil {
			return err
		}
		if done == 0 {
			done = min(n, d.m.ZeroUnit()-off%d.m.ZeroUnit())
			if err := d.write(make([]byte, done), off); err != nil {
				return err
			}
		}
		if done < 0 || done > n {
			return fmt.Errorf("zeroed %d of %d bytes", done, n)
		}
		off, n = off+done, n-done
	}
	return nil
}

// pack writes whole clusters compressed, or plainly where that saves nothing.
func (d *disk) pack(p []byte, off int64) error {
	cluster := d.m.Geometry().ClusterSize
	for len(p) > 0 {
		whole := make([]byte, cluster)
		n := copy(whole, p)
		packed, err := packed(whole, d.packing)
		if err != nil {
			return err
		}
		if int64(len(packed)) >= cluster {
			err = d.write(p[:n], off)
		} else {
			err = d.packCluster(packed, off)
		}
		if err != nil {
			return err
		}
		p, off = p[n:], off+cluster
	}
	return nil
}

func (d *disk) packCluster(packed []byte, off int64) error {
	var a metadata.Allocation
	if err := d.m.BeginCompressed(&a, off, len(packed)); err != nil {
		return err
	}
	if err := d.file.Write(packed, a.Host); err != nil {
		d.m.Abort(&a)
		return err
	}
	d.m.Link(&a)
	return nil
}

func packed(b []byte, kind byte) ([]byte, error) {
	if kind == 1 {
		z, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
		if err != nil {
			return nil, err
		}
		return z.EncodeAll(b, nil), z.Close()
	}
	var out bytes.Buffer
	w, err := flate.NewWriterWindow(&out, 4096)
	if err != nil {
		return nil, err
	}
	_, err = w.Write(b)
	err = errors.Join(err, w.Close())
	return out.Bytes(), err
}

// request does one operation of a guest and notes its time.
func (d *disk) request(o Op) error {
	t := d.m.Enter()
	defer d.m.Exit(t)
	switch o.Kind {
	case Write, Compressed:
		b := make([]byte, o.Len)
		sourced(b, o.Source)
		if o.Kind == Compressed {
			return d.pack(b, o.Off)
		}
		return d.write(b, o.Off)
	case Zero:
		return d.zero(o.Off, o.Len, o.Unmap)
	case Discard:
		return d.m.Discard(o.Off, o.Len)
	case Flush:
		return d.m.Commit()
	}
	return fmt.Errorf("%s is no request", o.Kind)
}

// batch does operations at the same time. m is the content before, which reads are compared with: they overlap none of the
// others.
func (d *disk) batch(ops []Op, m *model) error {
	var errs []error
	for i, o := range ops {
		d.scheduler.start(func() {
			at := len(d.steps)
			d.steps = append(d.steps, step{op: o, start: d.tick()})
			with := m
			if meets(ops, i) {
				with = nil
			}
			err := d.checkedRequest(o, with)
			d.steps[at].end, d.steps[at].err = d.tick(), err
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", o, err))
			}
		})
	}
	if err := d.scheduler.run(); err != nil {
		return err
	}
	return errors.Join(append(errs, d.complaints...)...)
}

func (d *disk) checkedRequest(o Op, m *model) error {
	if o.Kind != Read {
		return d.request(o)
	}
	t := d.m.Enter()
	defer d.m.Exit(t)
	got := make([]byte, o.Len)
	if err := d.read(got, o.Off); err != nil || m == nil {
		return err
	}
	return m.compare(o.Off, got)
}

// alone does what nothing else may run beside.
func (d *disk) alone(o Op) error {
	switch o.Kind {
	case Reopen:
		if err := d.m.Close(); err != nil {
			return fmt.Errorf("close: %w", err)
		}
		return d.open()
	case Resize:
		return d.resize(o.Len)
	case Snapshot:
		switch o.Verb {
		case "create":
			_, err := d.m.CreateSnapshot(metadata.SnapshotInfo{Name: o.Name})
			return err
		case "apply":
			return d.m.ApplySnapshot(o.Name)
		}
		return d.m.DeleteSnapshot(o.Name)
	}
	return fmt.Errorf("%s is not done here", o.Kind)
}

// resize cuts or grows the disk, and hides what a longer file below would show then.
func (d *disk) resize(size int64) error {
	old := d.m.Size()
	if err := d.m.Resize(size, true); err != nil {
		return err
	}
	shown := min(int64(len(d.backing)), size) - old
	if shown <= 0 {
		return nil
	}
	t := d.m.Enter()
	defer d.m.Exit(t)
	return errors.Join(d.zero(old, shown, true), d.m.Commit())
}

// do does a batch of a list.
func (d *disk) do(ops []Op, m *model) error {
	if ops[0].io() || ops[0].Kind == Compressed {
		return d.batch(ops, m)
	}
	at := len(d.steps)
	d.steps = append(d.steps, step{op: ops[0], start: d.tick()})
	var err error
	d.scheduler.start(func() { err = d.alone(ops[0]) })
	if stuck := d.scheduler.run(); stuck != nil {
		return stuck
	}
	d.steps[at].end, d.steps[at].err = d.tick(), err
	if err != nil {
		return fmt.Errorf("%s: %w", ops[0], err)
	}
	return errors.Join(d.complaints...)
}

// verify reads all of the disk and of its snapshots.
func (d *disk) verify(m *model) error {
	if d.m.Size() != int64(len(m.data)) {
		return fmt.Errorf("disk has %d bytes, want %d", d.m.Size(), len(m.data))
	}
	if err := d.compareAll(&m.content); err != nil {
		return fmt.Errorf("at the end: %w", err)
	}
	for name, want := range m.snapshots {
		view, err := d.m.OpenSnapshot(name)
		if err != nil {
			return fmt.Errorf("open snapshot %s: %w", name, err)
		}
		of := *d
		of.m = view
		err = errors.Join(of.compareAll(&want), view.Close())
		if err != nil {
			return fmt.Errorf("snapshot %s: %w", name, err)
		}
	}
	return nil
}

func (d *disk) compareAll(want *content) error {
	t := d.m.Enter()
	defer d.m.Exit(t)
	got := make([]byte, len(want.data))
	if err := d.read(got, 0); err != nil {
		return err
	}
	return want.compare(0, got)
}

// forTables is a list without what the tables alone cannot do.
func forTables(l *List) (*List, bool) {
	short := *l
	short.Ops = slices.DeleteFunc(slices.Clone(l.Ops), func(o Op) bool { return o.Kind == Commit || o.Kind == Rebase })
	return &short, valid(&short)
}

// tablesRun does a list with our tables on the image, and judges by the peer's tools.
func tablesRun(b *bed) error {
	l, ok := forTables(b.l)
	if !ok {
		return nil
	}
	b.l = l
	b.inMemory()
	m := newModel(l)
	if err := b.make(); err != nil {
		return err
	}
	d, err := newDisk(b, m, l.Image.Seed)
	if err != nil {
		return err
	}
	if err := d.all(l, m); err != nil {
		return err
	}
	if err := d.save(b); err != nil {
		return err
	}
	return b.judge(m)
}

// all does the whole list, from open to close, and brings the model up to date.
func (d *disk) all(l *List, m *model) error {
	if err := d.open(); err != nil {
		return fmt.Errorf("open: %w", err)
	}
	for _, ops := range l.batches() {
		if err := d.do(ops, m); err != nil {
			return err
		}
		m.together(ops)
	}
	if err := d.verify(m); err != nil {
		return err
	}
	if err := d.m.Close(); err != nil {
		return fmt.Errorf("close: %w", err)
	}
	return nil
}

// inMemory are the files of the disk where they are devices.
func (d *disk) inMemory() (file, data *device) {
	file, _ = d.file.(*device)
	data, _ = d.data.(*device)
	return file, data
}

// save writes the files in memory to the bed.
func (d *disk) save(b *bed) error {
	file, data := d.inMemory()
	err := b.store(imageName, file.file)
	if data != nil {
		err = errors.Join(err, b.store(dataName, data.file))
	}
	return err
}
