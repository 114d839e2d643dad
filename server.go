// SPDX-License-Identifier: Apache-2.0

package sluice

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"

	"github.com/sluice-blk/sluice/internal/daemon"
)

// Server offers disks to virtual machines. The zero value is ready for use. Its methods are safe for concurrent use: one
// server can serve many disks, and many sockets for one disk, each call in its own goroutine.
type Server struct {
	// Logger hears of clients that came and went and of what they did wrong. Nil drops it.
	Logger *slog.Logger
}

// VhostUserOptions say how a disk looks to the guest. The zero value, and a nil pointer, work.
type VhostUserOptions struct {
	Serial string // serial number, at most 20 bytes
	Queues int    // queues offered, at most 256; 0: one a loop
}

// ListenUnix makes a listening UNIX socket at path. A socket file that a dead server left behind is replaced; one that a
// server still answers on is refused. Closing the listener removes the file.
func ListenUnix(path string) (net.Listener, error) {
	l, err := daemon.ListenUnix(path)
	if err != nil {
		return nil, err
	}
	return l, nil
}

// ServeVhostUser offers d as a virtio-blk device to the vhost-user front-ends that connect to l, a UNIX socket, one after
// the other. It returns nil when ctx has ended and the guest's requests in flight are finished, and an error when d is
// closed, the options make no sense or the listener fails. l stays the caller's to close.
func (s *Server) ServeVhostUser(ctx context.Context, l net.Listener, d *Disk, o *VhostUserOptions) error {
	if o == nil {
		o = &VhostUserOptions{}
	}
	log := s.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	d.calls.RLock()
	defer d.calls.RUnlock()
	if !d.open {
		return fmt.Errorf("serve vhost-user: %w", ErrClosed)
	}
	return d.disk.ServeVhostUser(ctx, l, &daemon.DeviceOptions{Serial: o.Serial, Queues: o.Queues}, log)
}

// ListenAndServeVhostUser makes the socket at path, as [ListenUnix] does, and serves d on it. It removes the socket file
// when it returns.
func (s *Server) ListenAndServeVhostUser(ctx context.Context, path string, d *Disk, o *VhostUserOptions) error {
	l, err := ListenUnix(path)
	if err != nil {
		return err
	}
	err = s.ServeVhostUser(ctx, l, d, o)
	return errors.Join(err, l.Close())
}
