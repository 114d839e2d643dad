// SPDX-License-Identifier: Apache-2.0

// Package daemon owns the lives of things: loops, disks, exports, and what a service has to do around them (sockets,
// their hand-over, readiness, the pid file).
//
// A [Daemon] opens everything that its [Config] names, in the order loops, disks, sockets, servers, or nothing: when a
// step fails, what the earlier ones made is taken down again and the error says which. Whatever a user must see is an
// error of [Daemon.Start], before anybody is told that the daemon is ready. After that the parts stand alone: an export
// or a disk that breaks is logged and the others go on. [Daemon.Stop] goes the other way: clients are served to the end
// of what they have in flight, then the sockets, disks and loops go.
//
// It is control plane throughout: ordinary goroutines, contexts and locks, no part of a request's way. It parses no
// command line and prints nothing; see internal/cli.
package daemon
