// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-blk/sluice/internal/sys"
)

// Environment is where a run took place: without it figures mean nothing.
type Environment struct {
	Date        string        `json:"date"`
	CPU         string        `json:"cpu"`
	CPUs        int           `json:"cpus"`
	MemoryMiB   int64         `json:"memory_mib"`
	Machine     string        `json:"machine"` // maker and product; of a virtual machine, its monitor's
	Virtual     bool          `json:"virtual"`
	Kernel      string        `json:"kernel"`
	Mitigations []Mitigation  `json:"mitigations"`
	Load        string        `json:"load"` // when the run began: one, five and fifteen minutes
	Media       []MediumFacts `json:"media"`
	Versions    []string      `json:"versions"`
}

// Mitigation is what the kernel does against one weakness of the processor.
type Mitigation struct {
	Weakness string `json:"weakness"`
	State    string `json:"state"`
}

// MediumFacts is what lies under a medium.
type MediumFacts struct {
	Name       string `json:"name"`
	Path       string `json:"path,omitempty"`
	FileSystem string `json:"file_system,omitempty"`
	Source     string `json:"source,omitempty"`
	Scheduler  string `json:"scheduler,omitempty"`
	Rotational bool   `json:"rotational,omitempty"`
	Direct     bool   `json:"direct"` // O_DIRECT
}

// LookAround finds out where we are. What cannot be found out is left empty. version is ours; programs are asked for
// theirs.
func LookAround(ctx context.Context, version string, programs []string, media []Medium) *Environment {
	e := &Environment{
		Date: time.Now().UTC().Format("2006-01-02 15:04 MST"), CPUs: runtime.NumCPU(), CPU: fieldOf("/proc/cpuinfo", "model name"),
		Load: firstWords(text("/proc/loadavg"), 3), Versions: []string{version},
	}
	if kib, err := strconv.ParseInt(strings.TrimSuffix(fieldOf("/proc/meminfo", "MemTotal"), " kB"), 10, 64); err == nil {
		e.MemoryMiB = kib >> 10
	}
	name, release, _, arch, _ := sys.Uname()
	e.Kernel = strings.TrimSpace(name + " " + release + " " + arch)
	const dmi = "/sys/class/dmi/id/"
	e.Machine = strings.TrimSpace(text(dmi+"sys_vendor") + " " + text(dmi+"product_name"))
	e.Virtual = strings.Contains(" "+fieldOf("/proc/cpuinfo", "flags")+" ", " hypervisor ")
	e.Mitigations = mitigations("/sys/devices/system/cpu/vulnerabilities")
	for _, m := range media {
		e.Media = append(e.Media, factsOf(m))
	}
	for _, p := range programs {
		if v := versionOf(ctx, p); v != "" {
			e.Versions = append(e.Versions, v)
		}
	}
	return e
}

// versionOf is the first line that a program prints when it is asked for its version.
func versionOf(ctx context.Context, program string) string {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.TrimSpace(line)
}

func mitigations(dir string) (list []Mitigation) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		list = append(list, Mitigation{e.Name(), text(filepath.Join(dir, e.Name()))})
	}
	return list
}

// active are those that cost something: the kernel mitigates them.
func (e *Environment) active() string {
	var list []string
	for _, m := range e.Mitigations {
		if strings.HasPrefix(m.State, "Mitigation") {
			list = append(list, m.Weakness)
		}
	}
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(list, ", ")
}

// DeviceOf is the directory of the block device that a file lies on, below /sys/dev/block; empty when there is none, as
// for a file in memory.
func DeviceOf(path string) string {
	if path == "" {
		return ""
	}
	number, ok := deviceNumber(path)
	if !ok {
		return ""
	}
	dir := "/sys/dev/block/" + number
	if _, err := os.Stat(dir + "/stat"); err != nil {
		return ""
	}
	return dir
}

// deviceNumber is MAJOR:MINOR of a block device, or of what a file lies on.
func deviceNumber(path string) (string, bool) {
	info, err := os.Stat(path)
	if err != nil {
		return "", false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return "", false
	}
	dev := st.Dev
	if info.Mode()&os.ModeDevice != 0 {
		dev = st.Rdev
	}
	major, minor := sys.DeviceNumber(dev)
	return fmt.Sprintf("%d:%d", major, minor), true
}

func factsOf(m Medium) MediumFacts {
	f := MediumFacts{Name: m.Name, Path: m.Path, Direct: m.Path != "" && !m.Buffered}
	if m.Path == "" {
		return f
	}
	if number, ok := deviceNumber(m.Path); ok {
		f.FileSystem, f.Source = mountOf("/proc/self/mountinfo", number)
	}
	if dir := DeviceOf(m.Path); dir != "" {
		queue := dir + "/queue"
		if _, err := os.Stat(queue); err != nil {
			queue = dir + "/../queue" // of a partition, its disk's
		}
		_, s, _ := strings.Cut(text(queue+"/scheduler"), "[")
		f.Scheduler, _, _ = strings.Cut(s, "]")
		f.Rotational = text(queue+"/rotational") == "1"
	}
	return f
}

// mountOf finds type and source of the file system on a device in a table as proc_pid_mountinfo(5) describes it.
func mountOf(table, number string) (kind, source string) {
	for _, line := range strings.Split(text(table), "\n") {
		before, after, ok := strings.Cut(line, " - ")
		if words := strings.Fields(before); !ok || len(words) < 3 || words[2] != number {
			continue
		}
		if words := strings.Fields(after); len(words) >= 2 {
			return words[0], words[1]
		}
	}
	return "", ""
}

// fieldOf is the first value of a key in a file of lines "key : value".
func fieldOf(path, key string) string {
	for _, line := range strings.Split(text(path), "\n") {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == key {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

func text(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

func firstWords(s string, n int) string {
	words := strings.Fields(s)
	return strings.Join(words[:min(n, len(words))], " ")
}

// Lines tell it for people, one fact a line.
func (e *Environment) Lines() []string {
	machine := strings.TrimSpace(fmt.Sprintf("%s, %d CPUs, %d MiB", e.CPU, e.CPUs, e.MemoryMiB))
	if e.Virtual {
		machine += ", virtual"
	}
	if e.Machine != "" {
		machine += " (" + e.Machine + ")"
	}
	lines := []string{"machine: " + machine, "kernel: " + e.Kernel + ", mitigations: " + e.active(), "date: " + e.Date + ", load when it began: " + e.Load}
	for _, m := range e.Media {
		if m.Path == "" {
			continue
		}
		how := "through the page cache"
		if m.Direct {
			how = "O_DIRECT"
		}
		line := fmt.Sprintf("%s: %s on %s, %s", m.Name, m.FileSystem, m.Source, how)
		if m.Scheduler != "" {
			line += ", scheduler " + m.Scheduler
		}
		lines = append(lines, line)
	}
	return append(lines, "versions: "+strings.Join(e.Versions, "; "))
}
