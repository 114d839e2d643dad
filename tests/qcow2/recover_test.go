// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// recovers repairs what a crash left, or goes on without, and wants the image to be as good as new.
func (c *crash) recovers(files [2][]byte, n *naive) error {
	before, err := n.content(n.l1Offset, n.l1Size, n.size)
	if err != nil {
		return err
	}
	if c.IntN(4) == 0 {
		return c.goesOn(files, before, n.compression)
	}
	s := &scheduler{Rand: c.Rand, log: new(log)}
	d := &device{s: s, file: slices.Clone(files[0])}
	o := check.Options{Repair: check.Leaks}
	if n.incompatible&1 != 0 {
		o.Repair = check.Everything
	}
	r, err := check.Run(d, &o)
	if err != nil {
		return fmt.Errorf("repair: %w", err)
	}
	if !r.Clean() {
		return fmt.Errorf("our repair leaves %+v", *r)
	}
	return c.asNew(d.file, files[1], before)
}

// asNew wants an image without any complaint, and with the same content.
func (c *crash) asNew(file, data, want []byte) error {
	n, err := openNaive(file, data, c.backing)
	if err != nil {
		return err
	}
	if v := n.check(); len(v.errors)+len(v.copied)+len(v.leaks) > 0 || n.incompatible&1 != 0 {
		return fmt.Errorf("after the repair, with features %#x:\n%s", n.incompatible, &v)
	}
	got, err := n.content(n.l1Offset, n.l1Size, n.size)
	if err == nil && !bytes.Equal(got, want) {
		err = fmt.Errorf("the repair changed the disk")
	}
	return err
}

// goesOn uses the image as it is: it does not get worse, and what is written is there.
func (c *crash) goesOn(files [2][]byte, before []byte, packing byte) error {
	s := &scheduler{Rand: c.Rand, log: new(log)}
	file := &device{s: s, file: slices.Clone(files[0])}
	d := &disk{scheduler: s, file: file, backing: c.backing, packing: packing, o: metadata.Options{Waiter: s}}
	data := &device{s: s, of: 1, file: slices.Clone(files[1])}
	if files[1] != nil {
		d.data, d.o.Data = data, data
	}
	if err := d.open(); err != nil {
		return fmt.Errorf("open after the crash: %w", err)
	}
	m := &model{content: newContent(int64(len(before))), cluster: 1, v3: true}
	copy(m.data, before)
	var ops []Op
	for range 6 {
		at := s.Int64N(int64(len(before)))
		o := Op{Kind: Write, Off: at, Len: min(1+s.Int64N(8192), int64(len(before))-at), Source: s.IntN(sourceCount)}
		if s.IntN(4) == 0 {
			o.Kind = Zero
		}
		ops = append(ops, o)
	}
	for _, o := range ops {
		if err := d.do([]Op{o}, m); err != nil {
			return fmt.Errorf("go on after the crash: %w", err)
		}
		m.apply(&o)
	}
	if err := d.m.Close(); err != nil {
		return fmt.Errorf("close after the crash: %w", err)
	}
	n, err := openNaive(file.file, dataOf(data), c.backing)
	if err != nil {
		return err
	}
	if v := n.check(); len(v.errors)+len(v.shared) > 0 {
		return fmt.Errorf("going on after the crash made it worse:\n%s", &v)
	}
	got, err := n.content(n.l1Offset, n.l1Size, n.size)
	return errors.Join(err, m.compare(0, got))
}
