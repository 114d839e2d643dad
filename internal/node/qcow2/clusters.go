// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"runtime"
	"sync"

	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

const (
	keptBytes  = 2 << 20 // of unpacked clusters, about
	keptMin    = 4
	keptMax    = 16
	unpackers  = 4 // at most, of one image
	keptNobody = -1
)

// clusterCache keeps the last compressed clusters as they are unpacked. Small reads that follow each other would unpack the
// same cluster again and again else. Unpacking takes the time of a hundred requests, so other threads do it.
type clusterCache struct {
	h     *home
	kept  []kept
	clock uint64
	age   uint64 // what was read at another age may have changed

	work  chan *kept
	ended sync.WaitGroup
}

// kept is one cluster.
type kept struct {
	host   int64 // keptNobody: nothing
	length int
	age    uint64
	used   uint64 // when, by the cache's clock
	users  int    // routines that copy from it, or fill it
	filled bool
	packed []byte
	data   []byte

	filler *routine // waits for the unpacker
	err    error
	post   func() // bound once
}

func (cc *clusterCache) init(h *home) {
	cc.h = h
	cluster := int(h.n.cluster())
	cc.kept = make([]kept, min(max(keptBytes/cluster, keptMin), keptMax))
	for i := range cc.kept {
		k := &cc.kept[i]
		k.host = keptNobody
		k.post = func() { h.run(k.filler) }
	}
}

// forget makes nothing that was read until now known any more.
func (cc *clusterCache) forget() { cc.age++ }

// release ends the unpackers. Nothing is under way.
func (cc *clusterCache) release() {
	if cc.work != nil {
		close(cc.work)
		cc.ended.Wait()
		cc.work = nil
	}
}

// readCompressed fills the next bytes of the job's memory from a compressed cluster. off is the guest's.
func (c *routine) readCompressed(e metadata.Extent, off int64) error {
	k, err := c.h.clusters.get(c, e.Host, e.CompressedLen)
	if err != nil {
		return err
	}
	in := off & (c.h.n.cluster() - 1)
	err = c.mem.fill(k.data[in : in+e.Length])
	c.h.clusters.put(k)
	return err
}

// get gives the cluster whose packed bytes lie at host, unpacked, for the caller to copy from until put.
func (cc *clusterCache) get(c *routine, host int64, length int) (*kept, error) {
	for {
		k, oldest := cc.find(host, length)
		switch {
		case k != nil && k.filled:
			cc.h.count.CompressedHits++
			cc.take(k)
			return k, nil
		case k != nil || oldest == nil: // wait for who fills it, or for a place
			cc.h.wait(func() bool {
				k, oldest := cc.find(host, length)
				return k != nil && k.filled || k == nil && oldest != nil
			})
		default:
			if err := cc.load(c, oldest, host, length); err != nil {
				cc.put(oldest)
				return nil, err
			}
			return oldest, nil
		}
	}
}

func (cc *clusterCache) find(host int64, length int) (k, oldest *kept) {
	for i := range cc.kept {
		k := &cc.kept[i]
		if k.host == host && k.length == length && k.age == cc.age {
			return k, nil
		}
		if k.users == 0 && (oldest == nil || k.used < oldest.used) {
			oldest = k
		}
	}
	return nil, oldest
}

func (cc *clusterCache) take(k *kept) {
	cc.clock++
	k.used = cc.clock
	k.users++
}

func (cc *clusterCache) put(k *kept) { k.users-- }

// load reads and unpacks a cluster. The caller has to put it, also after an error.
func (cc *clusterCache) load(c *routine, k *kept, host int64, length int) error {
	cc.take(k)
	k.host, k.length, k.age, k.filled = host, length, cc.age, false
	cc.h.count.CompressedMisses++
	if k.data == nil {
		k.data = make([]byte, cc.h.n.cluster())
	}
	if cap(k.packed) < k.length {
		k.packed = make([]byte, k.length)
	}
	k.packed = k.packed[:k.length]
	err := store{cc.h.n}.Read(k.packed, k.host)
	if err == nil {
		err = cc.unpack(c, k)
	}
	if err != nil {
		k.host = keptNobody
		return err
	}
	k.filled = true
	return nil
}

// unpack has another thread do it, and waits.
func (cc *clusterCache) unpack(c *routine, k *kept) error {
	if cc.work == nil {
		cc.work = make(chan *kept, len(cc.kept)) // there is room for all, so that the loop never waits here
		for range min(unpackers, runtime.GOMAXPROCS(0)) {
			cc.ended.Add(1)
			go cc.serve(cc.h.n.header.CompressionType, cc.work)
		}
	}
	k.filler = c
	cc.work <- k
	c.suspend()
	k.filler = nil
	return k.err
}

// serve is the life of an unpacker.
func (cc *clusterCache) serve(kind uint8, work <-chan *kept) {
	defer cc.ended.Done()
	u, err := NewUnpacker(kind)
	if err == nil {
		defer u.Close()
	}
	for k := range work {
		if k.err = err; err == nil {
			k.err = u.Unpack(k.data, k.packed)
		}
		cc.h.loop.Post(k.post)
	}
}
