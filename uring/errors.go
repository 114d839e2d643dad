// SPDX-License-Identifier: Apache-2.0

//go:build linux

package uring

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
)

// setupError wraps the errno of a set-up that failed: what was asked for, and what would help. The errno stays visible
// to errors.Is.
func setupError(err error, entries uint32, flags SetupFlags) error {
	return fmt.Errorf("set up io_uring of %d entries with flags %v: %w (%s)", entries, flags, err, remedy(err, disabledSysctl()))
}

// remedy says why a set-up may have failed and what would change it. disabled is the value of
// kernel.io_uring_disabled, "" where the kernel has no such setting.
func remedy(err error, disabled string) string {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return "not an errno of the kernel"
	}
	switch errno {
	case syscall.EPERM, syscall.EACCES:
		switch disabled {
		case "1":
			return "kernel.io_uring_disabled is 1: set it to 0, run with CAP_SYS_ADMIN, or join the group kernel.io_uring_group"
		case "2":
			return "kernel.io_uring_disabled is 2: set it to 0"
		}
		return "a seccomp filter or security module forbids io_uring: a container runtime needs a profile that allows io_uring_setup"
	case syscall.ENOSYS:
		return "the kernel is older than 5.1 or built without CONFIG_IO_URING, or a seccomp filter hides it"
	case syscall.ENOMEM:
		return "out of memory, or of locked memory on kernels before 5.12: raise the memlock limit (ulimit -l) or ask for fewer entries"
	case syscall.EINVAL:
		return "this kernel lacks one of the flags, they do not go together, or the number of entries is 0 or above 32768"
	case syscall.EMFILE:
		return "the process has no file descriptor left: raise its limit (ulimit -n)"
	case syscall.ENFILE:
		return "the system has no file descriptor left: raise fs.file-max"
	}
	return "see io_uring_setup(2)"
}

// disabledSysctl reads kernel.io_uring_disabled: "0", "1", "2", or "" where it cannot be read (kernels before 6.6).
func disabledSysctl() string {
	b, err := os.ReadFile("/proc/sys/kernel/io_uring_disabled")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
