// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-blk/sluice/internal/daemon"
	"github.com/sluice-blk/sluice/internal/sys"
)

// serveFlags are the flags of serve.
type serveFlags struct {
	disks   diskList
	loops   loopFlags
	log     logFlags
	pidFile string
	readyFD int
	control string
	trace   string
}

func newServe(s Streams) *cobra.Command {
	f := &serveFlags{}
	cmd := &cobra.Command{
		Use:     "serve --disk PATH[,key=value...] --vhost-user SOCKET ...",
		Short:   "Serve disks to virtual machines",
		Long:    serveText(),
		Example: serveExamples,
		Args:    noArgs,
		RunE:    verb(func(*cobra.Command, []string) error { return f.run(s) }),
	}
	set := cmd.Flags()
	set.SortFlags = false
	set.Var(diskFlag{&f.disks}, "disk", "begin a disk; see above")
	set.Var(exportFlag{&f.disks}, "vhost-user", "export the disk before it as vhost-user-blk; see above")
	f.loops.add(set)
	set.StringVar(&f.control, "control", "", "make this UNIX socket, for sluice ctl; only the same user may connect")
	set.IntVar(&f.readyFD, "ready-fd", -1, "write a line to this inherited file descriptor when ready, and close it")
	set.StringVar(&f.pidFile, "pidfile", "", "write the process number to this file when ready")
	set.StringVar(&f.trace, "trace", "", "at the end write the requests of the last moments to this file, for ui.perfetto.dev")
	f.log.add(set)
	return cmd
}

const serveExamples = `  # one disk, one virtual machine
  sluice serve --disk disk.raw --vhost-user /run/disk.sock

  # the matching QEMU: guest memory must be shared
  qemu-system-x86_64 -m 1G \
    -object memory-backend-memfd,id=mem,size=1G,share=on -machine memory-backend=mem \
    -chardev socket,id=c,path=/run/disk.sock -device vhost-user-blk-pci,chardev=c

  # two disks on two pinned loops
  sluice serve --loops 2 --pin \
    --disk /dev/vg/data,queues=4,serial=DATA --vhost-user /run/data.sock \
    --disk iso.raw,readonly --vhost-user /run/iso.sock

  # the first queue on loop 0, which other disks may keep busy, four more on
  # loops 1 and 2
  sluice serve --loops 3 --disk disk.raw,queues=1@0+4@1-2 --vhost-user /run/disk.sock

  # a qcow2 image, and what a snapshot of it holds, beside it
  sluice serve --disk disk.qcow2,format=qcow2,l2-cache-size=8M --vhost-user /run/disk.sock
  sluice serve --disk disk.qcow2,format=qcow2,snapshot=monday,readonly,lock=shared --vhost-user /run/monday.sock

  # a disk without storage behind it, for measuring
  sluice serve --disk driver=null,size=1T --vhost-user /run/null.sock`

func serveText() string {
	var b strings.Builder
	b.WriteString(strings.TrimSpace(`
Serve disks until SIGTERM, SIGINT or SIGHUP. Then requests in flight are
finished, the sockets and the image locks go, and the exit status is 0. A second
signal ends at once, with status 1; one that follows the first within a quarter
of a second is its echo and changes nothing.

A --disk begins a disk, and the exports after it are that disk's. A disk is

  PATH[,key=value...]  or  driver=null|mem,size=SIZE[,key=value...]

A comma in a value is doubled. Sizes take K, M, G, T (1024) and so on. Keys:
`))
	b.WriteString("\n\n")
	for _, k := range diskKeys {
		fmt.Fprintf(&b, "  %s=%s\n", k.name, k.want)
		for _, line := range wrap(k.help, 66) {
			fmt.Fprintf(&b, "          %s\n", line)
		}
	}
	b.WriteString(strings.TrimRight(`
An export is --vhost-user with one of

  PATH          make a UNIX socket; a stale one is replaced, a live one refused
  fd:N          a listening UNIX socket inherited as file descriptor N
  systemd:NAME  a socket of the service manager's, by its FileDescriptorName,
  systemd:N     or by its index, counted from 0 (see systemd.socket(5))

Readiness: when everything is open and listens, the line "ready" is written to
standard output, READY=1 sent to the service manager, and --ready-fd written.
The log goes to standard error. It tells which poller and engine serve, and why.

An image is locked as QEMU locks it, so that two processes cannot write one.`, "\n"))
	return b.String()
}

// wrap breaks text at spaces into lines of at most width bytes.
func wrap(text string, width int) []string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}

func (f *serveFlags) run(s Streams) error {
	log, err := f.log.logger(s.Err)
	if err != nil {
		return &usage{err}
	}
	if err := f.disks.check(); err != nil {
		return &usage{err}
	}
	loops, err := f.loops.configs()
	if err != nil {
		return &usage{err}
	}
	ready, err := f.openReady()
	if err != nil {
		return &usage{err}
	}
	manager := daemon.FindServiceManager()
	handed, err := daemon.TakeHandedSockets()
	if err != nil {
		return err
	}
	disks, err := f.disks.resolve(handed)
	if err != nil {
		return err
	}
	daemon.TuneRuntime(len(loops))
	if w := daemon.RuntimeWarning(); w != "" {
		log.Warn(w)
	}
	d, err := daemon.New(daemon.Config{Loops: loops, Disks: disks, Control: f.control, Trace: f.trace, Logger: log})
	if err != nil {
		return &usage{err}
	}
	v := &service{daemon: d, log: log, out: s.Out, ready: ready, pidFile: f.pidFile, manager: manager}
	return v.run()
}

// openReady takes over the descriptor of --ready-fd, and finds out before anything is opened whether it is one.
func (f *serveFlags) openReady() (*os.File, error) {
	switch {
	case f.readyFD == -1:
		return nil, nil
	case f.readyFD < 1:
		return nil, fmt.Errorf("--ready-fd is %d (want a descriptor from 1)", f.readyFD)
	}
	if err := sys.SetCloexec(f.readyFD); err != nil {
		return nil, fmt.Errorf("--ready-fd: file descriptor %d was not handed in: %w", f.readyFD, err)
	}
	return os.NewFile(uintptr(f.readyFD), "ready-fd"), nil
}
