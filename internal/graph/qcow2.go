// SPDX-License-Identifier: Apache-2.0

package graph

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/fault"
	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/node/qcow2"
)

// maxChain bounds how many images stand behind one another: each is a file that is open, and some memory.
const maxChain = 256

// qcow2 opens an image on a file, and what it names.
func (b *builder) qcow2(ctx context.Context, s Spec) (block.Node, error) {
	leave, err := b.enter(s.Path)
	if err != nil {
		return nil, fmt.Errorf("open %q: %w", s.Path, err)
	}
	defer leave()
	n, err := b.image(s)
	if errors.Is(err, qcow2.ErrAlign) && s.Driver == DriverFile && s.Cache == block.CacheDefault {
		// Nobody asked for direct I/O, and the page cache takes requests of any alignment.
		s.Cache = block.CacheWriteback
		n, err = b.image(s)
	}
	if err != nil {
		return nil, err
	}
	if err := b.dataFile(s, n); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	if err := b.behind(ctx, s, n); err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

// image opens the image alone.
func (b *builder) image(s Spec) (*qcow2.Node, error) {
	s.Growable = true
	below, err := b.bottom(s)
	if err != nil {
		return nil, err
	}
	if s.FileFault != "" {
		above, err := fault.New(below, s.FileFault)
		if err != nil {
			return nil, errors.Join(err, below.Close())
		}
		below = above
	}
	n, err := qcow2.Open(below, &qcow2.Options{
		ReadOnly: s.ReadOnly, Snapshot: s.Snapshot, L2CacheBytes: s.L2CacheSize, RefcountCacheBytes: s.RefcountCacheSize,
		KeepOnDiscard: s.KeepOnDiscard, IgnoreDiscard: s.IgnoreDiscard,
	})
	if err != nil {
		return nil, errors.Join(err, below.Close())
	}
	return n, nil
}

// dataFile opens the external data file of an image that has one.
func (b *builder) dataFile(s Spec, n *qcow2.Node) error {
	if !n.NeedsDataFile() {
		if s.DataFile != "" {
			return fmt.Errorf("open %q: the image has no external data file, and one is given: %w", s.Path, syscall.EINVAL)
		}
		return nil
	}
	name := s.DataFile
	if name == "" {
		at, err := parseName(n.Header().DataFile())
		if err != nil {
			return fmt.Errorf("open the data file of %q: %w (give it with data-file)", s.Path, err)
		}
		name = beside(s.Path, at.path)
	}
	d := Spec{Driver: DriverFile, Format: FormatRaw, Path: name, ReadOnly: s.ReadOnly, Growable: true, Cache: s.Cache, Engine: s.Engine,
		IgnoreDiscard: s.IgnoreDiscard, Lock: s.Lock}
	node, err := b.file(d)
	if err != nil {
		return fmt.Errorf("open the data file of %q: %w", s.Path, err)
	}
	err = n.SetDataFile(node)
	if errors.Is(err, qcow2.ErrAlign) && d.Cache == block.CacheDefault {
		d.Cache = block.CacheWriteback
		if cerr := node.Close(); cerr != nil {
			return cerr
		}
		if node, err = b.file(d); err != nil {
			return fmt.Errorf("open the data file of %q: %w", s.Path, err)
		}
		err = n.SetDataFile(node)
	}
	if err != nil {
		return errors.Join(err, node.Close())
	}
	return nil
}

// behind opens the backing chain.
func (b *builder) behind(ctx context.Context, s Spec, n *qcow2.Node) error {
	name := n.Header().BackingFile
	if s.NoBacking || s.Backing == nil && name == "" {
		return nil
	}
	spec, err := s.backing(name, n.Header().BackingFormat())
	if err != nil {
		return fmt.Errorf("open the backing file of %q: %w", s.Path, err)
	}
	if spec.Format == FormatProbe && s.Backing == nil {
		if spec.Format, err = b.guess(spec); err != nil {
			return fmt.Errorf("open the backing file of %q: %w", s.Path, err)
		}
	}
	if spec.Format == FormatQcow2 && s.Backing == nil {
		spec.ProbeBacking, spec.L2CacheSize, spec.RefcountCacheSize = s.ProbeBacking, s.L2CacheSize, s.RefcountCacheSize
	}
	// An image reads its backing node by requests of its own, so that what stands on one another is counted anew.
	node, err := (&builder{gate: b.gate, chain: b.chain}).build(ctx, spec)
	if err != nil {
		return fmt.Errorf("open the backing file of %q: %w", s.Path, err)
	}
	n.SetBacking(node)
	return nil
}

// backing describes what stands behind the image that s describes.
func (s *Spec) backing(name, format string) (Spec, error) {
	if s.Backing != nil {
		b := *s.Backing
		b.ReadOnly = true
		return b, nil
	}
	at, err := parseName(name)
	if err != nil {
		return Spec{}, err
	}
	if at.format != "" {
		format = at.format // the name is what is opened, and knows best
	}
	switch {
	case format == FormatProbe: // ours to say, not the image's
		return Spec{}, fmt.Errorf("unknown format %q: %w", format, syscall.EINVAL)
	case format == DriverFile, format == "host_device":
		format = FormatRaw
	case format == "" && s.ProbeBacking:
		format = FormatProbe
	case format == "":
		return Spec{}, fmt.Errorf("its format is not named, and guessing is dangerous where a guest wrote the contents: %w (name it in the image with qemu-img rebase -u -F FORMAT, allow to guess with backing=probe, or leave it out with backing=off)", syscall.EINVAL)
	}
	return Spec{Path: beside(s.Path, at.path), Format: format, ReadOnly: true, Cache: s.Cache, Engine: s.Engine, Lock: s.Lock}, nil
}

// enter notes that an image is being opened, and refuses one that is already: it would stand behind itself.
func (b *builder) enter(path string) (leave func(), err error) {
	if len(b.chain) >= maxChain {
		return nil, fmt.Errorf("more than %d images stand behind one another: %w", maxChain, syscall.ELOOP)
	}
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	for _, other := range b.chain {
		if os.SameFile(st, other) {
			return nil, fmt.Errorf("the images stand behind one another in a circle: %w", syscall.ELOOP)
		}
	}
	b.chain = append(b.chain, st)
	return func() { b.chain = b.chain[:len(b.chain)-1] }, nil
}

// Recognise tells the format that a file begins as; raw where it is none that is known. It is for telling people: what a
// guest wrote decides it. No lock is taken.
func Recognise(path string, gate Gate) (string, error) {
	b := &builder{gate: gate}
	return b.guess(Spec{Driver: DriverFile, Path: path, ReadOnly: true, Lock: LockShared})
}

// guess is Recognise for a file that somebody described.
func (b *builder) guess(s Spec) (string, error) {
	s.Format, s.Cache = FormatRaw, block.CacheWriteback
	n, err := b.file(s)
	if err != nil {
		return "", err
	}
	head, err := n.(*file.Node).Head(headSize)
	if err = errors.Join(err, n.Close()); err != nil {
		return "", err
	}
	if format := recognise(head); format != "" {
		return format, nil
	}
	return FormatRaw, nil
}
