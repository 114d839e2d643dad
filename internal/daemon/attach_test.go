// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhosttest"
	"github.com/sluice-blk/sluice/internal/vhostuser"
	"github.com/sluice-blk/sluice/internal/virtqtest"
)

// Goal: a large guest is attached at once: its memory is mapped and not looked at. Method: a guest of 16 GiB, none of it
// there yet, with 256 queues on two loops, which hands its memory over before they run and, as at a hot-plug, while they
// do. The least of three is compared, with a bound of many times what it takes, since the machines are slow and shared.
func TestLargeGuestIsAttachedAtOnce(t *testing.T) {
	const bound, memory, queues = time.Second, 16 << 30, 256
	socket := filepath.Join(t.TempDir(), "s")
	start(t, Config{Loops: make([]LoopConfig, 2), Disks: []DiskConfig{
		{Driver: "null", Size: 1 << 30, Queues: queues, Exports: []ExportConfig{{Socket: socket}}},
	}})
	mem, err := virtqtest.NewMemory(0, memory)
	if errors.Is(err, syscall.ENOMEM) {
		t.Skip("needs 16 GiB of address space")
	}
	must(t, err)
	defer mem.Close()
	f, err := vhosttest.Dial(t.Context(), socket)
	must(t, err)
	defer f.Close()
	must(t, f.Negotiate(vhostuser.FeatureVersion1|vhostuser.FeatureProtocolFeatures|virtioblk.FeatureMQ, vhostuser.ProtocolReplyAck|vhostuser.ProtocolMQ))

	handOver := func() time.Duration {
		best := time.Hour
		for range 3 {
			began := time.Now()
			must(t, f.SetMemTable(mem.Region()))
			best = min(best, time.Since(began))
		}
		return best
	}
	idle := handOver()
	began := time.Now()
	var drivers []*virtqtest.Driver
	var kicks []int
	for i := range queues {
		d, err := virtqtest.NewDriver(mem, virtqtest.DriverConfig{Size: 256})
		must(t, err)
		kick, err := sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
		must(t, err)
		defer sys.Close(kick)
		desc, avail, used := d.Addrs()
		must(t, f.SetVring(vhosttest.Vring{Index: i, Size: 256, Desc: desc, Avail: avail, Used: used, Kick: kick, Call: -1, Err: -1}))
		drivers, kicks = append(drivers, d), append(kicks, kick)
	}
	queuesUp := time.Since(began)
	running := handOver()
	t.Logf("SET_MEM_TABLE of 16 GiB: %v with no queue, %v with %d that run; to start these: %v", idle, running, queues, queuesUp)
	if idle > bound || running > bound {
		t.Errorf("SET_MEM_TABLE took %v with no queue and %v with %d, want at most %v", idle, running, queues, bound)
	}
	// The last queue works in the new table.
	b, err := mem.Alloc(virtioblk.HeaderSize+512+1, 16)
	must(t, err)
	virtioblk.Header{Type: virtioblk.TypeIn}.Encode(b.Bytes)
	d := drivers[queues-1]
	d.Add([]virtqtest.Segment{{Addr: b.Addr, Len: virtioblk.HeaderSize}}, []virtqtest.Segment{{Addr: b.Addr + virtioblk.HeaderSize, Len: 513}})
	d.Publish()
	must(t, sys.EventfdWrite(kicks[queues-1], 1))
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		if _, written, ok := d.Used(); ok {
			if written != 513 {
				t.Errorf("used length %d, want 513", written)
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no answer on the last queue: %v", d.Err())
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
