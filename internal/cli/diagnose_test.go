// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/aio"
)

// good is a machine on which nothing is lacking.
func good() machine {
	return machine{
		release: "6.12.1-amd64", arch: "x86_64", cpus: 8, poller: aio.PollerIOUring, pollerReason: "the best that there is",
		uringDisabled: "0", aioUsed: 0, aioMax: 65536, memlock: math.MaxUint64, files: 65536, filesHard: 65536,
		shmemHuge: "advise", hugeFree: 0, hugeTotal: 0,
	}
}

func TestDoctorHasNothingToSayOfAGoodMachine(t *testing.T) {
	m := good()
	for _, f := range m.diagnose() {
		if f.State != stateOK || f.Remedy != "" || f.Value == "" {
			t.Errorf("%+v", f)
		}
	}
}

// What is lacking is named, with the command that changes it.
func TestDoctorNamesTheRemedy(t *testing.T) {
	for name, c := range map[string]struct {
		change  func(m *machine)
		finding string
		state   state
		remedy  string
	}{
		"old kernel":        {func(m *machine) { m.release = "5.4.0" }, "kernel", stateLack, "newer kernel"},
		"older kernel":      {func(m *machine) { m.release = "5.15.3" }, "kernel", stateNote, "newer kernel"},
		"disabled for all":  {noUring("2", syscall.EPERM), "io_uring", stateNote, "sysctl kernel.io_uring_disabled=0"},
		"disabled for some": {noUring("1", syscall.EPERM), "io_uring", stateNote, "CAP_SYS_ADMIN"},
		"seccomp":           {noUring("0", syscall.EPERM), "io_uring", stateNote, "seccomp"},
		"not built":         {noUring("", syscall.ENOSYS), "io_uring", stateNote, "CONFIG_IO_URING"},
		"epoll":             {noUring("2", syscall.EPERM), "poller", stateNote, "sysctl kernel.io_uring_disabled=0"},
		"aio used up":       {func(m *machine) { m.aioUsed = 65000 }, "Linux AIO", stateLack, "sysctl fs.aio-max-nr=1048576"},
		"memlock":           {func(m *machine) { m.fixedErr = syscall.ENOMEM }, "fixed buffers", stateNote, "ulimit -l unlimited"},
		"small pages":       {func(m *machine) { m.shmemHuge = "never" }, "huge pages", stateNote, "shmem_enabled"},
		"few files":         {func(m *machine) { m.files, m.filesHard = 256, 256 }, "open files", stateNote, "as root"},
		"no kvm":            {func(m *machine) { m.kvmErr = fs.ErrNotExist }, "KVM", stateNote, "modprobe"},
		"not my kvm":        {func(m *machine) { m.kvmErr = fs.ErrPermission }, "KVM", stateNote, "usermod"},
		"preemption":        {func(m *machine) { m.goDebug = "x=1,asyncpreemptoff=1" }, "Go runtime", stateNote, "unset GODEBUG"},
	} {
		t.Run(name, func(t *testing.T) {
			m := good()
			c.change(&m)
			for _, f := range m.diagnose() {
				if f.Name != c.finding {
					continue
				}
				if f.State != c.state || !strings.Contains(f.Remedy, c.remedy) {
					t.Errorf("%+v; want state %s and remedy %q", f, c.state, c.remedy)
				}
				return
			}
			t.Errorf("no finding is named %q", c.finding)
		})
	}
}

func noUring(disabled string, errno syscall.Errno) func(*machine) {
	return func(m *machine) {
		m.uringDisabled, m.uringErr = disabled, fmt.Errorf("set up: %w", errno)
		m.poller, m.pollerReason = aio.PollerEpoll, "no io_uring"
	}
}

func TestDoctorWithoutAnyPoller(t *testing.T) {
	m := good()
	m.pollerErr = errors.New("no descriptor left")
	if f := m.pollerFinding(); f.State != stateLack || !strings.Contains(f.Effect, "no descriptor left") {
		t.Errorf("%+v", f)
	}
}

func TestKernelReleases(t *testing.T) {
	for release, older := range map[string]bool{"5.9.1": true, "5.10.0-8-amd64": false, "6.1.0": false, "4.19": true, "10.0": false, "unknown": false, "": false} {
		if got := kernelOlder(release, 5, 10); got != older {
			t.Errorf("kernelOlder(%q, 5, 10) = %v", release, got)
		}
	}
}
