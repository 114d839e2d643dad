// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/proto/virtioblk"
	"github.com/sluice-blk/sluice/internal/sys"
	"github.com/sluice-blk/sluice/internal/vhosttest"
	"github.com/sluice-blk/sluice/internal/vhostuser"
	"github.com/sluice-blk/sluice/internal/virtqtest"
)

// slots is how many requests a killClient has on their way.
const slots = 32

// killClient is a guest's driver that writes blocks with their number and the round in them, and knows of each what must be
// there after a crash: what was flushed, or something that was written later.
type killClient struct {
	t       *testing.T
	f       *vhosttest.Frontend
	mem     *virtqtest.Memory
	drv     *virtqtest.Driver
	kick    int
	header  virtqtest.Buffer
	data    virtqtest.Buffer
	status  virtqtest.Buffer
	blocks  int
	rng     *rand.Rand
	round   uint64
	flushed []uint64 // for each block the round that is durable
	written []uint64 // and the last one that was submitted
	before  []uint64 // scratch: acknowledged since the last flush
}

const killBlock = 4096

// connect makes the disk of socket the client's, with nothing on its way.
func (c *killClient) connect(socket string) {
	t := c.t
	t.Helper()
	must := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var err error
	c.f, err = vhosttest.Dial(ctx, socket)
	must(err)
	must(c.f.Negotiate(vhostuser.FeatureVersion1|vhostuser.FeatureProtocolFeatures|virtioblk.FeatureFlush|virtioblk.FeatureDiscard,
		vhostuser.ProtocolReplyAck|vhostuser.ProtocolConfig))
	c.mem, err = virtqtest.NewMemory(1<<32, 4<<20)
	must(err)
	c.drv, err = virtqtest.NewDriver(c.mem, virtqtest.DriverConfig{Size: 128})
	must(err)
	c.header, err = c.mem.Alloc(64*slots, 64)
	must(err)
	c.data, err = c.mem.Alloc(killBlock*slots, 4096)
	must(err)
	c.status, err = c.mem.Alloc(slots, 1)
	must(err)
	c.kick, err = sys.Eventfd(0, sys.EFD_CLOEXEC|sys.EFD_NONBLOCK)
	must(err)
	must(c.f.SetMemTable(c.mem.Region()))
	desc, avail, used := c.drv.Addrs()
	must(c.f.SetVring(vhosttest.Vring{Index: 0, Size: 128, Desc: desc, Avail: avail, Used: used, Kick: c.kick, Call: -1, Err: -1}))
}

func (c *killClient) disconnect() {
	_ = c.f.Close()
	_ = c.mem.Close()
	_ = sys.Close(c.kick)
}

// place adds a request on slot i; nil data is a flush.
func (c *killClient) place(kind virtioblk.RequestType, i, block int) uint16 {
	h := virtioblk.Header{Type: kind, Sector: uint64(block) * killBlock / virtioblk.SectorSize}
	at := c.header.Bytes[i*64:]
	h.Encode(at)
	c.status.Bytes[i] = 0xee
	readable := []virtqtest.Segment{{Addr: c.header.Addr + uint64(i)*64, Len: virtioblk.HeaderSize}}
	writable := []virtqtest.Segment{{Addr: c.status.Addr + uint64(i), Len: 1}}
	data := virtqtest.Segment{Addr: c.data.Addr + uint64(i)*killBlock, Len: killBlock}
	switch kind {
	case virtioblk.TypeOut:
		readable = append(readable, data)
	case virtioblk.TypeIn:
		writable = append([]virtqtest.Segment{data}, writable...)
	}
	head, ok := c.drv.Add(readable, writable)
	if !ok {
		c.t.Fatal("the ring is full")
	}
	return head
}

// finish waits for all that is on its way. It is false when the server is gone.
func (c *killClient) finish(gone func() bool) bool {
	c.drv.Publish()
	if err := sys.EventfdWrite(c.kick, 1); err != nil {
		c.t.Fatal(err)
	}
	for begin := time.Now(); c.drv.Out() > 0; {
		if _, _, ok := c.drv.Used(); ok {
			continue
		}
		if err := c.drv.Err(); err != nil {
			c.t.Fatal(err)
		}
		if gone() {
			return false
		}
		if time.Since(begin) > patience {
			c.t.Fatal("the server does not answer")
		}
		time.Sleep(50 * time.Microsecond)
	}
	return true
}

func (c *killClient) allOK(n int) {
	c.t.Helper()
	for i := range n {
		if s := virtioblk.Status(c.status.Bytes[i]); s != virtioblk.StatusOK {
			c.t.Fatalf("request %d of a batch: status %d", i, s)
		}
	}
}

func stampBlock(b []byte, block int, round uint64) {
	word := fmt.Sprintf("block %d round %d;", block, round)
	for len(b) > 0 {
		b = b[copy(b, word):]
	}
}

// work writes batches of random blocks, and flushes, until the server is gone.
func (c *killClient) work(gone func() bool) {
	for !gone() {
		c.round++
		taken := make(map[int]bool)
		var blocks []int
		for len(blocks) < slots {
			b := c.rng.IntN(c.blocks)
			if taken[b] {
				continue
			}
			taken[b] = true
			stampBlock(c.data.Bytes[len(blocks)*killBlock:(len(blocks)+1)*killBlock], b, c.round)
			c.place(virtioblk.TypeOut, len(blocks), b)
			c.written[b] = c.round
			blocks = append(blocks, b)
		}
		if !c.finish(gone) {
			return
		}
		c.allOK(len(blocks))
		for _, b := range blocks {
			c.before[b] = c.round
		}
		if c.rng.IntN(3) > 0 {
			continue
		}
		c.place(virtioblk.TypeFlush, 0, 0)
		if !c.finish(gone) {
			return
		}
		c.allOK(1)
		copy(c.flushed, c.before)
	}
}

// verify reads every block: it must hold a round that was written, not older than the one that was flushed.
func (c *killClient) verify() {
	c.t.Helper()
	want := make([]byte, killBlock)
	for first := 0; first < c.blocks; first += slots {
		n := min(slots, c.blocks-first)
		for i := range n {
			c.place(virtioblk.TypeIn, i, first+i)
		}
		c.finish(func() bool { return false })
		c.allOK(n)
		for i := range n {
			block := first + i
			got := c.data.Bytes[i*killBlock : (i+1)*killBlock]
			round := uint64(0)
			if got[0] != 0 {
				if _, err := fmt.Sscanf(string(got[:40]), fmt.Sprintf("block %d round %%d;", block), &round); err != nil {
					c.t.Fatalf("block %d holds %q", block, got[:40])
				}
				stampBlock(want, block, round)
			} else {
				clear(want)
			}
			if !bytes.Equal(got, want) || round < c.flushed[block] || round > c.written[block] {
				c.t.Fatalf("block %d holds round %d, flushed was %d, written %d; or is torn", block, round, c.flushed[block], c.written[block])
			}
			c.before[block], c.flushed[block] = round, round
		}
	}
}

// A server that is killed in the middle of its work leaves an image in which at worst space is lost, and in which all is that
// was flushed. Tests of a night do more rounds.
func TestKilledServersLeaveSoundImages(t *testing.T) {
	if _, err := exec.LookPath("qemu-img"); err != nil {
		t.Skip("needs qemu-img, to look at images")
	}
	rounds := 12
	if os.Getenv("SLUICE_SOAK") != "" {
		rounds = 1000
	}
	for _, options := range []string{"cluster_size=64k", "cluster_size=4k,refcount_bits=1", "extended_l2=on", "lazy_refcounts=on"} {
		name, _, _ := strings.Cut(options, ",") // the name becomes a path, and a comma means something there
		t.Run(name, func(t *testing.T) { killRounds(t, options, (rounds+3)/4) })
	}
}

func killRounds(t *testing.T, options string, rounds int) {
	dir := t.TempDir()
	path := filepath.Join(dir, "disk.qcow2")
	const size = 64 << 20
	qemuImg := func(args ...string) (string, int) {
		out, err := exec.Command("qemu-img", args...).CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if exit != nil {
			return string(out), exit.ExitCode()
		}
		return string(out), 0
	}
	if out, exit := qemuImg("create", "-q", "-f", "qcow2", "-o", options, path, fmt.Sprint(size)); exit != 0 {
		t.Fatal(out)
	}
	seed := uint64(time.Now().UnixNano())
	c := &killClient{t: t, blocks: size / killBlock, rng: rand.New(rand.NewPCG(seed, 0))}
	c.flushed, c.written, c.before = make([]uint64, c.blocks), make([]uint64, c.blocks), make([]uint64, c.blocks)
	for round := range rounds {
		socket := filepath.Join(dir, fmt.Sprintf("s%d", round))
		p := spawn(t, nil, "serve", "--disk", path+",format=qcow2,l2-cache-size=64K", "--vhost-user", socket)
		p.ready()
		c.connect(socket)
		c.verify()
		dead := time.Now().Add(time.Duration(c.rng.IntN(400)) * time.Millisecond)
		killed := false
		c.work(func() bool {
			if !killed && time.Now().After(dead) {
				killed = true
				_ = p.cmd.Process.Signal(syscall.SIGKILL)
			}
			return killed
		})
		p.killed()
		c.disconnect()
		// The kernel takes a process's rings down some time after it, and its files and locks with them.
		var out string
		exit := 0
		for begin := time.Now(); ; time.Sleep(10 * time.Millisecond) {
			out, exit = qemuImg("check", "-q", "-f", "qcow2", path)
			if !strings.Contains(out, "lock") || time.Since(begin) > patience {
				break
			}
		}
		dirty := strings.Contains(out, "dirty")
		if lazy := options == "lazy_refcounts=on"; exit != 0 && exit != 3 && !lazy {
			t.Fatalf("round %d (seed %d): qemu-img check ends with %d (dirty %v):\n%.2000s", round, seed, exit, dirty, out)
		}
	}
	// The last one is left to a server that ends in peace: then nothing is lost but what kills leaked, and check mends that.
	socket := filepath.Join(dir, "last")
	p := spawn(t, nil, "serve", "--disk", path+",format=qcow2", "--vhost-user", socket)
	p.ready()
	c.connect(socket)
	c.verify()
	c.disconnect()
	p.signal(syscall.SIGTERM)
	p.ends(exitOK, "stopping")
	if out, exit := qemuImg("check", "-q", "-r", "leaks", "-f", "qcow2", path); exit != 0 {
		t.Fatalf("qemu-img check -r leaks ends with %d:\n%.2000s", exit, out)
	}
	if out, exit := qemuImg("check", "-q", "-f", "qcow2", path); exit != 0 {
		t.Fatalf("qemu-img check ends with %d after that:\n%.2000s", exit, out)
	}
}
