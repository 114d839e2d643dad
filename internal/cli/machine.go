// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/guestvm"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/uring"
)

// machine is what doctor finds out about the machine. The texts are made from it alone, so that tests can describe
// machines that they do not run on.
type machine struct {
	release, arch string
	cpus          int

	poller       aio.PollerKind
	pollerReason string
	pollerErr    error

	uringErr      error
	uringDisabled string // kernel.io_uring_disabled; empty: there is no such setting
	features      []feature
	fixedErr      error // of registering memory with a ring; meaningless without a ring

	aioUsed, aioMax int64  // -1: unknown
	memlock, files  uint64 // soft limits
	filesHard       uint64

	shmemHuge           string // the word in brackets of shmem_enabled; empty: unknown
	hugeFree, hugeTotal int64  // pages; -1: unknown
	kvmErr              error
	goDebug             string
}

// feature is one of io_uring's, and what sluice uses it for.
type feature struct {
	Name      string `json:"name"`
	Since     string `json:"since"` // the kernel that brought it
	Available bool   `json:"available"`
	Use       string `json:"use"`
}

// uringFeatures are the features that make a difference, each with a way to ask for it: by set-up flags or an operation.
var uringFeatures = []struct {
	name, since, use string
	options          *uring.Options
	op               uint8
}{
	{"FALLOCATE", "5.6", "discard and write zeroes without a thread", nil, uring.IORING_OP_FALLOCATE},
	{"SUBMIT_ALL", "5.18", "one refused request does not hold up a batch", &uring.Options{SubmitAll: true}, 0},
	{"COOP_TASKRUN", "5.19", "completions without interrupts between CPUs", &uring.Options{CoopTaskrun: true}, 0},
	{"URING_CMD", "5.19", "commands of devices and of FUSE", nil, uring.IORING_OP_URING_CMD},
	{"SINGLE_ISSUER", "6.0", "a ring that its one thread uses without locks", &uring.Options{SingleIssuer: true}, 0},
	{"DEFER_TASKRUN", "6.1", "completions at the moment that the loop asks for them", &uring.Options{SingleIssuer: true, DeferTaskrun: true}, 0},
	{"NO_SQARRAY", "6.6", "one indirection less for each submission", &uring.Options{NoSQArray: true}, 0},
}

// lookAround asks the machine. What cannot be found out is left unknown.
func lookAround() *machine {
	m := &machine{aioUsed: readNumber("/proc/sys/fs/aio-nr"), aioMax: readNumber("/proc/sys/fs/aio-max-nr"), goDebug: os.Getenv("GODEBUG")}
	_, m.release, _, m.arch, _ = sys.Uname()
	if cpus, err := sys.AllowedCPUs(); err == nil {
		m.cpus = len(cpus)
	}
	m.memlock, _, _ = sys.Getrlimit(sys.RLIMIT_MEMLOCK)
	m.files, m.filesHard, _ = sys.Getrlimit(sys.RLIMIT_NOFILE)
	m.shmemHuge = bracketed(readText("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
	m.hugeTotal, m.hugeFree = memInfo("HugePages_Total"), memInfo("HugePages_Free")
	m.askPoller()
	m.askUring()
	m.kvmErr = tryKVM()
	return m
}

func (m *machine) askPoller() {
	l, err := aio.NewLoop(nil)
	if err != nil {
		m.pollerErr = err
		return
	}
	m.poller, m.pollerReason = l.Poller()
	m.pollerErr = l.Close()
}

// askUring makes small rings, one for each feature that set-up can refuse.
func (m *machine) askUring() {
	m.uringDisabled = readText("/proc/sys/kernel/io_uring_disabled")
	const entries = 8 // more than one, and too few to be refused for memory
	ring, err := uring.New(entries, nil)
	if err != nil {
		m.uringErr = err
		return
	}
	defer ring.Close()
	probe, probeErr := ring.Probe()
	for _, f := range uringFeatures {
		available := probeErr == nil && probe.Supports(f.op)
		if f.options != nil {
			available = canSetUp(entries, f.options)
		}
		m.features = append(m.features, feature{Name: f.name, Since: f.since, Available: available, Use: f.use})
	}
	const megabyte = 1 << 20 // a request's worth of memory
	m.fixedErr = ring.RegisterBuffers([]uring.IOVec{sys.IOVecOf(make([]byte, megabyte))})
}

func canSetUp(entries uint32, o *uring.Options) bool {
	r, err := uring.New(entries, o)
	if err != nil {
		return false
	}
	return r.Close() == nil
}

// tryKVM finds out whether this process may use KVM, and whether the machine looks like one on which it runs Linux.
func tryKVM() error {
	if err := guestvm.CheckKVM(); err != nil {
		return err
	}
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	const version = 12 // the only one since Linux 2.6.22
	v, err := sys.KVMVersion(int(f.Fd()))
	if err == nil && v != version {
		err = fmt.Errorf("unexpected API version %d", v)
	}
	return err
}

// readText is a file's content without the white space around it, or empty.
func readText(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// readNumber is the number in a file, or -1.
func readNumber(path string) int64 {
	n, err := strconv.ParseInt(readText(path), 10, 64)
	if err != nil {
		return -1
	}
	return n
}

// memInfo is a number of /proc/meminfo, or -1.
func memInfo(key string) int64 {
	for _, line := range strings.Split(readText("/proc/meminfo"), "\n") {
		name, rest, _ := strings.Cut(line, ":")
		if name != key {
			continue
		}
		n, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		if err != nil {
			break
		}
		return n
	}
	return -1
}

// bracketed is the chosen word of a list such as "always [never] deny".
func bracketed(s string) string {
	_, s, _ = strings.Cut(s, "[")
	s, _, _ = strings.Cut(s, "]")
	return s
}

// kernelOlder compares a release such as 6.1.0-18-amd64 with major.minor. One that cannot be read counts as new.
func kernelOlder(release string, major, minor int) bool {
	var a, b int
	if n, _ := fmt.Sscanf(release, "%d.%d", &a, &b); n != 2 {
		return false
	}
	return a < major || (a == major && b < minor)
}
