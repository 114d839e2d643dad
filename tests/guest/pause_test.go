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
	path, socket, qmp := image(t, "disk.raw", 16<<20), socketPath(t), socketPath(t)
	s := serve(t, "--disk", path+",queues=2,fault=write delay=30ms", "--vhost-user", socket)
	cfg := machine(`
echo started
fio --name=v --filename=/dev/vda --rw=randwrite --bs=4k --size=8m --offset_increment=8m --numjobs=2 --ioengine=libaio --direct=1 --iodepth=16 \
	--verify=crc32c --verify_fatal=1 --eta=never >/tmp/log 2>&1 || { cat /tmp/log; exit 1; }
echo "verified: yes"
`, guestvm.Disk{Socket: socket, Queues: 2})
	cfg.Initrd, cfg.CPUs, cfg.MemMiB = []string{tools}, 2, 512
	cfg.Args = []string{"-qmp", "unix:" + qmp + ",server=on,wait=off"}
	g := boot(t, cfg)
	waitFor(t, g, "started\n")
	m := openMonitor(t, qmp)
	stops, last := 0, ""
	for stops < 5 && waitForChange(t, g, path, &last) {
		m.do(t, "stop")
		stopped := sha256File(t, path)
		time.Sleep(100 * time.Millisecond) // three times what a write takes
		if last = sha256File(t, path); last != stopped {
			t.Errorf("stop %d: the image has changed while the machine stood still", stops)
		}
		stops++
		m.do(t, "cont")
	}
	expect(t, said(wait(t, g)), map[string]string{"verified": "yes"})
	t.Logf("%d stops under load", stops)
	if stops < 2 {
		t.Errorf("%d stops, each after new writes, want at least 2: nothing was tested", stops)
	}
	s.stop()
}

// waitForChange waits until the image is no longer what last is the sum of, and updates that. It returns false when the
// guest has ended meanwhile.
func waitForChange(t *testing.T, g *guestvm.Guest, path string, last *string) bool {
	t.Helper()
	if *last == "" {
		*last = sha256File(t, path)
	}
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		select {
		case <-g.Done():
			return false
		default:
		}
		if now := sha256File(t, path); now != *last {
			*last = now
			return true
		}
	}
	t.Fatalf("nothing is written to %s", filepath.Base(path))
	return false
}
