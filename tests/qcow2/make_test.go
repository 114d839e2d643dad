// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"errors"

	"github.com/sluice-blk/sluice/internal/img"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

// make makes the image of the list, by whom the list says.
func (b *bed) make() error {
	if b.l.Image.By == "ours" {
		return b.makeOurs()
	}
	return qemuImg(b.dir, b.createArgs()...)
}

func (b *bed) makeOurs() (err error) {
	i := &b.l.Image
	o := create.Options{Size: i.Size, ClusterSize: i.Cluster, RefcountBits: i.Refcount, LazyRefcounts: i.Lazy, ExtendedL2: i.ExtL2}
	if !i.v3() {
		o.Version = 2
	}
	if i.Compression == "zstd" {
		o.CompressionType = 1
	}
	o.Preallocation = map[string]create.Preallocation{"metadata": create.Metadata, "falloc": create.Falloc, "full": create.Full}[i.Prealloc]
	if len(b.l.Backing) > 0 {
		o.BackingFile, o.BackingFormat = backingName(0), b.l.Backing[0].Format
	}
	if b.l.Data != "" {
		data, err := img.CreateStore(b.path(dataName), img.StoreOptions{})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, data.Close()) }()
		o.DataFile, o.DataFileRaw, o.Data = dataName, b.l.Data == "raw", data
	}
	s, err := img.CreateStore(b.path(imageName), img.StoreOptions{})
	if err != nil {
		return err
	}
	_, err = create.Create(s, &o)
	return errors.Join(err, s.Close())
}
