// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"errors"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/qcow2/metadata"
)

// home is an image on its loop: the queues below and what is under way. It is made with the first queue of the image and
// goes with the last. All of it belongs to the loop.
type home struct {
	scheduler
	n     *Node
	users int // guarded by n.mu: queues, and what the control plane does

	data    block.Queue        // the node with the host clusters, for requests that go there as they are
	host    *block.HandleQueue // the same behind its guard, for everything else
	meta    *block.HandleQueue // the image file; host where there is no external data file
	backing *block.HandleQueue // nil: none

	exits    [256]exit
	relays   *relay
	rooms    roomPool
	clusters clusterCache
	count    Counters
}

// newHome must be called on the loop.
func newHome(n *Node, l *aio.Loop) (*home, error) {
	h := &home{n: n}
	h.loop = l
	h.kick.Done = (*kicker)(h)
	for i := range h.exits {
		h.exits[i] = exit{h, metadata.Ticket(i)}
	}
	h.clusters.init(h)
	err := h.rooms.init(h)
	if err == nil {
		err = h.openBelow()
	}
	if err != nil {
		h.rooms.release()
		return nil, errors.Join(err, h.closeBelow())
	}
	return h, nil
}

func (h *home) openBelow() (err error) {
	if h.meta, err = h.n.file.Queue(h.loop); err != nil {
		return err
	}
	if h.n.host == h.n.file {
		h.host = h.meta
	} else if h.host, err = h.n.host.Queue(h.loop); err != nil {
		return err
	}
	if h.data, err = h.n.host.Node().Queue(h.loop); err != nil {
		return err
	}
	if h.n.backing != nil {
		h.backing, err = h.n.backing.Queue(h.loop)
	}
	return err
}

func (h *home) closeBelow() error {
	var errs []error
	if h.host != nil && h.host != h.meta {
		errs = append(errs, h.host.Close())
	}
	for _, q := range []*block.HandleQueue{h.meta, h.backing} {
		if q != nil {
			errs = append(errs, q.Close())
		}
	}
	if h.data != nil {
		errs = append(errs, h.data.Close())
	}
	return errors.Join(errs...)
}

// close must be called on the loop, with nothing under way.
func (h *home) close() error {
	h.stopRoutines()
	h.rooms.release()
	h.clusters.release()
	return h.closeBelow()
}

// exit is the completer of a request that went to its host cluster as it is: it ends the request's stay in the tables.
type exit struct {
	h *home
	t metadata.Ticket
}

// Complete hands the outcome on.
func (e *exit) Complete(r *block.Request, err error) {
	e.h.n.img.Exit(e.t)
	e.h.changed()
	r.Finish(err)
}

// pass hands a request to the node with the host clusters, to be carried out at host. It is false when too many layers want
// the request back.
func (h *home) pass(r *block.Request, host int64) bool {
	t := h.n.img.Enter()
	if !r.Intercept(&h.exits[t]) {
		h.n.img.Exit(t)
		return false
	}
	r.Offset = host
	h.data.Submit(r)
	return true
}

// relay carries out a request by another one, so that a chain of images may be longer than a request has room for layers.
type relay struct {
	h      *home
	req    block.Request
	parent *block.Request
	next   *relay
}

// behind reads from the backing node.
func (h *home) behind(r *block.Request) {
	y := h.relays
	if y == nil {
		y = &relay{h: h}
		y.req.Done = y
	} else {
		h.relays, y.next = y.next, nil
	}
	y.parent = r
	q := &y.req
	q.Op, q.Flags, q.Offset, q.Length, q.Mem = r.Op, 0, r.Offset, r.Length, r.Mem
	q.ForgetTimes()
	h.backing.Submit(q)
}

// Complete hands the outcome on.
func (y *relay) Complete(q *block.Request, err error) {
	r := y.parent
	r.AdoptTimes(q)
	y.parent, q.Mem = nil, nil
	y.next, y.h.relays = y.h.relays, y
	r.Finish(err)
}
