// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhosttest"
	"github.com/sluice-blk/sluice/internal/vhostuser"
	"github.com/sluice-blk/sluice/internal/virtqtest"
)

// guest plays a virtual machine with one queue and one request at a time.
type guest struct {
	*vhosttest.Frontend
	mem        *virtqtest.Memory
	driver     *virtqtest.Driver
	kick, call int
	buf        virtqtest.Buffer // header, data, status
}

const guestData = 4096

// boot connects a guest to the socket and starts its queue.
func boot(path string) (_ *guest, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	g := &guest{kick: -1, call: -1}
	defer func() {
		if err != nil {
			_ = g.off()
		}
	}()
	if g.Frontend, err = vhosttest.Dial(ctx, path); err != nil {
		return nil, err
	}
	wanted := uint64(vhostuser.FeatureVersion1 | vhostuser.FeatureProtocolFeatures | virtioblk.FeatureFlush)
	if err := g.Negotiate(wanted, vhostuser.ProtocolReplyAck|vhostuser.ProtocolConfig); err != nil {
		return nil, err
	}
	if g.mem, err = virtqtest.NewMemory(0, 1<<20); err != nil {
		return nil, err
	}
	if g.driver, err = virtqtest.NewDriver(g.mem, virtqtest.DriverConfig{Size: 16}); err != nil {
		return nil, err
	}
	if g.buf, err = g.mem.Alloc(virtioblk.HeaderSize+guestData+1, 16); err != nil {
		return nil, err
	}
	if g.kick, err = sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK); err != nil {
		return nil, err
	}
	if g.call, err = sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK); err != nil {
		return nil, err
	}
	if err := g.SetMemTable(g.mem.Region()); err != nil {
		return nil, err
	}
	desc, avail, used := g.driver.Addrs()
	return g, g.SetVring(vhosttest.Vring{Size: 16, Desc: desc, Avail: avail, Used: used, Kick: g.kick, Call: g.call, Err: -1})
}

// off is a virtual machine that is switched off without a word.
func (g *guest) off() error {
	var errs []error
	if g.Frontend != nil {
		errs = append(errs, g.Frontend.Close())
	}
	if g.mem != nil {
		errs = append(errs, g.mem.Close())
	}
	for _, fd := range []int{g.kick, g.call} {
		if fd >= 0 {
			errs = append(errs, sys.Close(fd))
		}
	}
	return errors.Join(errs...)
}

// submit offers one request and does not wait for it.
func (g *guest) submit(t virtioblk.RequestType, sector uint64) error {
	virtioblk.Header{Type: t, Sector: sector}.Encode(g.buf.Bytes)
	g.buf.Bytes[len(g.buf.Bytes)-1] = 0xff
	header := virtqtest.Segment{Addr: g.buf.Addr, Len: virtioblk.HeaderSize}
	data := virtqtest.Segment{Addr: g.buf.Addr + virtioblk.HeaderSize, Len: guestData}
	status := virtqtest.Segment{Addr: data.Addr + guestData, Len: 1}
	readable, writable := []virtqtest.Segment{header}, []virtqtest.Segment{status}
	switch t {
	case virtioblk.TypeIn:
		writable = []virtqtest.Segment{data, status}
	case virtioblk.TypeOut:
		readable = append(readable, data)
	}
	if _, ok := g.driver.Add(readable, writable); !ok {
		return fmt.Errorf("the queue is full: %w", g.driver.Err())
	}
	g.driver.Publish()
	return sys.EventfdWrite(g.kick, 1)
}

// wait waits for the answer of the one request and gives its status.
func (g *guest) wait() (virtioblk.Status, error) {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if _, _, ok := g.driver.Used(); ok {
			return virtioblk.Status(g.buf.Bytes[len(g.buf.Bytes)-1]), nil
		}
		if err := g.driver.Err(); err != nil {
			return 0, err
		}
	}
	return 0, errors.New("no answer")
}

func (g *guest) do(t virtioblk.RequestType, sector uint64) error {
	if err := g.submit(t, sector); err != nil {
		return err
	}
	status, err := g.wait()
	if err == nil && status != virtioblk.StatusOK {
		err = fmt.Errorf("status %d", status)
	}
	return err
}

func (g *guest) write(sector uint64, fill byte) error {
	for i := range g.data() {
		g.data()[i] = fill
	}
	return g.do(virtioblk.TypeOut, sector)
}

func (g *guest) read(sector uint64) (first byte, err error) {
	clear(g.data())
	err = g.do(virtioblk.TypeIn, sector)
	return g.data()[0], err
}

func (g *guest) data() []byte {
	return g.buf.Bytes[virtioblk.HeaderSize : virtioblk.HeaderSize+guestData]
}
