// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-blk/sluice/aio"
	"github.com/sluice-blk/sluice/internal/guestvm"
)

const (
	block  = 4096
	writes = 5 // of each kind; what becomes of each is looked at
	// Where the writes go tells them apart in the trace. Each kind has a megabyte of its own.
	buffered = 16 << 20 // written through the page cache and followed by fsync
	direct   = 17 << 20 // O_DIRECT, no fsync
	through  = 18 << 20 // the same, after the guest has switched the cache off
	back     = 19 << 20 // the same, after the guest has switched it on again
)

// cacheScript makes the writes of one disk, between syncs that keep them apart from what others left behind.
func cacheScript(dev string, cache string) string {
	s := strings.NewReplacer("DEV", dev, "BUFFERED", fmt.Sprint(buffered/block), "DIRECT", fmt.Sprint(direct),
		"THROUGH", fmt.Sprint(through), "BACK", fmt.Sprint(back), "N", fmt.Sprint(writes)).Replace(`
echo "DEV: $(cat /sys/block/DEV/queue/write_cache)"
for i in $(seq 0 $((N - 1))); do
	dd if=/dev/zero of=/dev/DEV bs=4k count=1 seek=$((BUFFERED + i)) conv=notrunc,fsync 2>/dev/null || exit 1
done
writer direct /dev/DEV DIRECT N || exit 1
`)
	if cache != "none" {
		return s
	}
	return s + strings.NewReplacer("DEV", dev, "THROUGH", fmt.Sprint(through), "BACK", fmt.Sprint(back), "N", fmt.Sprint(writes)).Replace(`
echo "write through" >/sys/block/DEV/cache_type || exit 1
echo "DEV switched: $(cat /sys/block/DEV/queue/write_cache)"
writer direct /dev/DEV THROUGH N || exit 1
echo "write back" >/sys/block/DEV/cache_type || exit 1
echo "DEV switched again: $(cat /sys/block/DEV/queue/write_cache)"
writer direct /dev/DEV BACK N || exit 1
`)
}

// Goal: what the guest believes of its write cache is true: an fsync reaches the host, a disk without cache completes
// writes that are durable, the guest's own switch works, and only unsafe ignores it all. Method: strace looks on while
// the guest writes to places that tell the writes apart.
func TestWriteCacheIsTrue(t *testing.T) {
	needGuest(t)
	if _, err := exec.LookPath("strace"); err != nil {
		t.Skipf("needs strace to see what reaches the host: %v (install strace)", err)
	}
	for _, engine := range []string{"threads", "linux-aio"} {
		t.Run(engine, func(t *testing.T) {
			t.Parallel()
			traceCache(t, engine)
		})
	}
}

func traceCache(t *testing.T, engine string) {
	caches := []string{"none", "writethrough", "unsafe"}
	if engine == "threads" {
		caches = append(caches, "writeback")
	}
	var args []string
	var script strings.Builder
	var disks []guestvm.Disk
	paths := make(map[string]string)
	for i, cache := range caches {
		socket := socketPath(t)
		paths[cache] = image(t, cache+".raw", 32<<20)
		args = append(args, "--disk", fmt.Sprintf("%s,cache=%s,engine=%s", paths[cache], cache, engine), "--vhost-user", socket)
		disks = append(disks, guestvm.Disk{Socket: socket})
		script.WriteString(cacheScript(filepath.Base(guestvm.DiskDevice(i)), cache))
	}
	log := filepath.Join(t.TempDir(), "trace")
	s := serveUnder(t, strace(log), args...)
	got := run(t, machine(script.String(), disks...))
	s.stop()
	expect(t, got, map[string]string{
		"vda": "write back", "vdb": "write through", "vdc": "write back",
		"vda switched": "write through", "vda switched again": "write back"})
	trace := readTrace(t, log)
	for cache, want := range map[string]map[int64]int{
		"none":         {buffered: writes, direct: 0, through: writes, back: 0},
		"writeback":    {buffered: writes, direct: 0},
		"writethrough": {buffered: writes, direct: writes},
		"unsafe":       {buffered: 0, direct: 0},
	} {
		if paths[cache] == "" {
			continue
		}
		for place, n := range want {
			made, durable := trace.durable(paths[cache], place)
			t.Logf("cache=%s: %d writes from %d M on, %d of them durable before the next one", cache, made, place>>20, durable)
			// What need not be durable may become so by accident: the last write of a kind is followed by what comes then.
			if made != writes || durable < n || n == 0 && durable > 1 {
				t.Errorf("cache=%s: got %d writes from %d M on and %d durable, want %d and %d", cache, made, place>>20, durable, writes, n)
			}
		}
		if n := trace.syncs(paths[cache]); cache == "unsafe" && n != 0 {
			t.Errorf("cache=unsafe: %d times the image was synced, want 0", n)
		}
	}
}

// needIOUring skips where the kernel refuses it.
func needIOUring(t *testing.T) {
	t.Helper()
	l, err := aio.NewLoop(&aio.LoopOptions{Poller: aio.PollerIOUring})
	if err != nil {
		t.Skipf("needs io_uring: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// Goal: the same for io_uring, whose requests no system call shows. Method: the disk's fault node lets a number of
// flushes fail; so that many fsyncs of the guest fail, and the one behind them does not.
func TestEveryFsyncIsAFlushOnIOUring(t *testing.T) {
	needGuest(t)
	needIOUring(t)
	fault, socket := image(t, "fault.raw", 32<<20), socketPath(t)
	s := serve(t, "--disk", fmt.Sprintf("%s,engine=io_uring,fault=flush error=EIO count=%d", fault, writes), "--vhost-user", socket)
	got := run(t, machine(`
for i in $(seq 1 20); do
	dd if=/dev/zero of=/dev/vda bs=4k count=1 seek=$i conv=notrunc,fsync 2>/dev/null && break
done
echo "succeeded: $i"`, guestvm.Disk{Socket: socket}))
	expect(t, got, map[string]string{"succeeded": fmt.Sprint(writes + 1)})
	s.stop()
}

// Goal: those flushes, and the writes that must be durable, reach the device below. Method: loop devices, of which the
// kernel counts the flushes that they get.
func TestFlushesReachTheDeviceWithIOUring(t *testing.T) {
	needGuest(t)
	needIOUring(t)
	caches := []string{"none", "writethrough", "unsafe"}
	var args, devices []string
	var script strings.Builder
	var disks []guestvm.Disk
	for i, cache := range caches {
		device, err := loopDevice(t, image(t, cache+".raw", 32<<20))
		if err != nil {
			// Not a skip: what can be seen without loop devices is in TestEveryFsyncIsAFlushOnIOUring.
			t.Logf("nothing tested: needs loop devices: %v", err)
			return
		}
		socket := socketPath(t)
		devices = append(devices, device)
		args = append(args, "--disk", fmt.Sprintf("%s,cache=%s,engine=io_uring", device, cache), "--vhost-user", socket)
		disks = append(disks, guestvm.Disk{Socket: socket})
		script.WriteString(cacheScript(filepath.Base(guestvm.DiskDevice(i)), cache))
	}
	s := serve(t, args...)
	before := flushes(t, devices)
	run(t, machine(script.String(), disks...))
	after := flushes(t, devices)
	s.stop()
	for i, cache := range caches {
		n := after[i] - before[i]
		t.Logf("cache=%s: the device got %d flushes", cache, n)
		// none: the fsyncs, and the writes after the switch; writethrough: both kinds of writes.
		if least := 2 * writes; cache != "unsafe" && n < least {
			t.Errorf("cache=%s: the device got %d flushes, want at least %d", cache, n, least)
		}
		if cache == "unsafe" && n != 0 {
			t.Errorf("cache=unsafe: the device got %d flushes, want 0", n)
		}
	}
}

// loopDevice makes a block device of a file, until the test ends.
func loopDevice(t *testing.T, file string) (string, error) {
	out, err := exec.Command("losetup", "--find", "--show", file).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("losetup: %w: %s", err, out)
	}
	device := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "--detach", device).CombinedOutput(); err != nil {
			t.Errorf("detach %s: %v: %s", device, err, out)
		}
	})
	return device, nil
}

// flushes reads how many flushes each device got, the 16th number of its statistics.
func flushes(t *testing.T, devices []string) []int {
	t.Helper()
	var counts []int
	for _, d := range devices {
		text, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(d), "stat"))
		if err != nil {
			t.Fatal(err)
		}
		fields := strings.Fields(string(text))
		if len(fields) < 16 {
			t.Fatalf("the statistics of %s have %d numbers, want 16 (Linux 5.5)", d, len(fields))
		}
		n, err := strconv.Atoi(fields[15])
		if err != nil {
			t.Fatal(err)
		}
		counts = append(counts, n)
	}
	return counts
}
