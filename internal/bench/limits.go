// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"
)

// Limits says how busy everything was that a run could have been limited by. Shares are percent of one: of all the
// machine's processors together, of one thread's time, of the device's time.
type Limits struct {
	Machine      float64 `json:"machine_busy"`
	Others       float64 `json:"machine_others"` // that neither server nor driver used: noise
	Steal        float64 `json:"machine_steal"`  // taken by the machine that this one runs on
	ServerThread float64 `json:"server_thread"`  // the busiest
	DriverThread float64 `json:"driver_thread"`  // the busiest
	Device       float64 `json:"device_busy"`
	DeviceDepth  float64 `json:"device_depth"` // requests that the device had, in the mean
}

// A thread has always a little else to do, and a machine too.
const (
	threadFull  = 92
	machineFull = 95
	deviceFull  = 95
	noisy       = 8
)

// Cause names what a run could not go faster for.
func (l *Limits) Cause() string {
	var causes []string
	add := func(share, full float64, name string) {
		if share >= full {
			causes = append(causes, fmt.Sprintf("%s %.0f %%", name, min(share, 100)))
		}
	}
	add(l.ServerThread, threadFull, "server thread")
	add(l.DriverThread, threadFull, "driver")
	add(l.Machine, machineFull, "machine")
	if len(causes) == 0 && l.Device >= deviceFull {
		causes = append(causes, fmt.Sprintf("device %.0f %% at depth %.0f", min(l.Device, 100), l.DeviceDepth))
	}
	if l.Others >= noisy {
		causes = append(causes, fmt.Sprintf("others %.0f %%", l.Others))
	}
	if l.Steal >= noisy {
		causes = append(causes, fmt.Sprintf("steal %.0f %%", l.Steal))
	}
	if len(causes) == 0 {
		return fmt.Sprintf("waiting (machine %.0f %%)", l.Machine)
	}
	return strings.Join(causes, ", ")
}

// machineTimes are the sums of /proc/stat, in its ticks.
type machineTimes struct{ total, idle, steal uint64 }

// readMachine reads the line of all processors together: user, nice, system, idle, iowait, irq, softirq, steal, and guest
// times that are in user already (proc_stat(5)).
func readMachine(path string) (m machineTimes) {
	b, err := os.ReadFile(path)
	if err != nil {
		return m
	}
	line, _, _ := strings.Cut(string(b), "\n")
	const idle, iowait, steal = 3, 4, 7
	for i, v := range numbers(strings.TrimPrefix(line, "cpu ")) {
		if i > steal {
			break
		}
		m.total += v
		switch i {
		case idle, iowait:
			m.idle += v
		case steal:
			m.steal += v
		}
	}
	return m
}

// deviceTimes are two of a block device's counters, in milliseconds.
type deviceTimes struct{ busy, weighted uint64 }

// readDevice reads them from the stat file in the device's directory (Documentation/block/stat.rst).
func readDevice(dir string) (d deviceTimes) {
	if dir == "" {
		return d
	}
	b, err := os.ReadFile(dir + "/stat")
	if err != nil {
		return d
	}
	const busy, weighted = 9, 10
	if v := numbers(string(b)); len(v) > weighted {
		d.busy, d.weighted = v[busy], v[weighted]
	}
	return d
}

func numbers(s string) (v []uint64) {
	for _, word := range strings.Fields(s) {
		n, err := strconv.ParseUint(word, 10, 64)
		if err != nil {
			return v
		}
		v = append(v, n)
	}
	return v
}

func limits(before, after *reading, window time.Duration) (l Limits) {
	if total := after.machine.total - before.machine.total; total > 0 {
		l.Machine = 100 - 100*ratio(after.machine.idle-before.machine.idle, total)
		l.Steal = 100 * ratio(after.machine.steal-before.machine.steal, total)
	}
	var used []time.Duration
	for tid, cpu := range after.threads {
		used = append(used, cpu-before.threads[tid])
	}
	l.ServerThread = busiest(used, window)
	if ms := float64(window.Milliseconds()); ms > 0 {
		l.Device = 100 * float64(after.device.busy-before.device.busy) / ms
		l.DeviceDepth = float64(after.device.weighted-before.device.weighted) / ms
	}
	return l
}

// others books what is left of the machine's time when that of server and drivers is taken off. The kernel's work for
// completions that interrupts bring counts here, too, where it is not charged to a thread.
func (l *Limits) others(cpu, window time.Duration) {
	if window > 0 {
		l.Others = max(0, l.Machine-100*float64(cpu)/float64(window)/float64(runtime.NumCPU()))
	}
}

// busiest is the largest share of a window, in percent.
func busiest(used []time.Duration, window time.Duration) (share float64) {
	for _, d := range used {
		if window > 0 {
			share = max(share, 100*float64(d)/float64(window))
		}
	}
	return share
}
