// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestCauses(t *testing.T) {
	for _, c := range []struct {
		l    Limits
		want string
	}{
		{Limits{Machine: 40}, "waiting (machine 40 %)"},
		{Limits{Machine: 60, ServerThread: 99.6}, "server thread 100 %"},
		{Limits{Machine: 99, ServerThread: 98, DriverThread: 97}, "server thread 98 %, driver 97 %, machine 99 %"},
		{Limits{Machine: 30, Device: 100, DeviceDepth: 63.7}, "device 100 % at depth 64"},
		{Limits{Machine: 50, Device: 100, DriverThread: 101}, "driver 100 %"},
		{Limits{Machine: 99, Others: 50, Steal: 10}, "machine 99 %, others 50 %, steal 10 %"},
	} {
		if got := c.l.Cause(); got != c.want {
			t.Errorf("%+v: %q, want %q", c.l, got, c.want)
		}
	}
}

// The kernel's counters, as it writes them, and what is made of two readings.
func TestLimitsAreDifferences(t *testing.T) {
	dir := t.TempDir()
	write := func(name, s string) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, []byte(s), 0o600))
		return path
	}
	read := func(machine, device string) reading {
		write("stat", device)
		return reading{machine: readMachine(write("proc", machine)), device: readDevice(dir)}
	}
	before := read("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 2 3\n", "   1 0 8 1 2 0 8 1 0 1000 5000 0 0 0 0 0 0\n")
	after := read("cpu  150 0 120 720 100 0 0 10 40 0\ncpu0 1 2 3\n", "   9 0 8 1 2 0 8 1 0 1500 37000 0 0 0 0 0 0\n")
	before.threads = map[int]time.Duration{1: time.Second, 2: 0}
	after.threads = map[int]time.Duration{1: 1100 * time.Millisecond, 2: 450 * time.Millisecond, 3: time.Millisecond}
	l := limits(&before, &after, 500*time.Millisecond)
	if l != (Limits{Machine: 80, Steal: 10, ServerThread: 90, Device: 100, DeviceDepth: 64}) {
		t.Errorf("got %+v", l)
	}
	if l := limits(&reading{}, &reading{}, 0); l != (Limits{}) {
		t.Errorf("nothing known: got %+v", l)
	}
	if readMachine(filepath.Join(dir, "none")) != (machineTimes{}) || readDevice(dir+"/none") != (deviceTimes{}) || readDevice("") != (deviceTimes{}) {
		t.Error("what cannot be read is not zero")
	}
}

func TestEnvironmentOfThisMachine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	must(t, os.WriteFile(path, nil, 0o600))
	e := LookAround(t.Context(), "sluice test", []string{"/nonexistent"}, []Medium{{Name: "null"}, {Name: "disk", Path: path}})
	if e.CPUs < 1 || e.MemoryMiB < 1 || !strings.HasPrefix(e.Kernel, "Linux ") || len(e.Media) != 2 || len(e.Versions) != 1 {
		t.Errorf("got %+v", e)
	}
	lines := strings.Join(e.Lines(), "\n")
	for _, want := range []string{"machine: ", "kernel: ", "mitigations: ", "date: ", "disk: ", "O_DIRECT", "sluice test"} {
		if !strings.Contains(lines, want) {
			t.Errorf("%q is missing in\n%s", want, lines)
		}
	}
	if DeviceOf("") != "" || DeviceOf("/nonexistent/x") != "" || DeviceOf("/dev/null") != "" {
		t.Error("a device was found where there is none")
	}
}

func TestMountTable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "mountinfo")
	must(t, os.WriteFile(path, []byte("21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n30 21 0:26 / /dev/shm rw - tmpfs tmpfs rw\nbroken\n"), 0o600))
	if kind, source := mountOf(path, "254:0"); kind != "ext4" || source != "/dev/vda" {
		t.Errorf("got %s, %s", kind, source)
	}
	if kind, _ := mountOf(path, "9:9"); kind != "" {
		t.Errorf("got %s", kind)
	}
}
