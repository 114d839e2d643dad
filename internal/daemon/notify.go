// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"net"
	"os"
)

// ServiceManager tells the service manager how far the process is, by the protocol of sd_notify(3).
type ServiceManager struct {
	socket string
}

// FindServiceManager reads NOTIFY_SOCKET and removes it from the environment. Without the variable nobody is told.
func FindServiceManager() *ServiceManager {
	m := &ServiceManager{socket: os.Getenv("NOTIFY_SOCKET")}
	_ = os.Unsetenv("NOTIFY_SOCKET") // fails for invalid names only
	return m
}

// Notify sends one assignment such as READY=1 or STOPPING=1.
func (m *ServiceManager) Notify(state string) error {
	if m.socket == "" {
		return nil
	}
	// A leading @ is the abstract name space, in package net as in the protocol.
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: m.socket, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("tell the service manager %s: %w", state, err)
	}
	defer c.Close()
	if _, err := c.Write([]byte(state)); err != nil {
		return fmt.Errorf("tell the service manager %s: %w", state, err)
	}
	return nil
}
