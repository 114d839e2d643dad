// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"time"

	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhosttest"
	"github.com/sluice-blk/sluice/internal/vhostuser"
	"github.com/sluice-blk/sluice/internal/virtqtest"
)

// guest plays a virtual machine that asks and does not wait.
type guest struct {
	front  *vhosttest.Frontend
	mem    *virtqtest.Memory
	driver *virtqtest.Driver
	kick   int
}

func newGuest(socket string) (*guest, error) { return newGuestWith(socket, 16) }

// newGuestWith is newGuest with so many descriptors in its queue.
func newGuestWith(socket string, size int) (g *guest, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	g = &guest{kick: -1}
	defer func() {
		if err != nil {
			g.close()
		}
	}()
	if g.front, err = vhosttest.Dial(ctx, socket); err != nil {
		return g, err
	}
	if err = g.front.Negotiate(vhostuser.FeatureVersion1|vhostuser.FeatureEventIdx|vhostuser.FeatureProtocolFeatures, vhostuser.ProtocolReplyAck); err != nil {
		return g, err
	}
	if g.mem, err = virtqtest.NewMemory(0, 1<<20); err != nil {
		return g, err
	}
	if g.driver, err = virtqtest.NewDriver(g.mem, virtqtest.DriverConfig{Size: uint16(size), EventIdx: true}); err != nil {
		return g, err
	}
	if g.kick, err = sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK); err != nil {
		return g, err
	}
	if err = g.front.SetMemTable(g.mem.Region()); err != nil {
		return g, err
	}
	desc, avail, used := g.driver.Addrs()
	return g, g.front.SetVring(vhosttest.Vring{Size: size, Desc: desc, Avail: avail, Used: used, Kick: g.kick, Call: -1, Err: -1})
}

// readAndForget offers a read of one sector.
func (g *guest) readAndForget() error {
	b, err := g.mem.Alloc(virtioblk.HeaderSize+512+1, 16)
	if err != nil {
		return err
	}
	virtioblk.Header{Type: virtioblk.TypeIn}.Encode(b.Bytes)
	header := virtqtest.Segment{Addr: b.Addr, Len: virtioblk.HeaderSize}
	answer := virtqtest.Segment{Addr: b.Addr + virtioblk.HeaderSize, Len: 512 + 1}
	if _, ok := g.driver.Add([]virtqtest.Segment{header}, []virtqtest.Segment{answer}); !ok {
		return errors.New("the queue has no room")
	}
	g.driver.Publish()
	return sys.EventfdWrite(g.kick, 1)
}

// taken waits until the server has taken what was offered: it then asks for a kick at what comes next.
func (g *guest) taken(patience time.Duration) error {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if g.driver.AvailEvent() == g.driver.AvailIdx() {
			return nil
		}
	}
	return errors.New("the server does not take the request")
}

func (g *guest) close() {
	if g.front != nil {
		g.front.Close()
	}
	if g.mem != nil {
		g.mem.Close()
	}
	if g.kick >= 0 {
		sys.Close(g.kick)
	}
}
