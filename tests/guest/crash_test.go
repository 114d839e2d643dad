// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/guestvm"
	"github.com/sluice-blk/sluice/tests/guest/stamp"
)

const (
	jobs  = 4  // that write at the same time, so that requests are in flight at every moment
	kills = 20 // how often QEMU dies
)

// Goal: what a guest wrote and flushed is there after QEMU died in the middle of other writes, and the server goes on.
// Method: a writer in the guest stamps each sector and tells what it flushed; QEMU is killed at a random moment, and
// the host plays the writes again to know what must be in the image.
func TestFlushedWritesSurviveDeathOfQEMU(t *testing.T) {
	needGuest(t)
	seed := rand.Uint64() >> 1
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	path, socket := image(t, "disk.raw", jobs*stamp.JobSectors*stamp.SectorSize), socketPath(t)
	s := serve(t, "--disk", path+",queues=2", "--vhost-user", socket)
	check := newChecker(path, seed)
	for round := range uint32(kills) {
		// Some rounds die before the first flush, most between two.
		output := writeAndDie(t, guestvm.Disk{Socket: socket, Queues: 2}, seed, round, random.IntN(3*jobs), random.IntN(50))
		idle(t, socket)
		if err := check.round(round, output); err != nil {
			t.Fatalf("round %d, seed %d: %v", round, seed, err)
		}
	}
	t.Logf("%d writes flushed, %d sectors checked, %d of them held what was written behind the last flush",
		check.flushed, check.checked, check.later)
	if check.flushed == 0 || check.later == 0 {
		t.Error("no round died in mid-write after a flush: nothing was tested")
	}
	if !s.alive() {
		t.Fatal("the server is gone")
	}
	s.stop()
}

// writeAndDie boots a guest that writes, kills it some milliseconds after it has told of that many flushes, and answers
// all that it had said by then.
func writeAndDie(t *testing.T, d guestvm.Disk, seed uint64, round uint32, flushes, ms int) string {
	t.Helper()
	var live lines
	cfg := machine(fmt.Sprintf("exec writer stamp /dev/vda %d %d %d", seed, round, jobs), d)
	cfg.Output = &live
	g := boot(t, cfg)
	waitFor(t, g, "writing\n")
	for deadline := time.Now().Add(patience); strings.Count(live.String(), "flushed") < flushes; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("round %d: the guest does not get on:\n%s", round, &live)
		}
	}
	time.Sleep(time.Duration(ms) * time.Millisecond)
	g.Kill()
	r, err := g.Wait()
	if !errors.Is(err, guestvm.ErrKilled) {
		t.Fatalf("round %d: the guest ended by itself: %v\n%s", round, err, r.Output)
	}
	return string(r.Output)
}

// Goal: a crash of the server leaves nothing behind that keeps it, or the next guest, from working. What the old guest
// had in flight is not looked at. Method: SIGKILL under a guest that writes and waits to connect again.
func TestServerStartsAgainAfterItsDeath(t *testing.T) {
	needGuest(t)
	path, socket := image(t, "disk.raw", jobs*stamp.JobSectors*stamp.SectorSize), socketPath(t)
	args := []string{"--disk", path, "--vhost-user", socket}
	s := serve(t, args...)
	old := boot(t, machine(fmt.Sprintf("exec writer stamp /dev/vda 1 1 %d", jobs), guestvm.Disk{Socket: socket, Reconnect: 1}))
	waitFor(t, old, "flushed")
	s.kill()
	s = serve(t, args...)
	old.Kill()
	idle(t, socket)
	got := run(t, machine(`echo kept >/dev/vda
sync
echo "read: $(head -n 1 /dev/vda)"`, guestvm.Disk{Socket: socket}))
	expect(t, got, map[string]string{"read": "kept"})
	s.stop()
}
