// SPDX-License-Identifier: Apache-2.0

package sys

import (
	"encoding/binary"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ProcessCPUOf is the processor time that another process has used: all its threads, those that ended and kernel workers
// of its rings among them. It is 0 when there is no such process. The clock's number is made as clock_getcpuclockid(3)
// makes it.
func ProcessCPUOf(pid int) time.Duration {
	const sched = 2 // CPUCLOCK_SCHED: the scheduler's own count
	return cpuClock(int32(^pid<<3 | sched))
}

// PerfEventTracepoint is perf_event_open(2): a descriptor that counts how often the thread tid, and threads that it
// starts from now on, pass the tracepoint with number id (the file id in its directory below the tracefs). It fails with
// EACCES or EPERM where kernel.perf_event_paranoid forbids it.
func PerfEventTracepoint(id uint64, tid int) (fd int, err error) {
	attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_TRACEPOINT, Config: id, Bits: unix.PerfBitInherit}
	attr.Size = uint32(unsafe.Sizeof(attr))
	return unix.PerfEventOpen(&attr, tid, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
}

// PerfEventCount is read(2) of such a descriptor.
func PerfEventCount(fd int) (uint64, error) {
	var b [8]byte
	n, err := unix.Read(fd, b[:])
	if err != nil {
		return 0, err
	}
	if n != len(b) {
		return 0, unix.EIO
	}
	return binary.NativeEndian.Uint64(b[:]), nil
}
