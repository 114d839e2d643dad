// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/format/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
	"github.com/sluice-blk/sluice/internal/sys"
)

// sector is the unit that a disk's size is told in.
const sector = 512

// spanClusters is how many clusters are discarded or zeroed at a time.
const spanClusters = 16384

// zeroBytes is the memory that zeros are written from, many times over in one request.
const zeroBytes = 64 << 10

// ErrAlign says that the node below wants requests to be aligned more coarsely than the image's clusters are. It carries
// EINVAL.
var ErrAlign = fmt.Errorf("alignment of the file is coarser than the image's clusters, or than the size of its disk: %w", syscall.EINVAL)

// Options say how an image is opened. The zero value opens it for reading and writing.
type Options struct {
	ReadOnly bool
	// Snapshot shows an internal snapshot, by its ID or name, in place of the disk. It needs ReadOnly.
	Snapshot string
	// L2CacheBytes and RefcountCacheBytes bound what is kept of the tables; 0 chooses. See metadata.Options.
	L2CacheBytes       int64
	RefcountCacheBytes int64
	// KeepOnDiscard leaves discarded clusters allocated, reading as zeros.
	KeepOnDiscard bool
	// IgnoreDiscard keeps freed space in the file.
	IgnoreDiscard bool
}

// Node is an open image. It implements block.Node and block.Mapper.
type Node struct {
	o      Options
	file   *block.Handle // the image
	host   *block.Handle // what holds the guest's clusters: file, or the external data file
	limit  int64         // how far the image file can reach
	img    *metadata.Image
	view   *metadata.Image // what is shown: img, or a snapshot of it
	header *qcow2.Header
	info   block.Info
	zeros  []byte // mapped

	backing     *block.Handle // nil: none
	backingSize int64

	onDamage atomic.Pointer[func(error)]

	mu     sync.Mutex
	home   *home // written with mu held on its loop, and so read there without
	closed bool
}

// Open opens the image in file and takes it over: closing the node closes it. When Open fails, file stays the caller's.
// An image that has an external data file must be given it with SetDataFile before it is used, and SetBacking says what
// stands behind it; without, what the image does not have reads as zeros.
func Open(file block.Node, o *Options) (*Node, error) {
	n := &Node{}
	if o != nil {
		n.o = *o
	}
	i := file.Info()
	if n.o.Snapshot != "" && !n.o.ReadOnly {
		return nil, fmt.Errorf("open snapshot %q of %s: a snapshot is read-only: %w (set readonly)", n.o.Snapshot, i.Name, syscall.EINVAL)
	}
	n.o.ReadOnly = n.o.ReadOnly || i.ReadOnly
	n.info.Name, n.info.ReadOnly = i.Name, n.o.ReadOnly
	n.limit = i.Size
	n.file = block.NewHandle(file, nil)
	n.host = n.file
	if err := n.open(); err != nil {
		return nil, errors.Join(fmt.Errorf("open qcow2 image %s: %w", i.Name, err), n.freeMemory())
	}
	return n, nil
}

func (n *Node) open() error {
	var err error
	if n.zeros, err = sys.MmapAnon(zeroBytes); err != nil {
		return fmt.Errorf("map zeros: %w", err)
	}
	err = n.alone(func() error {
		img, err := metadata.Open(store{n}, &metadata.Options{
			ReadOnly: n.o.ReadOnly, L2CacheBytes: n.o.L2CacheBytes, RefcountCacheBytes: n.o.RefcountCacheBytes,
			KeepOnDiscard: n.o.KeepOnDiscard, NoDiscard: n.o.IgnoreDiscard, Waiter: waiter{n}, Data: dataStore{store{n}},
			Damaged: n.damaged,
		})
		if err != nil {
			return err
		}
		n.img, n.view = img, img
		if n.o.Snapshot != "" {
			if n.view, err = img.OpenSnapshot(n.o.Snapshot); err != nil {
				return errors.Join(fmt.Errorf("snapshot %q: %w", n.o.Snapshot, err), img.Close())
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	n.header = n.img.Header()
	n.info = n.describe()
	return n.checkAlign()
}

// checkAlign refuses a node below whose blocks are larger than the pieces in which the image is read and written.
func (n *Node) checkAlign() error {
	i := &n.info
	if int64(i.Align) > n.img.ZeroUnit() || i.Size%int64(i.Align) != 0 {
		return fmt.Errorf("%w (use cache=writeback)", ErrAlign)
	}
	return nil
}

// describe says in block's words what the image is.
func (n *Node) describe() block.Info {
	d := n.host.Node().Info()
	i := block.Info{
		Name:          n.info.Name,
		Size:          n.view.Size() / sector * sector,
		ReadOnly:      n.o.ReadOnly,
		Align:         max(d.Align, 1),
		MemAlign:      max(d.MemAlign, 1),
		OptimalIO:     d.OptimalIO,
		LogicalBlock:  max(d.LogicalBlock, sector),
		PhysicalBlock: max(d.PhysicalBlock, sector),
		MaxTransfer:   d.MaxTransfer,
		MaxSegments:   d.MaxSegments,
		DiscardAlign:  n.img.ZeroUnit(),
		// What tables say of so many clusters is changed in a moment; others have a turn in between.
		MaxDiscard:     spanClusters * n.cluster(),
		MaxWriteZeroes: spanClusters * n.cluster(),
		Flush:          block.Native,
		FUA:            block.Emulated,
		Discard:        block.Native,
		WriteZeroes:    block.Native,
		WriteCache:     true,
		SingleLoop:     true,
		Durability: "flush writes the image's tables in an order that a crash at any point survives, and makes them and all data durable; " +
			"below it: " + d.Durability,
	}
	if n.o.ReadOnly {
		i.Discard, i.WriteZeroes, i.WriteCache = block.None, block.None, false
	}
	return i
}

// cluster is the size of a cluster; before the header has been read it is the largest that there is.
func (n *Node) cluster() int64 {
	if n.header == nil {
		return 1 << qcow2.MaxClusterBits
	}
	return int64(1) << n.header.ClusterBits
}

// Header is the image's header as it was opened. It is not the caller's to change.
func (n *Node) Header() *qcow2.Header { return n.header }

// SetBacking says what stands behind the image, and takes it over. It comes before the first queue.
func (n *Node) SetBacking(b block.Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.img.AssumeBacking()
	n.backing = block.NewHandle(b, &block.HandleOptions{ReadOnly: true})
	n.backingSize = n.backing.Info().Size
}

// SetDataFile gives the image its external data file, and takes it over. It comes before the first queue. When it fails,
// the file stays the caller's.
func (n *Node) SetDataFile(d block.Node) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	before := n.host
	n.host = block.NewHandle(d, nil)
	info := n.info
	n.info = n.describe()
	if err := n.checkAlign(); err != nil {
		n.host, n.info = before, info
		return fmt.Errorf("use %s as the data file of %s: %w", d.Info().Name, n.info.Name, err)
	}
	return nil
}

// OnDamage has fn told, once and on the image's loop, why the image takes no more writes. fn must not wait. May be called
// from any goroutine.
func (n *Node) OnDamage(fn func(why error)) { n.onDamage.Store(&fn) }

func (n *Node) damaged(why error) {
	if fn := n.onDamage.Load(); fn != nil {
		(*fn)(why)
	}
}

// NeedsDataFile tells that the image has an external data file, which has not been given.
func (n *Node) NeedsDataFile() bool { return n.header.HasDataFile() && n.host == n.file }

// Info implements block.Node.
func (n *Node) Info() block.Info {
	i := n.info
	i.Engine = n.host.Node().Info().Engine
	return i
}

// Queue implements block.Node. Must be called on the loop.
func (n *Node) Queue(l *aio.Loop) (block.Queue, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch {
	case n.closed:
		return nil, fmt.Errorf("image %s is closed: %w", n.info.Name, syscall.EBADF)
	case n.NeedsDataFile():
		return nil, fmt.Errorf("image %s has an external data file, which is not open: %w", n.info.Name, syscall.ENOENT)
	case n.home == nil:
		h, err := newHome(n, l)
		if err != nil {
			return nil, err
		}
		n.home = h
	case n.home.loop != l:
		return nil, fmt.Errorf("image %s is at home on another loop: %w", n.info.Name, block.ErrBusy)
	}
	n.home.users++
	return &queue{h: n.home}, nil
}

// release takes one user off, and closes the home with the last. Must be called on its loop.
func (n *Node) release(h *home) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if h.users--; h.users > 0 {
		return nil
	}
	n.home = nil
	return h.close()
}

// Close commits what is not yet durable and closes the image, and what was given to it. Where that fails the image is
// closed too, and is as after a crash: nothing that was flushed is missing.
func (n *Node) Close() error {
	n.mu.Lock()
	if n.closed {
		n.mu.Unlock()
		return nil
	}
	if n.home != nil {
		n.mu.Unlock()
		return fmt.Errorf("close image %s: a queue is open: %w", n.info.Name, block.ErrBusy)
	}
	n.closed = true
	n.mu.Unlock()
	err := n.alone(func() error {
		if n.view != n.img {
			return errors.Join(n.view.Close(), n.img.Close())
		}
		return n.img.Close()
	})
	if err != nil {
		err = fmt.Errorf("close image %s: %w", n.info.Name, err)
	}
	return errors.Join(err, n.free())
}

// free closes what stands below and behind.
func (n *Node) free() error {
	var errs []error
	if n.backing != nil {
		errs = append(errs, n.backing.Close())
	}
	if n.host != n.file {
		errs = append(errs, n.host.Close())
	}
	return errors.Join(append(errs, n.file.Close(), n.freeMemory())...)
}

func (n *Node) freeMemory() error {
	if n.zeros == nil {
		return nil
	}
	err := sys.Munmap(n.zeros)
	n.zeros = nil
	return err
}

// waiter parks routines of whatever home the image has.
type waiter struct{ n *Node }

// Wait implements metadata.Waiter.
func (w waiter) Wait(ready func() bool) { w.n.home.wait(ready) }
