// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// resident is the process's memory in KiB, and ticks its processor time in hundredths of a second.
func (p *process) resident() int {
	p.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	for _, line := range strings.Split(string(b), "\n") {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			n, err := strconv.Atoi(f[1])
			if err != nil {
				p.t.Fatal(err)
			}
			return n
		}
	}
	p.t.Fatal("the kernel does not tell the process's memory")
	return 0
}

func (p *process) ticks() int {
	p.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.cmd.Process.Pid))
	if err != nil {
		p.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	sum := 0
	for _, s := range strings.Fields(rest)[11:13] { // utime and stime, see proc_pid_stat(5)
		n, err := strconv.Atoi(s)
		if err != nil {
			p.t.Fatal(err)
		}
		sum += n
	}
	return sum
}

// Goal: disks that do nothing cost next to nothing, with and without a guest. Method: a process with 1 disk and one with
// 101, half of them files, their memory before and after a guest with a queue of 256 is connected to each, and the
// processor time of two idle seconds. The bounds are several times what is measured without the race detector.
func TestIdleDisksCostLittle(t *testing.T) {
	const more, perDisk, ticksMost = 100, 2048, 20
	dir := t.TempDir()
	run := func(disks int) (alone, connected int) {
		args := []string{"serve"}
		for i := range disks {
			disk := "driver=null,size=64M"
			if i%2 == 0 {
				disk = filepath.Join(dir, fmt.Sprintf("disk%d", i))
				if err := os.WriteFile(disk, make([]byte, 4096), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			args = append(args, "--disk", disk, "--vhost-user", filepath.Join(dir, fmt.Sprint("s", i)))
		}
		p := spawn(t, nil, args...)
		p.ready()
		alone = p.resident()
		for i := range disks {
			g, err := newGuestWith(filepath.Join(dir, fmt.Sprint("s", i)), 256)
			if err != nil {
				t.Fatal(err)
			}
			defer g.close()
		}
		connected = p.resident()
		before := p.ticks()
		time.Sleep(2 * time.Second) // what is measured is that nothing happens
		if spent := p.ticks() - before; spent > ticksMost {
			t.Errorf("%d idle disks took %d hundredths of a second of 2 s", disks, spent)
		}
		p.signal(15)
		if status := p.status(); status != 0 {
			t.Errorf("status %d", status)
		}
		return alone, connected
	}
	alone1, connected1 := run(1)
	alone, connected := run(1 + more)
	t.Logf("a disk takes %d KiB, with a guest %d KiB; one alone %d and %d", (alone-alone1)/more, (connected-connected1)/more, alone1, connected1)
	if d := (alone - alone1) / more; d > perDisk {
		t.Errorf("a disk beyond the first takes %d KiB, want at most %d", d, perDisk)
	}
	if d := (connected - connected1) / more; d > perDisk {
		t.Errorf("a disk beyond the first, with its guest, takes %d KiB, want at most %d", d, perDisk)
	}
}
