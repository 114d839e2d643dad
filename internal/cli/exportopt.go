// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/sluice-blk/sluice/internal/daemon"
)

// exportOption is what --vhost-user names: a path, an inherited descriptor, or a socket of the service manager's.
type exportOption struct {
	text    string // as it was given
	path    string
	fd      int    // above 2, or 0 when it is not one
	systemd string // name or index
}

// parseExport reads PATH, fd:N, systemd:NAME or systemd:INDEX. A comma in a path is doubled, as it is in --disk.
func parseExport(s string) (exportOption, error) {
	items := splitOptions(s)
	if len(items) > 1 {
		return exportOption{}, fmt.Errorf("unknown option %q: vhost-user takes none (a comma in a path is written twice)", items[1])
	}
	e := exportOption{text: s}
	kind, rest, ok := strings.Cut(items[0], ":")
	switch {
	case items[0] == "":
		return e, errors.New("no socket is given")
	case ok && kind == "fd":
		n, err := strconv.ParseUint(rest, 10, 20)
		if err != nil || n < 3 {
			return e, fmt.Errorf("%q is not an inherited file descriptor (want fd:N with N from 3)", items[0])
		}
		e.fd = int(n)
	case ok && kind == "systemd":
		if rest == "" {
			return e, errors.New("no socket is named (want systemd:NAME or systemd:INDEX)")
		}
		e.systemd = rest
	default:
		e.path = items[0]
	}
	return e, nil
}

// resolve makes the configuration of the export, taking over the sockets that were handed in.
func (e *exportOption) resolve(handed *daemon.HandedSockets) (daemon.ExportConfig, error) {
	c := daemon.ExportConfig{Socket: e.path, Name: e.text}
	var err error
	switch {
	case e.fd != 0:
		c.Listener, err = daemon.ListenerFromFD(e.fd)
	case e.systemd != "":
		c.Listener, err = handed.Take(e.systemd)
	}
	return c, err
}

// diskOption is one disk of the command line, with the exports that followed it.
type diskOption struct {
	config  daemon.DiskConfig
	exports []exportOption
}

// diskList is what --disk and the export flags append to, in the order of the command line.
type diskList []diskOption

// diskFlag and exportFlag are the two ways to append; they implement pflag.Value.
type (
	diskFlag   struct{ list *diskList }
	exportFlag struct{ list *diskList }
)

func (f diskFlag) Type() string   { return "PATH[,key=value...]" }
func (f diskFlag) String() string { return "" }

func (f diskFlag) Set(s string) error {
	c, err := parseDisk(s)
	if err != nil {
		return err
	}
	*f.list = append(*f.list, diskOption{config: c})
	return nil
}

func (f exportFlag) Type() string   { return "SOCKET" }
func (f exportFlag) String() string { return "" }

func (f exportFlag) Set(s string) error {
	if len(*f.list) == 0 {
		return errors.New("it stands before any --disk (an export belongs to the disk before it)")
	}
	e, err := parseExport(s)
	if err != nil {
		return err
	}
	last := &(*f.list)[len(*f.list)-1]
	last.exports = append(last.exports, e)
	return nil
}

// check finds what is missing.
func (l diskList) check() error {
	if len(l) == 0 {
		return errors.New("no --disk is given")
	}
	for i := range l {
		if len(l[i].exports) == 0 {
			return fmt.Errorf("disk %s has no export (follow it with --vhost-user SOCKET)", l[i].config.Name())
		}
	}
	return nil
}

// resolve makes the configurations of all disks. Sockets that were handed in and belong to no export are an error.
func (l diskList) resolve(handed *daemon.HandedSockets) ([]daemon.DiskConfig, error) {
	disks := make([]daemon.DiskConfig, len(l))
	for i := range l {
		disks[i] = l[i].config
		for j := range l[i].exports {
			e, err := l[i].exports[j].resolve(handed)
			if err != nil {
				return nil, fmt.Errorf("export disk %s: %w", disks[i].Name(), err)
			}
			disks[i].Exports = append(disks[i].Exports, e)
		}
	}
	return disks, handed.Unused()
}
