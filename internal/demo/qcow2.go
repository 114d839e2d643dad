// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"

	"github.com/sluice-blk/sluice/internal/img"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// makeImage makes a disk of the demo's format: empty, or full of random bytes, which no device can shorten.
func (d *demo) makeImage(ctx context.Context, path string, size int64, filled bool) error {
	switch {
	case d.o.Format == formatQcow2:
		return makeQcow2(ctx, path, size, filled)
	case filled:
		return makeFilled(ctx, path, size)
	}
	return makeSparse(path, size)
}

func makeQcow2(ctx context.Context, path string, size int64, filled bool) (err error) {
	s, err := img.CreateStore(path, img.StoreOptions{})
	if err != nil {
		return fmt.Errorf("make image: %w", err)
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	o := create.Options{Size: size}
	if filled {
		o.Preallocation = create.Metadata
	}
	if _, err = create.Create(s, &o); err != nil || !filled {
		return err
	}
	m, err := metadata.Open(s, &metadata.Options{ReadOnly: true})
	if err != nil {
		return err
	}
	random := rand.NewChaCha8([32]byte{1})
	block := make([]byte, 1<<20)
	for off := int64(0); off < size; {
		if err := ctx.Err(); err != nil {
			return err
		}
		x, err := m.Map(off, min(int64(len(block)), size-off))
		if err != nil {
			return err
		}
		_, _ = random.Read(block[:x.Length]) // it never fails
		if err := s.Write(block[:x.Length], x.Host); err != nil {
			return err
		}
		off += x.Length
	}
	return errors.Join(m.Close(), s.Flush())
}

// rawWork gives the work disk as a raw file, for the host's tools to look at.
func (d *demo) rawWork() (string, error) {
	if d.o.Format != formatQcow2 {
		return d.work0(), nil
	}
	path := d.path("work.out")
	if err := unpackQcow2(d.work0(), path); err != nil {
		return "", fmt.Errorf("take the disk out of its image: %w", err)
	}
	return path, nil
}

// unpackQcow2 writes the disk of an image that nobody uses to a raw file.
func unpackQcow2(from, to string) (err error) {
	s, err := img.OpenStore(from, img.StoreOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer s.Close()
	m, err := metadata.Open(s, &metadata.Options{ReadOnly: true})
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	if err := out.Truncate(m.Size()); err != nil {
		return err
	}
	buf := make([]byte, 1<<20)
	for off := int64(0); off < m.Size(); {
		x, err := m.Map(off, min(int64(len(buf)), m.Size()-off))
		if err != nil {
			return err
		}
		if x.Kind == metadata.Data {
			if err := s.Read(buf[:x.Length], x.Host); err != nil {
				return err
			}
			if _, err := out.WriteAt(buf[:x.Length], off); err != nil {
				return err
			}
		}
		off += x.Length
	}
	return m.Close()
}

// checkImage has QEMU's own tool look at the image's tables, where it is there.
func (d *demo) checkImage(ctx context.Context) error {
	if d.o.Format != formatQcow2 {
		return nil
	}
	if _, err := exec.LookPath("qemu-img"); err != nil {
		return nil
	}
	out, err := exec.CommandContext(ctx, "qemu-img", "check", "-f", "qcow2", d.work0()).CombinedOutput()
	if err != nil {
		return fmt.Errorf("qemu-img check finds the image not sound: %w:\n%s", err, lastLines(out, 20))
	}
	d.check("on the host: qemu-img check finds no errors in the image, and no leaks")
	return nil
}
