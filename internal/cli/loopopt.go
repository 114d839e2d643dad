// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/daemon"
	"github.com/sluice-blk/sluice/internal/sys"
)

// loopFlags are the flags that describe the loops, the same for every verb that runs some.
type loopFlags struct {
	count   int
	pin     string
	poller  string
	batch   string
	pollMax time.Duration
	fixed   string
}

func (f *loopFlags) add(set *pflag.FlagSet) {
	set.IntVar(&f.count, "loops", 1, "number of event loops, one thread each")
	set.StringVar(&f.pin, "pin", "", "pin each loop to a CPU: of those in LIST (such as 0-3,6), or without a value of those that the process may use")
	set.Lookup("pin").NoOptDefVal = "auto"
	set.Lookup("pin").DefValue = ""
	set.StringVar(&f.poller, "poller", "auto", "how the loops wait: auto, io_uring, epoll or poll")
	set.StringVar(&f.batch, "batch", "on", "on hands to the kernel what a turn brought at once; off does so one by one, for measuring")
	set.DurationVar(&f.pollMax, "poll-max", pollMaxDefault(), "longest time that a loop polls before it sleeps, up to four times that for a guest that comes in batches; 0 never polls")
	set.Lookup("poll-max").DefValue = "32us, and 0 on a machine of one CPU"
	set.StringVar(&f.fixed, "fixed-buffers", "off", "on pins the guest memory that direct io_uring requests use, which they then cost less; the front-end must not take memory from the guest meanwhile (balloon, free page reporting)")
}

// configs makes one configuration a loop, or a usage error.
func (f *loopFlags) configs() ([]daemon.LoopConfig, error) {
	if f.count < 1 || f.count > daemon.LoopsMax {
		return nil, fmt.Errorf("--loops is %d (want 1 to %d)", f.count, daemon.LoopsMax)
	}
	if f.pollMax < 0 {
		return nil, fmt.Errorf("--poll-max is %v and cannot be negative", f.pollMax)
	}
	poller, err := aio.ParsePoller(f.poller)
	if err != nil {
		return nil, fmt.Errorf("--poller: %w", err)
	}
	batch, err := parseSwitch(f.batch)
	if err != nil {
		return nil, fmt.Errorf("--batch: %w", err)
	}
	fixed, err := parseSwitch(f.fixed)
	if err != nil {
		return nil, fmt.Errorf("--fixed-buffers: %w", err)
	}
	cpus, err := f.cpus()
	if err != nil {
		return nil, fmt.Errorf("--pin: %w", err)
	}
	loops := make([]daemon.LoopConfig, f.count)
	for i := range loops {
		loops[i] = daemon.LoopConfig{Poller: poller, Unbatched: !batch, PollMax: f.pollMax, FixedBuffers: fixed}
		if len(cpus) > 0 {
			loops[i].Pin, loops[i].CPU = true, cpus[i%len(cpus)]
		}
	}
	return loops, nil
}

// pollMaxDefault is what measured best, see docs/notes/007. One CPU has better to do than to look for the guest that waits
// for it.
func pollMaxDefault() time.Duration {
	if cpus, err := sys.AllowedCPUs(); err != nil || len(cpus) < 2 {
		return 0
	}
	return 32 * time.Microsecond
}

func (f *loopFlags) cpus() ([]int, error) {
	switch f.pin {
	case "":
		return nil, nil
	case "auto":
		return sys.AllowedCPUs()
	}
	return parseCPUs(f.pin)
}

// cpuMax is the largest CPU number that sched_setaffinity's fixed set can hold.
const cpuMax = 1023

// parseCPUs reads a list of CPU numbers and ranges, as taskset and cpusets write it: 0-3,6.
func parseCPUs(s string) ([]int, error) {
	var cpus []int
	seen := make(map[int]bool)
	for _, item := range strings.Split(s, ",") {
		first, last, isRange := strings.Cut(item, "-")
		if !isRange {
			last = first
		}
		a, errA := strconv.ParseUint(first, 10, 16)
		b, errB := strconv.ParseUint(last, 10, 16)
		if errA != nil || errB != nil || a > b || b > cpuMax {
			return nil, fmt.Errorf("%q in %q is not a CPU or a range of CPUs (such as 0-3,6)", item, s)
		}
		for cpu := int(a); cpu <= int(b); cpu++ {
			if seen[cpu] {
				return nil, errors.New("CPU " + strconv.Itoa(cpu) + " is given twice")
			}
			seen[cpu] = true
			cpus = append(cpus, cpu)
		}
	}
	return cpus, nil
}
