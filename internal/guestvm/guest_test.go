// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// helperEnv makes the test binary a process that boots a guest and dies without a chance to clean up.
const helperEnv = "GUESTVM_TEST_ORPHAN"

func TestMain(m *testing.M) {
	if os.Getenv(helperEnv) != "" {
		orphanHelper()
	}
	goleak.VerifyTestMain(m)
}

// needGuest skips where no guest can be booted. A boot takes 2 s on a quiet machine under software emulation and has
// taken 90 s on a loaded one; no test here looks at times.
func needGuest(t *testing.T) {
	t.Helper()
	if testing.Short() {
		t.Skip("boots a guest, which -short leaves out")
	}
	if err := Check(t.Context()); err != nil {
		t.Skip(err)
	}
}

func TestGuestRunsScript(t *testing.T) {
	needGuest(t)
	var console, live bytes.Buffer
	r, err := Run(t.Context(), Config{
		Accel: AccelTCG, Console: &console, Output: &live,
		Files:  []File{{Path: "/data/some file", Data: []byte("packed\n"), Mode: 0o600}},
		Script: "uname -s\ncat '/data/some file'\necho error >&2\necho noise >/dev/console\nsleep 1000 &\nprintf 'a\\r\\nb'\nexit 3\n",
	})
	if err != nil {
		t.Fatal(err)
	}
	const want = "Linux\npacked\nerror\na\r\nb"
	if r.Status != 3 || string(r.Output) != want || r.Truncated {
		t.Errorf("got status %d, output %q; want 3, %q", r.Status, r.Output, want)
	}
	if live.String() != want {
		t.Errorf("live output: got %q", live.String())
	}
	if !bytes.Contains(r.Console, []byte("noise")) || !bytes.Contains(console.Bytes(), []byte("noise")) {
		t.Errorf("console: got %q", r.Console)
	}
	if r.Accel != AccelTCG || r.AccelReason != "asked for" || r.Boot <= 0 || r.Script < 0 || r.GuestUptime <= 0 {
		t.Errorf("got %s (%s), boot %v, script %v, uptime %v", r.Accel, r.AccelReason, r.Boot, r.Script, r.GuestUptime)
	}
	t.Logf("boot %v, script %v", r.Boot, r.Script)
}

// serveDisk has qemu-storage-daemon serve an image of 64 MiB and returns the socket. The server ends with the test.
func serveDisk(t *testing.T, queues int) string {
	t.Helper()
	qsd, err := exec.LookPath("qemu-storage-daemon")
	if err != nil {
		t.Skipf("needs a vhost-user-blk server: %v (install qemu-system-common)", err)
	}
	dir := t.TempDir()
	image, socket := filepath.Join(dir, "disk.raw"), filepath.Join(dir, "vu,sock")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(image, 64<<20); err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd := exec.Command(qsd, "--blockdev", "driver=file,node-name=f,filename="+image,
		"--blockdev", "driver=raw,node-name=d,file=f", "--export", fmt.Sprintf(
			"type=vhost-user-blk,id=e,node-name=d,writable=on,num-queues=%d,addr.type=unix,addr.path=%s", queues, escape(socket)))
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	for range 600 {
		if _, err := os.Stat(socket); err == nil {
			return socket
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("qemu-storage-daemon made no socket: %s", stderr.String())
	return ""
}

// Goal: the whole way that a demonstration goes. Method: another server in the place of ours, two disks, fio and
// e2fsprogs with their libraries, a file system.
func TestGuestUsesDisks(t *testing.T) {
	needGuest(t)
	i := Initramfs{Files: []File{{Path: "/etc/motd", Data: []byte("hi\n")}}}
	for _, p := range []string{"/usr/bin/fio", "/usr/sbin/mke2fs"} {
		if _, err := os.Stat(p); err != nil {
			t.Skipf("needs %s: %v (install fio and e2fsprogs)", p, err)
		}
		i.Binaries = append(i.Binaries, p)
	}
	var err error
	if i.Kernel, err = EnsureKernel(t.Context(), ""); err != nil {
		t.Fatal(err)
	}
	initrd := filepath.Join(t.TempDir(), "initrd")
	if err := i.WriteFile(t.Context(), initrd); err != nil {
		t.Fatal(err)
	}
	off := false
	r, err := Run(t.Context(), Config{
		Accel: AccelTCG, Kernel: i.Kernel, Initrd: []string{initrd}, CPUs: 2,
		Disks: []Disk{{Socket: serveDisk(t, 2), Queues: 2}, {Socket: serveDisk(t, 1), ConfigWCE: &off, Reconnect: 1}},
		Script: `set -e
cat /etc/motd
cat /sys/block/vda/queue/write_cache
ls /sys/block/vda/mq | wc -l
ls /sys/block/vdb/mq | wc -l
mke2fs -q -t ext4 /dev/vda
mount -t ext4 /dev/vda /mnt
echo kept >/mnt/file
umount /mnt
mount -t ext4 /dev/vda /mnt
cat /mnt/file
umount /mnt
fio --name=v --filename=/dev/vdb --rw=randwrite --bs=4k --size=1M --ioengine=libaio --direct=1 --iodepth=16 --verify=crc32c --eta=never --output=/tmp/log || cat /tmp/log
`})
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(r.Output), "\n")
	want := []string{"hi", "write through|write back", "2", "1", "kept", ""}
	if r.Status != 0 || len(lines) != len(want) {
		t.Fatalf("got status %d, output:\n%s", r.Status, r.Output)
	}
	for n := range want {
		if !strings.Contains("|"+want[n]+"|", "|"+lines[n]+"|") {
			t.Errorf("line %d: got %q, want %q", n, lines[n], want[n])
		}
	}
	t.Logf("boot with fio and mke2fs packed: %v, script %v", r.Boot, r.Script)
}

// Goal: any static Go program runs in the guest, with files that it reads.
func TestGuestTool(t *testing.T) {
	needGuest(t)
	tool := filepath.Join(t.TempDir(), "tool")
	build := exec.Command("go", "build", "-o", tool, "./testdata/tool")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH=amd64", "GOFLAGS=")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v: %s", err, out)
	}
	r, err := Run(t.Context(), Config{
		Accel:  AccelTCG,
		Files:  []File{{Path: "/usr/bin/tool", Source: tool}, {Path: "/data/x", Data: []byte("its file\n")}},
		Script: "tool /data/x",
	})
	if err != nil {
		t.Fatal(err)
	}
	if r.Status != 0 || string(r.Output) != "tool read its file\n" {
		t.Errorf("got status %d, output %q", r.Status, r.Output)
	}
}

func TestGuestIsKilled(t *testing.T) {
	needGuest(t)
	g, err := Boot(t.Context(), Config{Accel: AccelTCG, Script: "echo now; sleep 1000"})
	if err != nil {
		t.Fatal(err)
	}
	if err := g.WaitOutput(t.Context(), "now\n"); err != nil {
		t.Fatal(err)
	}
	g.Kill()
	g.Kill()
	r, err := g.Wait()
	if !errors.Is(err, ErrKilled) || string(r.Output) != "now\n" {
		t.Errorf("got output %q, %v", r.Output, err)
	}
	if !gone(g.Pid()) {
		t.Errorf("process %d is still there", g.Pid())
	}
	if err := g.WaitOutput(t.Context(), "never"); !errors.Is(err, ErrKilled) {
		t.Errorf("waiting for output of a dead guest: %v", err)
	}
}

func TestGuestEndsWithItsContext(t *testing.T) {
	needGuest(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	g, err := Boot(ctx, Config{Accel: AccelTCG, Args: []string{"-S"}}) // -S: the CPU is not started
	if err != nil {
		t.Fatal(err)
	}
	cause := errors.New("enough")
	cancel(cause)
	if _, err := g.Wait(); !errors.Is(err, cause) {
		t.Errorf("got %v", err)
	}
	if !gone(g.Pid()) {
		t.Errorf("process %d is still there", g.Pid())
	}
}

func TestGuestThatPanicsIsReported(t *testing.T) {
	needGuest(t)
	r, err := Run(t.Context(), Config{Accel: AccelTCG, Script: "echo last words; sleep 1; echo c >/proc/sysrq-trigger; sleep 1000"})
	if err == nil || !strings.Contains(err.Error(), "it went down while the script ran") || !strings.Contains(err.Error(), "Kernel panic - not syncing: sysrq") {
		t.Errorf("got %v", err)
	}
	if string(r.Output) != "last words\n" {
		t.Errorf("got output %q", r.Output)
	}
}

func TestGuestWithoutItsDeviceIsReported(t *testing.T) {
	needGuest(t)
	_, err := Run(t.Context(), Config{Accel: AccelTCG, Devices: []string{"/dev/nosuch"}, deviceWait: time.Second})
	if err == nil || !strings.Contains(err.Error(), "prepare guest: no /dev/nosuch after 1 seconds") {
		t.Errorf("got %v", err)
	}
}

func TestSilentGuestIsReported(t *testing.T) {
	needGuest(t)
	_, err := Run(t.Context(), Config{Accel: AccelTCG, Args: []string{"-S"}, Silence: time.Second})
	for _, want := range []string{"nothing printed for 1s", "/dev/kvm", "accelerator: tcg (asked for)"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
}

func TestTimeoutIsReported(t *testing.T) {
	needGuest(t)
	_, err := Run(t.Context(), Config{Accel: AccelTCG, Args: []string{"-S"}, Timeout: time.Second})
	if err == nil || !strings.Contains(err.Error(), "not finished after 1s") {
		t.Errorf("got %v", err)
	}
}

func TestQEMUsLastWordsAreReported(t *testing.T) {
	needGuest(t)
	_, err := Run(t.Context(), Config{Accel: AccelTCG, Disks: []Disk{{Socket: "/nonexistent/vu.sock"}}})
	if err == nil || !strings.Contains(err.Error(), "/nonexistent/vu.sock") || !strings.Contains(err.Error(), "before its first process ran") {
		t.Errorf("got %v", err)
	}
}

func TestBootWithoutQEMU(t *testing.T) {
	_, err := Boot(t.Context(), Config{QEMU: "/nonexistent/qemu"})
	if err == nil || !strings.Contains(err.Error(), "install qemu-system-x86") {
		t.Errorf("got %v", err)
	}
}

// Goal: no QEMU stays behind when its starter dies without a word. Method: this binary again, killed by SIGKILL.
func TestQEMUDiesWithItsStarter(t *testing.T) {
	needGuest(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), helperEnv+"=1")
	out, err := cmd.Output() // the helper kills itself
	var pid int
	if _, scanErr := fmt.Sscanf(string(out), "qemu %d\n", &pid); scanErr != nil {
		t.Fatalf("helper: %v: %q", err, out)
	}
	for range 600 {
		if gone(pid) {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Errorf("process %d is still there", pid)
}

func orphanHelper() {
	g, err := Boot(context.Background(), Config{Accel: AccelTCG, Args: []string{"-S"}})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Printf("qemu %d\n", g.Pid())
	self, _ := os.FindProcess(os.Getpid())
	self.Kill()
	select {}
}

// gone tells whether a process has ended; one that nobody has waited for yet counts as ended.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return strings.HasPrefix(after, "Z")
}
