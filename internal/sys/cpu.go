// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"time"

	"golang.org/x/sys/unix"
)

// ThreadCPU is the processor time that the calling thread has used. The goroutine is locked to it.
func ThreadCPU() time.Duration { return cpuClock(unix.CLOCK_THREAD_CPUTIME_ID) }

// ProcessCPU is the processor time that the process has used: all its threads, kernel workers of its rings among them.
func ProcessCPU() time.Duration { return cpuClock(unix.CLOCK_PROCESS_CPUTIME_ID) }

func cpuClock(id int32) time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(id, &ts) != nil {
		return 0 // the clocks exist on every kernel
	}
	return time.Duration(ts.Nano())
}

// SocketPeer is the process id at the other end of a connected unix socket (SO_PEERCRED).
func SocketPeer(fd int) (pid int, err error) {
	c, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return 0, err
	}
	return int(c.Pid), nil
}
