// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-blk/sluice/internal/guestvm"
)

//go:embed guest.sh
var guestScript string

// guestSaid is what the guest told about its work.
type guestSaid struct {
	sums  map[string]string // sha256 by file name, of what was written to the file system
	rows  map[int]fioRow
	write fioRow
	cache string // write cache of the work disk, as the guest sees it
}

type fioRow struct {
	iops     float64
	p50, p99 time.Duration
}

// workInGuest boots the guest on all disks and waits for its script.
func (d *demo) workInGuest(ctx context.Context) error {
	kernel, err := guestvm.EnsureKernel(ctx, d.o.Kernel)
	if err != nil {
		return err
	}
	initrd := d.path("initrd")
	if err := d.buildInitrd(ctx, kernel, initrd); err != nil {
		return err
	}
	cfg := guestvm.Config{
		Kernel: kernel, Initrd: []string{initrd}, Script: d.script(), CPUs: d.o.CPUs,
		Accel: d.o.Accel, Console: d.o.Console, Timeout: 10*time.Minute + time.Duration(4*len(d.rows))*d.o.Runtime,
	}
	for i := range len(d.rows) + 1 {
		cfg.Disks = append(cfg.Disks, guestvm.Disk{Socket: d.socket(i), Queues: d.o.CPUs, QueueSize: 256})
	}
	d.say("booting Linux %s on %d disks", kernel.Version, len(cfg.Disks))
	res, err := guestvm.Run(ctx, cfg)
	if err != nil {
		return err
	}
	d.report.Guest = fmt.Sprintf("Linux %s under QEMU with %s (%s): up in %.1f s, work done in %.1f s",
		kernel.Version, res.Accel, res.AccelReason, res.Boot.Seconds(), res.Script.Seconds())
	d.report.Emulated = res.Accel == guestvm.AccelTCG
	if res.Status != 0 {
		return fmt.Errorf("the guest's work failed with status %d:\n%s", res.Status, lastLines(res.Output, 30))
	}
	if err := d.said.parse(res.Output); err != nil {
		return fmt.Errorf("read what the guest said: %w:\n%s", err, lastLines(res.Output, 30))
	}
	if err := d.count(ctx); err != nil {
		return err
	}
	for i := range d.rows {
		f, ok := d.said.rows[i]
		if !ok {
			return fmt.Errorf("the guest said nothing of row %d", i)
		}
		d.rows[i].IOPS, d.rows[i].P50, d.rows[i].P99 = f.iops, f.p50, f.p99
	}
	d.check("in the guest: mkfs.ext4, mount, 8 files written, %.0f verified random writes a second (fio, crc32c), trim, sync, unmount", d.said.write.iops)
	d.check("the guest sees the work disk's cache as %q", d.said.cache)
	return nil
}

func (d *demo) check(format string, args ...any) {
	d.report.Checks = append(d.report.Checks, fmt.Sprintf(format, args...))
}

// buildInitrd packs fio and mke2fs with their libraries.
func (d *demo) buildInitrd(ctx context.Context, kernel *guestvm.Kernel, name string) error {
	var binaries []string
	for _, p := range []string{"fio", "mke2fs"} {
		path, err := exec.LookPath(p)
		if err != nil {
			return fmt.Errorf("pack %s for the guest: %w (install the packages fio and e2fsprogs: scripts/deps.sh)", p, err)
		}
		binaries = append(binaries, path)
	}
	i := guestvm.Initramfs{Kernel: kernel, Binaries: binaries}
	return i.WriteFile(ctx, name)
}

// script is guest.sh with its settings in front.
func (d *demo) script() string {
	var b strings.Builder
	fmt.Fprintf(&b, "RUNTIME=%d\n", max(1, int(d.o.Runtime.Seconds())))
	b.WriteString("ROWS='")
	for i := range d.rows {
		fmt.Fprintf(&b, " %d:%s", i, guestvm.DiskDevice(d.rowDisk(i)))
	}
	b.WriteString("'\n")
	b.WriteString(guestScript)
	return b.String()
}

// parse reads the lines that begin with a key, and fio's JSON objects between the line that announces one and the line
// that ends it.
func (s *guestSaid) parse(out []byte) error {
	s.sums, s.rows = make(map[string]string), make(map[int]fioRow)
	lines := bufio.NewScanner(bytes.NewReader(out))
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		key, rest, _ := strings.Cut(lines.Text(), " ")
		switch key {
		case "sum:":
			sum, name, ok := strings.Cut(rest, " ")
			if !ok {
				return fmt.Errorf("bad line %q", lines.Text())
			}
			s.sums[strings.TrimSpace(name)] = sum
		case "cache:":
			s.cache = rest
		case "fio:":
			row, err := readFio(lines)
			if err != nil {
				return fmt.Errorf("fio's result of %s: %w", rest, err)
			}
			if rest == "write" {
				s.write = row
				continue
			}
			n, err := strconv.Atoi(rest)
			if err != nil {
				return fmt.Errorf("bad line %q", lines.Text())
			}
			s.rows[n] = row
		}
	}
	if len(s.sums) == 0 {
		return errors.New("it told no checksum")
	}
	return lines.Err()
}

// readFio reads fio's JSON up to the line "end:". Warnings that fio prints before it are passed over.
func readFio(lines *bufio.Scanner) (fioRow, error) {
	var text strings.Builder
	for lines.Scan() && lines.Text() != "end:" {
		text.WriteString(lines.Text() + "\n")
	}
	type side struct {
		IOPS float64 `json:"iops"`
		Clat struct {
			Percentile map[string]int64 `json:"percentile"`
		} `json:"clat_ns"`
	}
	var v struct {
		Jobs []struct {
			Error       int `json:"error"`
			Read, Write side
		} `json:"jobs"`
	}
	body := text.String()
	at := strings.IndexByte(body, '{')
	if at < 0 {
		return fioRow{}, errors.New("there is none")
	}
	if err := json.Unmarshal([]byte(body[at:]), &v); err != nil {
		return fioRow{}, err
	}
	if len(v.Jobs) != 1 || v.Jobs[0].Error != 0 {
		return fioRow{}, fmt.Errorf("%d jobs, want 1 without error", len(v.Jobs))
	}
	s := v.Jobs[0].Read
	if s.IOPS == 0 {
		s = v.Jobs[0].Write
	}
	return fioRow{s.IOPS, time.Duration(s.Clat.Percentile["50.000000"]), time.Duration(s.Clat.Percentile["99.000000"])}, nil
}

func lastLines(b []byte, n int) string {
	lines := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}
