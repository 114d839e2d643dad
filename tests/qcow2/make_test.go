// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"errors"
	"math/rand/v2"

	"github.com/sluice-blk/sluice/internal/img"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

// make makes the image of the list, by whom the list says.
func (b *bed) make() error {
	if err := b.prepare(); err != nil {
		return err
	}
	switch {
	case b.memory != nil:
		return b.makeInMemory()
	case b.l.Image.By == "ours" && b.tool == "qemu-img":
		return b.makeOurs()
	}
	return b.verb(b.createArgs()...)
}

// inMemory keeps the image in memory, if it is ours to make: most lists need no files and no processes.
func (b *bed) inMemory() {
	if b.l.Image.By == "ours" {
		b.memory = map[string][]byte{}
	}
}

func (l *List) options() create.Options {
	i := &l.Image
	o := create.Options{Size: i.Size, ClusterSize: i.Cluster, RefcountBits: i.Refcount, LazyRefcounts: i.Lazy, ExtendedL2: i.ExtL2}
	if !i.v3() {
		o.Version = 2
	}
	if i.Compression == "zstd" {
		o.CompressionType = 1
	}
	o.Preallocation = map[string]create.Preallocation{"metadata": create.Metadata, "falloc": create.Falloc, "full": create.Full}[i.Prealloc]
	if len(l.Backing) > 0 {
		o.BackingFile, o.BackingFormat = backingName(0), l.Backing[0].Format
	}
	if l.Data != "" {
		o.DataFile, o.DataFileRaw = dataName, l.Data == "raw"
	}
	return o
}

func (b *bed) makeInMemory() error {
	s := &scheduler{Rand: rand.New(rand.NewPCG(1, 1)), log: new(log)}
	file, data, o := &device{s: s}, &device{s: s, of: 1}, b.l.options()
	if o.Preallocation == create.Falloc {
		o.Preallocation = create.Full // memory has nothing to set aside
	}
	if b.l.Data != "" {
		o.Data = data
	}
	_, err := create.Create(file, &o)
	b.memory[imageName], b.memory[dataName] = file.file, data.file
	return err
}

func (b *bed) makeOurs() (err error) {
	o := b.l.options()
	if b.l.Data != "" {
		data, err := img.CreateStore(b.path(dataName), img.StoreOptions{})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, data.Close()) }()
		o.Data = data
	}
	s, err := img.CreateStore(b.path(imageName), img.StoreOptions{})
	if err != nil {
		return err
	}
	_, err = create.Create(s, &o)
	return errors.Join(err, s.Close())
}
