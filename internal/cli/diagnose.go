// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"strings"
	"syscall"

	"github.com/sluice-blk/sluice/aio"
)

// aioEventsPerLoop is what a loop takes from fs.aio-max-nr: the default of aio.LoopOptions.AIOEvents. The kernel counts
// what was asked for, and rounds up what it makes.
const aioEventsPerLoop = 1024

// diagnose turns what was found into what a person should know, in the order of its weight.
func (m *machine) diagnose() []finding {
	return []finding{
		m.kernelFinding(),
		m.cpuFinding(),
		m.pollerFinding(),
		m.uringFinding(),
		m.aioFinding(),
		m.fixedFinding(),
		m.memlockFinding(),
		m.hugePageFinding(),
		m.filesFinding(),
		m.kvmFinding(),
		m.runtimeFinding(),
	}
}

func (m *machine) kernelFinding() finding {
	f := finding{Name: "kernel", State: stateOK, Value: fmt.Sprintf("Linux %s on %s", m.release, m.arch)}
	switch {
	case kernelOlder(m.release, 5, 10):
		f.State, f.Effect = stateLack, "Older than 5.10, the oldest kernel that is tested."
		f.Remedy = "install a newer kernel"
	case kernelOlder(m.release, 6, 1):
		f.State, f.Effect = stateNote, "Since 6.1 io_uring hands over completions when the loop asks for them (DEFER_TASKRUN)."
		f.Remedy = "install a newer kernel"
	}
	return f
}

func (m *machine) cpuFinding() finding {
	f := finding{Name: "CPUs", State: stateOK, Value: fmt.Sprintf("%d may be used", m.cpus)}
	switch {
	case m.cpus <= 0:
		f.State, f.Value = stateNote, "unknown"
	case m.cpus <= 2:
		f.Effect = "One loop is right (--loops 1): a second one would take the CPU from the guest."
	default:
		f.Effect = fmt.Sprintf("Up to %d loops make sense (--loops), if the guests' own threads leave as many CPUs idle.", m.cpus-1)
	}
	return f
}

func (m *machine) pollerFinding() finding {
	f := finding{Name: "poller", State: stateOK, Value: m.poller.String(), Effect: "Chosen because: " + m.pollerReason + "."}
	switch {
	case m.pollerErr != nil:
		return finding{Name: "poller", State: stateLack, Value: "none", Effect: m.pollerErr.Error()}
	case m.poller != aio.PollerIOUring:
		f.State = stateNote
		f.Remedy = m.uringRemedy()
	}
	return f
}

func (m *machine) uringFinding() finding {
	if m.uringErr == nil {
		return finding{Name: "io_uring", State: stateOK, Value: "available"}
	}
	return finding{
		Name: "io_uring", State: stateNote, Value: "not available: " + m.uringErr.Error(),
		Effect: "Disks are served through Linux AIO and threads, and the loops wait in epoll.",
		Remedy: m.uringRemedy(),
	}
}

// uringRemedy is the command that would make io_uring available.
func (m *machine) uringRemedy() string {
	switch {
	case m.uringErr == nil:
		return ""
	case m.uringDisabled == "1":
		return "sysctl kernel.io_uring_disabled=0 (or run with CAP_SYS_ADMIN, or in the group of kernel.io_uring_group)"
	case m.uringDisabled == "2":
		return "sysctl kernel.io_uring_disabled=0"
	case errors.Is(m.uringErr, syscall.EPERM), errors.Is(m.uringErr, syscall.EACCES):
		return "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile (for a test: --security-opt seccomp=unconfined)"
	case errors.Is(m.uringErr, syscall.ENOSYS):
		return "install a kernel from 5.10 with CONFIG_IO_URING, or allow io_uring_setup in the container's seccomp profile"
	case errors.Is(m.uringErr, syscall.ENOMEM):
		return "ulimit -l unlimited"
	}
	return ""
}

func (m *machine) aioFinding() finding {
	if m.aioMax < 0 || m.aioUsed < 0 {
		return finding{Name: "Linux AIO", State: stateNote, Value: "limits unknown (is /proc mounted?)"}
	}
	left := max(0, m.aioMax-m.aioUsed)
	f := finding{
		Name: "Linux AIO", State: stateOK, Value: fmt.Sprintf("%d of %d events in use (fs.aio-nr, fs.aio-max-nr)", m.aioUsed, m.aioMax),
		Effect: fmt.Sprintf("A loop takes %d, so there is room for about %d loops.", aioEventsPerLoop, left/aioEventsPerLoop),
	}
	if left < aioEventsPerLoop {
		f.State = stateLack
		f.Effect = fmt.Sprintf("A loop takes %d and %d are left: disks will be served by threads in place of linux-aio.", aioEventsPerLoop, left)
		f.Remedy = "sysctl fs.aio-max-nr=1048576"
	}
	return f
}

func (m *machine) fixedFinding() finding {
	f := finding{Name: "fixed buffers", State: stateOK, Value: "memory can be registered with io_uring"}
	switch {
	case m.uringErr != nil:
		f.State, f.Value = stateNote, "no, io_uring is not available"
	case m.fixedErr != nil:
		f.State, f.Value = stateNote, "no: "+m.fixedErr.Error()
		f.Effect = "Requests carry their own addresses, which costs little at small sizes."
		f.Remedy = "ulimit -l unlimited (LimitMEMLOCK=infinity in a systemd unit)"
	}
	return f
}

func (m *machine) memlockFinding() finding {
	f := finding{Name: "locked memory", State: stateOK, Value: limitText(m.memlock, true)}
	if m.memlock != math.MaxUint64 && kernelOlder(m.release, 5, 12) {
		f.State, f.Effect = stateNote, "Before Linux 5.12 the rings themselves count against it."
		f.Remedy = "ulimit -l unlimited (LimitMEMLOCK=infinity in a systemd unit)"
	}
	return f
}

func (m *machine) hugePageFinding() finding {
	f := finding{Name: "huge pages", State: stateOK}
	switch {
	case m.hugeTotal > 0:
		f.Value = fmt.Sprintf("%d of %d reserved pages free", m.hugeFree, m.hugeTotal)
		f.Effect = "A guest can have them: memory-backend-memfd,hugetlb=on."
	case m.shmemHuge == "always", m.shmemHuge == "within_size", m.shmemHuge == "force":
		f.Value = "shared memory gets them by itself (shmem_enabled is " + m.shmemHuge + ")"
	default:
		f.State, f.Value = stateNote, "none for shared memory"
		f.Effect = "A guest's memory is shared with sluice, and shared memory in small pages is slower for the guest."
		f.Remedy = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or sysctl vm.nr_hugepages=N and hugetlb=on"
		if m.shmemHuge != "" {
			f.Value += " (shmem_enabled is " + m.shmemHuge + ")"
		}
		if m.shmemHuge == "advise" {
			f.State, f.Effect, f.Remedy = stateOK, "The guest's memory gets them where QEMU asks for it.", ""
		}
	}
	return f
}

func (m *machine) filesFinding() finding {
	f := finding{Name: "open files", State: stateOK, Value: limitText(m.files, false)}
	const enough = 1024 // a queue takes three, a session a handful
	if m.files < enough {
		f.State, f.Effect = stateNote, "Each queue of a guest takes three."
		f.Remedy = "ulimit -n 65536"
		if m.filesHard < enough {
			f.Remedy += " as root"
		}
	}
	return f
}

func (m *machine) kvmFinding() finding {
	f := finding{Name: "KVM", State: stateOK, Value: "usable"}
	switch {
	case m.kvmErr == nil:
		return f
	case errors.Is(m.kvmErr, fs.ErrNotExist):
		f.Remedy = "modprobe kvm_intel (or kvm_amd); in a virtual machine, turn on nested virtualisation"
	case errors.Is(m.kvmErr, fs.ErrPermission):
		f.Remedy = "usermod -aG kvm $USER"
	}
	f.State, f.Value = stateNote, "not usable: "+m.kvmErr.Error()
	f.Effect = "It is not needed to serve disks. Guests on this machine are emulated, which is slow."
	return f
}

func (m *machine) runtimeFinding() finding {
	f := finding{Name: "Go runtime", State: stateOK, Value: "as it should be"}
	if strings.Contains(m.goDebug, "asyncpreemptoff=1") {
		f.State, f.Value = stateNote, "GODEBUG has asyncpreemptoff=1"
		f.Effect = "The garbage collector may have to wait for a loop's turn to end."
		f.Remedy = "unset GODEBUG"
	}
	return f
}

// limitText writes a resource limit, in bytes or as a count.
func limitText(n uint64, bytes bool) string {
	switch {
	case n == math.MaxUint64:
		return "unlimited"
	case bytes:
		return "at most " + formatSize(int64(min(n, math.MaxInt64)))
	}
	return fmt.Sprintf("at most %d", n)
}
