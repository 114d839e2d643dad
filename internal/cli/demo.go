// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-blk/sluice/internal/demo"
	"github.com/sluice-blk/sluice/internal/guestvm"
)

// demoFlags are the flags of demo.
type demoFlags struct {
	dir     string
	format  string
	noGuest bool
	runtime time.Duration
	accel   string
	kernel  string
	console bool
	log     logFlags
}

func newDemo(s Streams) *cobra.Command {
	f := &demoFlags{}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Have a real guest work on a disk, and show what batching gives",
		Long: strings.TrimSpace(`
Make a 1 GiB disk, raw or qcow2, serve it over vhost-user-blk, boot a Linux guest on it under
QEMU, and have the guest make a file system, write files, run a verified random
write job, trim, sync and power off. Then check on the host that the file system
is clean and that the files hold what the guest wrote.

A second, read-only image is read by the job of the batching series (4k random
reads, libaio, direct, 4 jobs of depth 64), once for each engine that this kernel
has, with batching off and on. One table shows the outcome. Requests per
submission and per notification are counted by the server. Under software
emulation the guest is the limit, so that IOPS and latency say little there.

Where QEMU, a static busybox or a kernel cannot be had, or with --no-guest, the
built-in driver does the same jobs, and the report says so.`),
		Example: `  sluice demo
  sluice demo --format qcow2
  sluice demo --no-guest --runtime 5s`,
		Args: noArgs,
		RunE: verb(func(cmd *cobra.Command, _ []string) error { return f.run(cmd, s) }),
	}
	set := cmd.Flags()
	set.SortFlags = false
	set.StringVar(&f.format, "format", "raw", "raw or qcow2: the format of the disks")
	set.BoolVar(&f.noGuest, "no-guest", false, "use the built-in driver in place of a guest")
	set.DurationVar(&f.runtime, "runtime", 3*time.Second, "how long each row of the table is measured")
	set.StringVar(&f.dir, "dir", "", "where to make the images, 1.3 GiB at most (default: the directory for temporary files)")
	set.StringVar(&f.accel, "accel", "auto", "auto, kvm or tcg; auto takes KVM where it boots the kernel")
	set.StringVar(&f.kernel, "kernel", "", "a bzImage, or a directory that holds one and its modules (default: the host's or Debian's)")
	set.BoolVar(&f.console, "console", false, "show the guest's console")
	f.log.add(set)
	f.log.quiet(set)
	return cmd
}

func (f *demoFlags) run(cmd *cobra.Command, s Streams) error {
	log, err := f.log.logger(s.Err)
	if err != nil {
		return &usage{err}
	}
	switch f.accel {
	case "auto", "kvm", "tcg":
	default:
		return &usage{fmt.Errorf("--accel is %q (want auto, kvm or tcg)", f.accel)}
	}
	if f.format != "raw" && f.format != "qcow2" {
		return &usage{fmt.Errorf("--format is %q (want raw or qcow2)", f.format)}
	}
	if f.runtime < time.Second {
		return &usage{fmt.Errorf("--runtime is %v (want at least 1s)", f.runtime)}
	}
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var console io.Writer
	if f.console {
		console = s.Err
	}
	report, err := demo.Run(ctx, demo.Options{
		Dir: f.dir, Format: f.format, Runtime: f.runtime, NoGuest: f.noGuest, Accel: guestvm.Accel(f.accel), Kernel: f.kernel,
		Out: s.Out, Console: console, Log: log,
	})
	if err != nil {
		return err
	}
	return report.WriteText(s.Out)
}
