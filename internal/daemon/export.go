// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"log/slog"
	"net"

	"github.com/sluice-blk/sluice/internal/export/vhostblk"
	"github.com/sluice-blk/sluice/internal/vhostuser"
)

// export is one vhost-user-blk socket of a disk.
type export struct {
	disk     *Disk
	name     string
	listener net.Listener
	log      *slog.Logger
	device   *vhostblk.Device
	sessions vhostuser.Stats
}

func (e *export) makeDevice() (err error) {
	c := &e.disk.config
	e.device, err = e.disk.newDevice(&DeviceOptions{Serial: c.Serial, Queues: len(e.disk.loopOf), loopOf: e.disk.loopOf}, e.log)
	return err
}

func (e *export) closeDevice() error { return e.device.Close() }

// serve returns when ctx has ended and the queues are drained, or when the listener broke.
func (e *export) serve(ctx context.Context) {
	s := vhostuser.NewServer(e.listener, e.device, &vhostuser.ServerOptions{Logger: e.log, Stats: &e.sessions})
	if err := s.Serve(ctx); err != nil {
		e.log.Error("export has ended, the others go on", "err", err)
	}
}
