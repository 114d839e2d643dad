// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Resources of [Getrlimit] and what stands for no limit.
const (
	RLIMIT_MEMLOCK = unix.RLIMIT_MEMLOCK
	RLIMIT_NOFILE  = unix.RLIMIT_NOFILE
	RLIM_INFINITY  = ^uint64(0)
)

// Getrlimit is getrlimit(2): the soft and the hard limit, in the resource's own unit.
func Getrlimit(resource int) (soft, hard uint64, err error) {
	var l unix.Rlimit
	if err := unix.Getrlimit(resource, &l); err != nil {
		return 0, 0, err
	}
	return l.Cur, l.Max, nil
}

// Uname is uname(2): the kernel's name, release, version and machine.
func Uname() (sysname, release, version, machine string, err error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", "", "", "", err
	}
	return unix.ByteSliceToString(u.Sysname[:]), unix.ByteSliceToString(u.Release[:]),
		unix.ByteSliceToString(u.Version[:]), unix.ByteSliceToString(u.Machine[:]), nil
}

// AllowedCPUs is sched_getaffinity(2) of the calling process: the numbers of the CPUs it may run on, ascending.
func AllowedCPUs() ([]int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(unix.Getpid(), &set); err != nil {
		return nil, err
	}
	var cpus []int
	for i := 0; i < len(set)*int(unsafe.Sizeof(set[0]))*8; i++ {
		if set.IsSet(i) {
			cpus = append(cpus, i)
		}
	}
	return cpus, nil
}

// SetCloexec marks fd to be closed by execve(2).
func SetCloexec(fd int) error {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC)
	return err
}

// SocketListens says whether fd is a stream socket that listen(2) was called on. A descriptor that is no socket gives
// ENOTSOCK, a closed one EBADF.
func SocketListens(fd int) (bool, error) {
	v, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	return v == 1, err
}

// KVMVersion is KVM_GET_API_VERSION on a descriptor of /dev/kvm. It is 12 on every kernel that this program runs on.
func KVMVersion(fd int) (int, error) {
	const getAPIVersion = 0xae00 // _IO(KVMIO, 0x00), linux/kvm.h
	v, _, e := syscall.Syscall(syscall.SYS_IOCTL, uintptr(fd), getAPIVersion, 0)
	if e != 0 {
		return 0, e
	}
	return int(v), nil
}
