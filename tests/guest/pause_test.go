// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/guestvm"
)

// monitor is QEMU's own, where a machine can be stopped and let go on.
type monitor struct {
	conn net.Conn
	in   *bufio.Scanner
}

func openMonitor(t *testing.T, socket string) *monitor {
	t.Helper()
	conn, err := net.Dial("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	m := &monitor{conn, bufio.NewScanner(conn)}
	if !m.in.Scan() { // the greeting
		t.Fatalf("QEMU's monitor says nothing: %v", m.in.Err())
	}
	m.do(t, "qmp_capabilities")
	return m
}

// do has QEMU execute a command and waits for its answer, which for stop comes after the disks have stopped.
func (m *monitor) do(t *testing.T, command string) {
	t.Helper()
	_ = m.conn.SetDeadline(time.Now().Add(patience)) // a broken connection fails below
	if _, err := fmt.Fprintf(m.conn, "{\"execute\": %q}\n", command); err != nil {
		t.Fatal(err)
	}
	for m.in.Scan() {
		var answer struct {
			Return json.RawMessage
			Error  json.RawMessage
		}
		if err := json.Unmarshal(m.in.Bytes(), &answer); err != nil {
			t.Fatalf("QEMU's monitor says %q: %v", m.in.Text(), err)
		}
		if answer.Error != nil {
			t.Fatalf("%s: %s", command, answer.Error)
		}
		if answer.Return != nil {
			return // what has neither is an event
		}
	}
	t.Fatalf("%s: no answer: %v", command, m.in.Err())
}

// Goal: when a machine is stopped, all that it had asked for is done before the stop is, nothing comes after it, and
// it goes on as if nothing had been. Method: each write takes a while, so that at every stop some are in flight; the
// image must not change while the machine stands still; fio verifies at the end.
func TestMachineStopsAndGoesOnUnderLoad(t *testing.T) {
	needGuest(t)
	tools := needTools(t)
	path, socket, qmp := image(t, "disk.raw", 64<<20), socketPath(t), socketPath(t)
	s := serve(t, "--disk", path+",queues=2,fault=write delay=30ms", "--vhost-user", socket)
	cfg := machine(`
echo started
fio --name=v --filename=/dev/vda --rw=randwrite --bs=4k --size=8m --offset_increment=32m --numjobs=2 --ioengine=libaio --direct=1 --iodepth=16 \
	--verify=crc32c --verify_fatal=1 --eta=never >/tmp/log 2>&1 || { cat /tmp/log; exit 1; }
echo "verified: yes"
`, guestvm.Disk{Socket: socket, Queues: 2})
	cfg.Initrd, cfg.CPUs, cfg.MemMiB = []string{tools}, 2, 512
	cfg.Args = []string{"-qmp", "unix:" + qmp + ",server=on,wait=off"}
	g := boot(t, cfg)
	waitFor(t, g, "started\n")
	m := openMonitor(t, qmp)
	waitForData(t, path)
	stops, changed := 0, 0
	last := sha256File(t, path)
	for range 5 {
		time.Sleep(100 * time.Millisecond)
		m.do(t, "stop")
		stopped := sha256File(t, path)
		time.Sleep(100 * time.Millisecond) // three times what a write takes
		if now := sha256File(t, path); now != stopped {
			t.Errorf("stop %d: the image has changed while the machine stood still", stops)
		}
		if stopped != last {
			changed++
		}
		last = stopped
		stops++
		m.do(t, "cont")
	}
	expect(t, said(wait(t, g)), map[string]string{"verified": "yes"})
	t.Logf("%d stops, %d of them after new writes", stops, changed)
	if changed < 2 {
		t.Error("the guest did not write between the stops: nothing was tested")
	}
	s.stop()
}

// waitForData waits until the image is no longer what it was made as.
func waitForData(t *testing.T, path string) {
	t.Helper()
	empty := sha256File(t, path)
	for deadline := time.Now().Add(patience); sha256File(t, path) == empty; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("nothing was written to %s", filepath.Base(path))
		}
	}
}
