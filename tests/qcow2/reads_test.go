// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/graph"
)

// readsRun does a list with the peer's tools, and reads what came of it with our node: the disk, its snapshots, and where
// things are.
func readsRun(b *bed) error {
	m := newModel(b.l)
	for _, ops := range b.l.batches() {
		m.together(ops)
	}
	if err := b.theirs(); err != nil {
		return err
	}
	if err := b.readBy("", &m.content); err != nil {
		return err
	}
	for name, c := range m.snapshots {
		if err := b.readBy(name, &c); err != nil {
			return fmt.Errorf("snapshot %s: %w", name, err)
		}
	}
	return nil
}

// readBy opens the disk, or a snapshot, and compares all of it.
func (b *bed) readBy(snapshot string, want *content) error {
	k, err := newMachine()
	if err != nil {
		return err
	}
	k.open = func() (block.Node, error) {
		s := graph.Spec{Path: b.path(imageName), Format: graph.FormatQcow2, ReadOnly: true, Snapshot: snapshot}
		return graph.Build(context.Background(), s, graph.AnyPath)
	}
	err = k.start()
	if err == nil {
		err = k.readAll(want)
	}
	if err == nil && snapshot == "" {
		err = b.sameMap(k.h.Node(), want)
	}
	return errors.Join(err, k.close())
}

func (k *machine) readAll(want *content) error {
	size := k.h.Info().Size
	if size != int64(len(want.data)) {
		return fmt.Errorf("disk has %d bytes, want %d", size, len(want.data))
	}
	return k.batch([]Op{{Kind: Read, Len: size}}, &model{content: *want})
}

// mapped is a stretch as qemu-img map tells it.
type mapped struct {
	Start, Length int64
	Depth         int
	Present       bool
	Zero, Data    bool
	Offset        *int64
}

// sameMap compares what we say of where things are with what the peer says, and with the content.
func (b *bed) sameMap(n block.Node, want *content) error {
	out, err := command(b.dir, "qemu-img", "map", "--output=json", "-f", "qcow2", imageName)
	if err != nil {
		return err
	}
	var theirs []mapped
	if err := json.Unmarshal([]byte(out), &theirs); err != nil {
		return err
	}
	var ours []mapped
	err = block.Map(context.Background(), n, 0, int64(len(want.data)), func(e block.Extent) error {
		if e.Zero && want.differs(e.Offset, make([]byte, e.Length)) >= 0 {
			return fmt.Errorf("map says that %d bytes at %d are zeros: they are not", e.Length, e.Offset)
		}
		x := mapped{Start: e.Offset, Length: e.Length, Depth: e.Depth, Present: e.Present, Zero: e.Zero, Data: e.Data}
		if e.Host >= 0 && !e.Compressed {
			x.Offset = &e.Host
		}
		ours = append(ours, x)
		return nil
	})
	if err != nil {
		return err
	}
	a, z := stretches(ours), stretches(theirs)
	for i := range max(len(a), len(z)) {
		if i >= len(a) || i >= len(z) || a[i] != z[i] {
			return fmt.Errorf("map differs from the peer's in line %d:\nours   %v\ntheirs %v", i, a[min(i, len(a)):], z[min(i, len(z)):])
		}
	}
	return nil
}

// stretches joins neighbours of one kind and says them as text. The peer looks into the file for holes, and tells where
// clusters are that hold nothing yet: that is left out.
func stretches(list []mapped) []string {
	var all []mapped
	for _, x := range list {
		if x.Data {
			x.Zero = false
		} else {
			x.Offset = nil
		}
		if n := len(all) - 1; n >= 0 && all[n].kind() == x.kind() && follows(&all[n], &x) {
			all[n].Length += x.Length
			continue
		}
		all = append(all, x)
	}
	var text []string
	for _, x := range all {
		at := "-"
		if x.Offset != nil {
			at = fmt.Sprint(*x.Offset)
		}
		text = append(text, fmt.Sprintf("%d+%d@%s %s", x.Start, x.Length, at, x.kind()))
	}
	return text
}

func (x *mapped) kind() string {
	return fmt.Sprintf("depth=%d present=%v zero=%v data=%v", x.Depth, x.Present, x.Zero, x.Data)
}

func follows(a, b *mapped) bool {
	if a.Offset == nil || b.Offset == nil {
		return a.Offset == b.Offset
	}
	return *a.Offset+a.Length == *b.Offset
}

// saidAlike wants our tool to say of the image what the peer's says, word for word. Left out is what depends on a guess, how
// much of the clusters is a hole in the file: map, and measure.
func (b *bed) saidAlike() error {
	for _, args := range [][]string{
		{"info", "--output=json", "-f", "qcow2", imageName},
		{"info", "-f", "qcow2", imageName},
		{"info", "--output=json", "--backing-chain", "-f", "qcow2", imageName},
		{"check", "--output=json", "-f", "qcow2", imageName},
		{"check", "-f", "qcow2", imageName},
		{"snapshot", "-l", "-f", "qcow2", imageName},
	} {
		theirs, terr := command(b.dir, "qemu-img", args...)
		ours, oerr := command(b.dir, "../ours/qemu-img", args...)
		if status(terr) != status(oerr) {
			return fmt.Errorf("%v: we end with %d, the peer with %d: %w", args, status(oerr), status(terr), errors.Join(oerr, terr))
		}
		if ours != theirs {
			return fmt.Errorf("%v: we say\n%s\nthe peer says\n%s", args, ours, theirs)
		}
	}
	return nil
}

// saysRun does a list with the peer and asks both tools about the image.
func saysRun(b *bed) error {
	if err := b.theirs(); err != nil {
		return err
	}
	return b.saidAlike()
}
