// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
)

// The protocol of sd_listen_fds(3): the first socket's descriptor, and a bound on how many are believed.
const (
	listenFDsStart = 3
	listenFDsMax   = DisksMax
)

// HandedSockets are the listening sockets that systemd, or anything that does as systemd does, opened for this process.
// It is not safe for concurrent use.
type HandedSockets struct {
	names []string // by index; the descriptor is listenFDsStart + index
	taken []bool
	why   string // why there are none
}

// TakeHandedSockets reads LISTEN_PID, LISTEN_FDS and LISTEN_FDNAMES and removes them from the environment, so that no
// child takes them for its own. Variables that are meant for another process are ignored.
func TakeHandedSockets() (*HandedSockets, error) {
	pid, fds, names := os.Getenv("LISTEN_PID"), os.Getenv("LISTEN_FDS"), os.Getenv("LISTEN_FDNAMES")
	_, named := os.LookupEnv("LISTEN_FDNAMES")
	for _, v := range []string{"LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID"} {
		if err := os.Unsetenv(v); err != nil {
			return nil, fmt.Errorf("remove %s from the environment: %w", v, err)
		}
	}
	return parseHanded(os.Getpid(), pid, fds, names, named)
}

func parseHanded(self int, pid, fds, names string, named bool) (*HandedSockets, error) {
	if pid == "" {
		return &HandedSockets{why: "LISTEN_PID is not set"}, nil
	}
	if pid != strconv.Itoa(self) {
		return &HandedSockets{why: fmt.Sprintf("LISTEN_PID is %q and this is process %d", pid, self)}, nil
	}
	n, err := strconv.Atoi(fds)
	switch {
	case err != nil || n < 0:
		return nil, fmt.Errorf("take sockets from the service manager: LISTEN_FDS is %q and not a number", fds)
	case n == 0:
		return nil, errors.New("take sockets from the service manager: LISTEN_FDS is 0, no socket was handed in")
	case n > listenFDsMax:
		return nil, fmt.Errorf("take sockets from the service manager: LISTEN_FDS is %d, more than the %d that are supported", n, listenFDsMax)
	}
	h := &HandedSockets{names: make([]string, n), taken: make([]bool, n)}
	if !named {
		return h, nil
	}
	if h.names = strings.Split(names, ":"); len(h.names) != n {
		return nil, fmt.Errorf("take sockets from the service manager: LISTEN_FDNAMES has %d names for %d sockets", len(h.names), n)
	}
	return h, nil
}

// Take gives the socket of that name, or of that index counted from 0. Each can be taken once.
func (h *HandedSockets) Take(ref string) (net.Listener, error) {
	i, err := h.find(ref)
	if err != nil {
		return nil, fmt.Errorf("take socket %q from the service manager: %w", ref, err)
	}
	l, err := ListenerFromFD(listenFDsStart + i)
	if err != nil {
		return nil, fmt.Errorf("take socket %q from the service manager: %w", ref, err)
	}
	h.taken[i] = true
	return l, nil
}

func (h *HandedSockets) find(ref string) (int, error) {
	if len(h.names) == 0 {
		return 0, fmt.Errorf("none was handed in (%s)", h.why)
	}
	i, err := strconv.Atoi(ref)
	if err != nil {
		i, err = h.findName(ref)
	}
	switch {
	case err != nil:
		return 0, err
	case i < 0 || i >= len(h.names):
		return 0, fmt.Errorf("%d were handed in, counted from 0", len(h.names))
	case h.taken[i]:
		return 0, errors.New("it is already in use by another export")
	}
	return i, nil
}

func (h *HandedSockets) findName(name string) (int, error) {
	found := -1
	for i, n := range h.names {
		switch {
		case n != name || n == "":
		case found >= 0:
			return 0, errors.New("several have this name (use systemd:INDEX)")
		default:
			found = i
		}
	}
	if found < 0 {
		return 0, fmt.Errorf("those handed in are named %q", h.names)
	}
	return found, nil
}

// Unused answers an error when a socket was handed in that nobody took: its clients would wait for ever.
func (h *HandedSockets) Unused() error {
	for i, taken := range h.taken {
		if !taken {
			return fmt.Errorf("take sockets from the service manager: %d were handed in and socket %d (named %q) belongs to no export (add --vhost-user systemd:%d)",
				len(h.names), i, h.names[i], i)
		}
	}
	return nil
}
