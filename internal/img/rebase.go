// SPDX-License-Identifier: Apache-2.0

package img

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"syscall"

	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/graph"
)

// RebaseRequest is what a person asks of rebase: another backing file for an image.
type RebaseRequest struct {
	Source        Source // the image
	Cache         Cache
	SourceCache   Cache  // of the backing files
	Backing       string // "" is none
	BackingFormat string // "" is found out, where a safe rebase opens the file
	// Unsafe changes the name alone. Else what the image would show differently afterwards is stored in it first.
	Unsafe bool
	// Shared opens the backing files without locks.
	Shared   bool
	Warnings io.Writer // told of an image that was taken for raw

	Progress *Progress
}

// Run rebases. When it fails the image shows what it showed.
func (r *RebaseRequest) Run(ctx context.Context) (err error) {
	top, err := OpenImage(r.Source)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, top.Close()) }()
	if top.ProbedRaw() {
		io.WriteString(r.Warnings, RawWarning(r.Source.Name))
	}
	if r.BackingFormat != "" && !NamedFormat(r.BackingFormat) {
		return Wordedf("Invalid format name: '%s'", r.BackingFormat)
	}
	if top.Format != FormatQcow2 {
		return Wordedf("Could not change the backing file to '%s': Operation not supported", r.Backing)
	}
	if !r.Unsafe {
		if err := r.move(ctx, top); err != nil {
			return err
		}
	}
	return r.rename(top)
}

// rename makes the image name its new backing file.
func (r *RebaseRequest) rename(top *Image) error {
	h, err := top.header()
	if err != nil {
		return Wordedf("Could not open '%s': %s", r.Source.Name, err.Error())
	}
	if r.Backing != "" && r.BackingFormat == "" {
		return Wordedf("Could not change the backing file to '%s': backing format must be specified", r.Backing)
	}
	h.BackingFile = r.Backing
	format := r.BackingFormat
	if r.Backing == "" {
		format = ""
	}
	h.SetBackingFormat(format)
	h.ClearUnknownAutoclear()
	if len(r.Backing) > qcow2.MaxBackingName {
		return Wordedf("Could not change the backing file to '%s': %s", r.Backing, syscall.EINVAL)
	}
	b, err := h.Encode()
	if err != nil {
		return Wordedf("Could not change the backing file to '%s': No space left in the file header", r.Backing)
	}
	if err := top.writeHeader(b); err != nil {
		return Wordedf("Could not change the backing file to '%s': %s", r.Backing, err)
	}
	return nil
}

// writeHeader writes the first cluster anew.
func (i *Image) writeHeader(cluster []byte) error {
	if err := i.Write(cluster, 0); err != nil {
		return err
	}
	return i.Flush()
}

// move stores in the image what its backing files show now and the new one would not.
func (r *RebaseRequest) move(ctx context.Context, top *Image) (err error) {
	info, err := top.Info()
	if err != nil {
		return Wordedf("Could not open '%s': %s", r.Source.Name, err.Error())
	}
	behind := StoreOptions{ReadOnly: true, Shared: r.Shared}
	layers, err := backingLayers(info, behind)
	if err != nil {
		return backingError(r.Source, info, err)
	}
	loops, err := StartLoops(2)
	if err != nil {
		return err
	}
	defer loops.Stop()
	h, err := top.header()
	if err != nil {
		return err
	}
	m := &rebasing{shared: len(layers) + 1, cluster: info.ClusterSize, zeros: h.Version >= 3, progress: r.Progress}
	defer func() { err = closeAll(err, m.image, m.after) }()
	if r.Backing != "" {
		name := Beside(top.Name, r.Backing)
		src := Source{Name: name, Format: r.BackingFormat, Store: behind}
		if m.after, err = OpenDisk(ctx, loops.At(1), src, DiskOptions{Cache: r.SourceCache}); err != nil {
			return Wordedf("Could not open new backing file '%s': %s", r.Backing, strings.TrimPrefix(err.Error(), "Could not open '"+name+"': "))
		}
		if at, err := ParseName(name); err == nil {
			if i := layerOf(layers, at.Path); i >= 0 {
				m.shared = i + 1
			}
		}
	}
	src := Source{Name: top.Name, Format: top.Format, Store: StoreOptions{NoLock: true}}
	old := DiskOptions{Cache: r.Cache, Backing: chainSpec(layers, r.SourceCache, r.Shared)}
	if len(layers) > 0 {
		m.oldEnd = layers[0].info.VirtualSize
	} else if info.VirtualSize > 0 {
		// Zeros have to be stored, for something else will be behind them; without a backing file they would not be.
		old.Backing = &graph.Spec{Driver: graph.DriverNull, Size: info.VirtualSize, ReadOnly: true, ReadZeroes: true}
		m.shared++
	}
	if m.image, err = OpenDisk(ctx, loops.At(0), src, old); err != nil {
		return err
	}
	return m.run(ctx)
}

// rebasing compares what an image shows of its backing files with what another one would show, and stores the former where
// they differ.
type rebasing struct {
	image    *Disk // with its old backing files
	after    *Disk // the new backing file; nil: zeros
	oldEnd   int64 // where the old backing file ends
	cluster  int64 // bytes of a cluster of the image
	zeros    bool  // it can say that a cluster is zeros: since version 3
	shared   int   // from this depth on, old and new are the same images
	progress *Progress
}

func (m *rebasing) run(ctx context.Context) error {
	work, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	m.progress.Expect(m.image.Size())
	pieces := make(chan comparePiece)
	var workers sync.WaitGroup
	var failed firstError
	for range compareWorkers {
		workers.Go(func() {
			w := &rebaseWorker{m: m, old: make([]byte, compareChunk), next: make([]byte, compareChunk), t: newTransfer(transferRequests)}
			for p := range pieces {
				if err := w.do(p); err != nil {
					failed.note(p.off, err)
					stop(err)
				}
				m.progress.Advance(p.n)
			}
		})
	}
	planned := m.plan(work, pieces)
	close(pieces)
	workers.Wait()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case failed.err != nil:
		return failed.err
	case planned != nil:
		return planned
	}
	if err := m.image.Flush(); err != nil {
		return Wordedf("Error while flushing %s: %s", m.image.name, err)
	}
	return nil
}

// plan finds the stretches that the image does not store itself, and that may look different.
func (m *rebasing) plan(ctx context.Context, out chan<- comparePiece) error {
	size := m.image.Size()
	walks := [2]*mapWalk{walkMap(ctx, m.image, 0, size)}
	walks[0].byDepth = true
	defer walks[0].stop()
	end := int64(0)
	if m.after != nil {
		end = min(m.after.Size(), size)
	}
	if end > 0 {
		walks[1] = walkMap(ctx, m.after, 0, end)
		defer walks[1].stop()
	}
	var held comparePiece // to which the next may be added: what lies side by side is stored side by side
	for off := int64(0); off < size; {
		e, err := walks[0].at(off)
		if err != nil {
			return fmt.Errorf("read block status of %s: %w", m.image.name, err)
		}
		p := comparePiece{off: off, n: e.Offset + e.Length - off}
		if off < m.oldEnd {
			p.n = min(p.n, m.oldEnd-off)
		}
		p.read[0] = e.Present && !e.Zero
		same := e.Present && (e.Depth == 0 || e.Depth >= m.shared)
		if off < end && !same {
			after, err := walks[1].at(off)
			if err != nil {
				return fmt.Errorf("read block status of %s: %w", m.after.name, err)
			}
			p.read[1] = after.Present && !after.Zero
			p.n = min(p.n, after.Offset+after.Length-off)
		}
		off += p.n
		if same || !p.read[0] && !p.read[1] {
			m.progress.Advance(p.n)
			continue
		}
		if held.n > 0 && held.off+held.n == p.off && p.off != m.oldEnd && p.off != end { // what is read has to be there
			held.n += p.n
			held.read = [2]bool{held.read[0] || p.read[0], held.read[1] || p.read[1]}
			continue
		}
		if err := held.send(ctx, out); err != nil {
			return err
		}
		held = p
	}
	return held.send(ctx, out)
}

// rebaseWorker does one piece after the other. It belongs to one goroutine.
type rebaseWorker struct {
	m         *rebasing
	old, next []byte
	t         *transfer
}

func (w *rebaseWorker) do(p comparePiece) error {
	old, next := zeroPage[:p.n], zeroPage[:p.n]
	if p.read[0] {
		old = w.old[:p.n]
		if err := w.m.image.Read(old, p.off); err != nil {
			return Wordedf("error while reading from old backing file: %s", err)
		}
	}
	if p.read[1] {
		next = w.next[:p.n]
		if err := w.m.after.Read(next, p.off); err != nil {
			return Wordedf("error while reading from new backing file: %s", err)
		}
	}
	for at := int64(0); at < p.n; {
		n := runOf(old[at:], next[at:])
		if n < 0 {
			if err := w.store(old[at:at-n], p.off+at); err != nil {
				return err
			}
			n = -n
		}
		at += n
	}
	if err := w.t.run(w.m.image); err != nil {
		return Wordedf("Error while writing to COW image: %s", errors.Unwrap(err))
	}
	return nil
}

// store adds writes of p. Behind the old backing file p is zeros, which whole clusters need not have written. To a part of a
// cluster they are written, and zeros that an old backing file holds are like anything else: the image would take a request
// for zeros as done, where it reads zeros already.
func (w *rebaseWorker) store(p []byte, off int64) error {
	for len(p) > 0 {
		if w.t.full() {
			if err := w.t.run(w.m.image); err != nil {
				return Wordedf("Error while writing to COW image: %s", errors.Unwrap(err))
			}
		}
		n, zero := w.m.part(off, int64(len(p)))
		if zero {
			w.t.zero(off, n, false)
		} else {
			w.t.write(p[:n], off)
		}
		p, off = p[n:], off+n
	}
	return nil
}

// part is how many of n bytes at off are stored in one way, and whether as zeros that are not written.
func (m *rebasing) part(off, n int64) (part int64, zero bool) {
	in := off % m.cluster
	switch {
	case off < m.oldEnd || !m.zeros:
		return n, false
	case in != 0:
		return min(n, m.cluster-in), false
	case off+n == m.image.Size():
		return n, true
	case n >= m.cluster:
		return n - n%m.cluster, true
	}
	return n, false
}

// rebaseUnit is the piece in which old and new are compared.
const rebaseUnit = 4 << 10

// runOf is how many bytes at the beginning of a and b are alike in that they are the same, or, below zero, in that each piece
// of them differs.
func runOf(a, b []byte) (n int64) {
	same := false
	for n < int64(len(a)) {
		end := min(n+rebaseUnit, int64(len(a)))
		equal := bytes.Equal(a[n:end], b[n:end])
		if n == 0 {
			same = equal
		} else if equal != same {
			break
		}
		n = end
	}
	if same {
		return n
	}
	return -n
}
