// SPDX-License-Identifier: Apache-2.0

//go:build bench

package guest

import (
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-blk/sluice/internal/guestvm"
)

const seriesRounds = 7

// Goal: the job of the batching series in a booted guest, ours beside the peer's. Method: one guest with a disk of each,
// both on copies of one image, and the job in turns. Under software emulation the guest is the limit, so that only the
// ratio of the medians says anything; it is printed, not judged: `go test -tags bench -run Series -v ./tests/guest`.
func TestSeriesJobBesideThePeer(t *testing.T) {
	needGuest(t)
	tools := needTools(t)
	qsd, err := exec.LookPath("qemu-storage-daemon")
	if err != nil {
		t.Skipf("needs the peer (apt-get install qemu-system-common): %v", err)
	}
	dir := t.TempDir()
	data := make([]byte, 256<<20)
	if _, err := rand.Read(data); err != nil {
		t.Fatal(err)
	}
	images := []string{filepath.Join(dir, "ours.raw"), filepath.Join(dir, "peer.raw")}
	for _, name := range images {
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	sockets := []string{socketPath(t), socketPath(t)}
	s := serve(t, "--disk", images[0]+",cache=none", "--vhost-user", sockets[0])
	peer := exec.Command(qsd, "--blockdev", "driver=file,node-name=f,filename="+images[1]+",cache.direct=on,aio=native",
		"--blockdev", "driver=raw,node-name=d,file=f",
		"--export", "type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path="+sockets[1]+",writable=on,num-queues=1")
	if err := peer.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = peer.Process.Kill()
		_ = peer.Wait()
	}()
	cfg := machine(fmt.Sprintf(`
for round in $(seq %d); do
	for disk in a b; do
		fio --name=s --filename=/dev/vd$disk --readonly --rw=randread --bs=4k --ioengine=libaio --direct=1 --iodepth=64 --numjobs=4 \
			--group_reporting --time_based --runtime=4 --output-format=terse --terse-version=3 --eta=never 2>/dev/null | grep '^3;' >/tmp/t
		echo "iops: $disk $(cut -d';' -f8 /tmp/t)"
	done
done
`, seriesRounds), guestvm.Disk{Socket: sockets[0], QueueSize: 256}, guestvm.Disk{Socket: sockets[1], QueueSize: 256})
	cfg.Initrd, cfg.CPUs, cfg.MemMiB = []string{tools}, 2, 1024
	result, err := guestvm.Run(t.Context(), cfg)
	if err != nil || result.Status != 0 {
		t.Fatalf("%v, status %d:\n%s", err, result.Status, result.Output)
	}
	iops := map[string][]float64{}
	for line := range strings.Lines(string(result.Output)) {
		var disk, value string
		if n, _ := fmt.Sscanf(line, "iops: %s %s", &disk, &value); n != 2 {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("bad line %q", line)
		}
		iops[disk] = append(iops[disk], v)
	}
	if len(iops["a"]) != seriesRounds || len(iops["b"]) != seriesRounds {
		t.Fatalf("got %v", iops)
	}
	var ratios []float64
	for i := range seriesRounds {
		ratios = append(ratios, iops["a"][i]/iops["b"][i])
	}
	for _, v := range [][]float64{iops["a"], iops["b"], ratios} {
		slices.Sort(v)
	}
	middle := seriesRounds / 2
	t.Logf("4k random reads, 4 jobs of depth 64, %s: ours %.0f IOPS (%.0f to %.0f), peer %.0f (%.0f to %.0f), ratio in a round %.2f (%.2f to %.2f)",
		result.Accel, iops["a"][middle], iops["a"][0], iops["a"][seriesRounds-1], iops["b"][middle], iops["b"][0], iops["b"][seriesRounds-1],
		ratios[middle], ratios[0], ratios[seriesRounds-1])
	s.stop()
}
