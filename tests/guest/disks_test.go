// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/demo"
	"github.com/sluice-blk/sluice/internal/guestvm"
)

// Goal: the demo holds what it promises, and the job of the batching series leaves in batches when batching is on, and
// one by one when it is off. Method: the demo, shortened, and the server's counters in its table. How much stands in the
// ring at a time depends on when the guest's CPUs get theirs, and is less the sooner the server looks; so the bound is only
// that a submission carries more than one, and small batches have a second chance. How well batches are made is counted
// where the driver is ours.
func TestDemoAndBatchesOfTheSeriesJob(t *testing.T) {
	needGuest(t)
	needTools(t) // for the reason, should they be missing
	for _, format := range []string{"raw", "qcow2"} {
		t.Run(format, func(t *testing.T) {
			small := runDemo(t, format)
			if small != "" {
				t.Logf("once more: %s", small)
				small = runDemo(t, format)
			}
			if small != "" {
				t.Error(small)
			}
		})
	}
}

// runDemo answers which row had small batches though batching was on, or "".
func runDemo(t *testing.T, format string) (small string) {
	t.Helper()
	report, err := demo.Run(t.Context(), demo.Options{Format: format, Dir: t.TempDir(), Size: 256 << 20, Runtime: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s, %d checks, %v", report.Guest, len(report.Checks), report.Duration)
	if !strings.HasPrefix(report.Guest, "Linux ") || len(report.Checks) < 4 {
		t.Errorf("guest %q, checks %q: want a guest and its checks", report.Guest, report.Checks)
	}
	seen := 0
	for _, r := range report.Rows {
		row := fmt.Sprintf("%v, batching %t: %d requests, %.2f a submission, %.1f a notification",
			r.Engine, r.Batching, r.Requests, r.PerSubmission, r.PerNotification)
		t.Log(row)
		if r.Requests == 0 || r.IOPS == 0 {
			t.Errorf("%s: nothing was read", row)
		}
		if r.Engine == aio.EngineThreads {
			continue // it has no system call that carries many
		}
		seen++
		if !r.Batching && r.PerSubmission != 1 {
			t.Errorf("%s: want 1 a submission without batching", row)
		}
		if r.Batching && r.PerSubmission < 1.5 {
			small = row + ": want at least 1.5 a submission"
		}
	}
	if seen == 0 {
		t.Error("no engine that submits in batches was tried")
	}
	return small
}

// Goal: several queues are used, each by its CPU, and what is written through any of them reads back; a read-only disk
// beside it is one for the guest, too, and reads as its file is. Method: fio's verify with a job a CPU, the interrupts
// of each queue, checksums.
func TestFourQueuesAndAReadOnlyDisk(t *testing.T) {
	needGuest(t)
	tools := needTools(t)
	for _, format := range []string{"raw", "qcow2"} {
		t.Run(format, func(t *testing.T) { fourQueuesAndAReadOnlyDisk(t, tools, format) })
	}
}

func fourQueuesAndAReadOnlyDisk(t *testing.T, tools, format string) {
	rw, ro := image(t, "rw.raw", 64<<20), filepath.Join(t.TempDir(), "ro.raw")
	if format == "qcow2" {
		rw = filepath.Join(t.TempDir(), "rw.qcow2")
		command(t, built.sluice, "img", "create", "-q", "-f", "qcow2", rw, "64M")
	}
	seed := [32]byte{4}
	data := make([]byte, 8<<20+512) // not whole in any larger block
	_, _ = rand.NewChaCha8(seed).Read(data)
	if err := os.WriteFile(ro, data, 0o400); err != nil {
		t.Fatal(err)
	}
	sockets := []string{socketPath(t), socketPath(t)}
	s := serve(t, "--loops", "2", "--disk", rw+",format="+format+",queues=4,serial=FOUR", "--vhost-user", sockets[0],
		"--disk", ro+",readonly,queues=4", "--vhost-user", sockets[1])
	cfg := machine(`
echo "queues: $(ls /sys/block/vda/mq | wc -l)"
echo "serial: $(cat /sys/block/vda/serial)"
echo "rw: $(cat /sys/block/vda/ro)"
echo "ro: $(cat /sys/block/vdb/ro)"
fio --name=v --filename=/dev/vda --rw=randwrite --bs=4k --size=8m --offset_increment=16m --numjobs=4 --cpus_allowed=0-3 \
	--cpus_allowed_policy=split --ioengine=libaio --direct=1 --iodepth=16 --verify=crc32c --verify_fatal=1 --eta=never >/tmp/log 2>&1 ||
	{ cat /tmp/log; exit 1; }
echo "used: $(grep -E 'virtio0-req' /proc/interrupts | awk '{ for (i = 2; i <= 5; i++) if ($i > 0) { n++; break } } END { print n }')"
sync
echo "written: $(sha256sum </dev/vda)"
echo "read: $(sha256sum </dev/vdb)"
dd if=/dev/zero of=/dev/vdb bs=4k count=1 conv=fsync 2>/dev/null && echo "write: succeeded" || echo "write: failed"
`, guestvm.Disk{Socket: sockets[0], Queues: 4}, guestvm.Disk{Socket: sockets[1], Queues: 4})
	cfg.Initrd, cfg.CPUs, cfg.MemMiB = []string{tools}, 4, 1024
	before := sha256File(t, ro)
	got := run(t, cfg)
	s.stop()
	if format == "qcow2" {
		command(t, "qemu-img", "check", "-q", "-f", "qcow2", rw)
		raw := filepath.Join(t.TempDir(), "rw.raw")
		command(t, "qemu-img", "convert", "-f", "qcow2", "-O", "raw", rw, raw)
		rw = raw
	}
	expect(t, got, map[string]string{
		"queues": "4", "serial": "FOUR", "rw": "0", "ro": "1", "used": "4", "write": "failed",
		"written": sha256File(t, rw) + "  -", "read": before + "  -"})
	if after := sha256File(t, ro); after != before {
		t.Error("the read-only image has changed")
	}
}

// command runs a program of the host's.
func command(t *testing.T, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
}

// Goal: a guest that leaves makes room for the next one, and a second one that comes too early waits and does no harm.
// Method: guests on one socket that power off, the last two at the same time.
func TestGuestsComeAndGo(t *testing.T) {
	needGuest(t)
	path, socket := image(t, "disk.raw", 16<<20), socketPath(t)
	s := serve(t, "--disk", path, "--vhost-user", socket)
	disk := guestvm.Disk{Socket: socket}
	script := func(n int) string {
		return fmt.Sprintf("echo \"found: $(head -n 1 /dev/vda | tr -d '\\0')\"\necho 'guest %d' >/dev/vda\nsync\n", n)
	}
	const guests = 5
	found := func(n int) map[string]string {
		if n == 1 {
			return map[string]string{"found": ""}
		}
		return map[string]string{"found": fmt.Sprintf("guest %d", n-1)}
	}
	for n := 1; n <= guests-2; n++ {
		expect(t, run(t, machine(script(n), disk)), found(n))
	}
	// The first of the last two works until the second has had the time to disturb it.
	first := boot(t, machine(script(guests-1)+"echo served\n"+
		"for i in $(seq 1 30); do dd if=/dev/vda of=/dev/null bs=64k iflag=direct 2>/dev/null || exit 1; sleep 0.1; done\n", disk))
	waitFor(t, first, "served\n")
	var live lines
	cfg := machine(script(guests), disk)
	cfg.Console = &live
	cfg.Silence = patience
	second := boot(t, cfg)
	expect(t, said(wait(t, first)), found(guests-1))
	if live.String() != "" {
		t.Errorf("the second guest has run while the first one had the disk: %q", live.String())
	}
	expect(t, said(wait(t, second)), found(guests))
	s.stop()
}
