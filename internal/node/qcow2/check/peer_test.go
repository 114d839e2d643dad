// SPDX-License-Identifier: Apache-2.0

// Goal: our check and the other program's say the same of every image, sound or broken. Method: images of many kinds are
// made by the other program; seeded changes of their tables break them; both count, and every count must be equal.
package check

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/sluice-blk/sluice/internal/blocktest/memstore"
	"github.com/sluice-blk/sluice/internal/format/qcow2"
)

func need(t testing.TB, tools ...string) {
	t.Helper()
	for _, name := range tools {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("%s is not installed", name)
		}
	}
}

func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// peerImages are images of the other program: options, and what is done to them then, by qemu-io unless a word says who.
var peerImages = []struct {
	name, options string
	steps         []string
}{
	{"empty", "size=64M", nil},
	{"written", "size=64M", []string{"write 0 1M", "write 10M 64k", "write 5M 128k"}},
	{"version 2", "size=64M,compat=0.10", []string{"write 0 1M", "write 10M 64k", "img snapshot -c a", "write 512k 1M", "img snapshot -c b"}},
	{"small clusters", "size=8M,cluster_size=512", []string{"write 0 1M", "write -z 1M 100k", "discard 200k 30k", "img snapshot -c a", "write 10k 3k"}},
	{"width 1", "size=8M,cluster_size=1k,refcount_bits=1", []string{"write 0 300k", "write 5M 10k"}},
	{"width 4", "size=8M,cluster_size=4k,refcount_bits=4", []string{"write 0 300k", "img snapshot -c a", "write 5M 10k", "img snapshot -c b", "write 10k 9k", "img snapshot -c c"}},
	{"width 64", "size=8M,cluster_size=512,refcount_bits=64", []string{"write 0 300k", "img snapshot -c a", "write 100k 10k"}},
	{"zeros", "size=64M", []string{"write 0 1M", "write -z 512k 1M", "write -z -u 0 128k"}},
	{"extended", "size=64M,extended_l2=on", []string{"write 0 70k", "write 1M 2k", "write -z 1M 4k", "write -z 10M 1M", "img snapshot -c a", "write 3k 3k"}},
	{"compressed", "size=64M", []string{"write -c -P 1 0 64k", "write -c -P 2 64k 64k", "write -c 1M 64k", "write 5M 64k", "img snapshot -c a", "write 0 1k"}},
	{"compressed small", "size=4M,cluster_size=4k", []string{"write -c -P 1 0 4k", "write -c -P 2 4k 4k", "write -c 1M 4k", "write 2M 64k"}},
	{"bitmaps", "size=64M", []string{"write 0 1M", "img bitmap --add -g 512 b0", "img bitmap --add b1", "write 1M 3M", "img bitmap --add --disable b2"}},
	{"preallocated", "size=20M,preallocation=metadata", []string{"write 3M 1M"}},
	{"extended, preallocated", "size=20M,preallocation=metadata,extended_l2=on", []string{"write 3M 3k"}},
	{"data file", "size=20M,data_file=DIR/d.raw", []string{"write 3M 1M", "write -z 10M 1M"}},
	{"lazy", "size=20M,lazy_refcounts=on", []string{"write 3M 1M"}},
	{"many snapshots", "size=1M,cluster_size=512", []string{"write 0 100k", "img snapshot -c a", "write 10k 1k", "img snapshot -c b", "img snapshot -c c", "write 40k 1k", "img snapshot -d b", "img snapshot -a a"}},
}

// rounds of the random tests: few, and many where there is time (make soak).
func rounds(few, many int) int {
	switch {
	case os.Getenv("SLUICE_SOAK") != "":
		return many
	case testing.Short():
		return 1
	}
	return few
}

func makePeerImage(t testing.TB, dir, options string, steps []string) string {
	t.Helper()
	path := filepath.Join(dir, "t.qcow2")
	run(t, "qemu-img", "create", "-q", "-f", "qcow2", "-o", strings.ReplaceAll(options, "DIR", dir), path)
	for _, step := range steps {
		if verb, ok := strings.CutPrefix(step, "img "); ok {
			words := strings.Fields(verb)
			if words[0] == "bitmap" {
				last := len(words) - 1
				words = append(words[:last:last], path, words[last])
			} else {
				words = append(words, path)
			}
			run(t, "qemu-img", words...)
			continue
		}
		run(t, "qemu-io", "-f", "qcow2", "-c", step, path)
	}
	return path
}

// peerCheck is what the other program counts, false when it does not open the image.
func peerCheck(t testing.TB, path string, args ...string) (*Result, string, bool) {
	t.Helper()
	cmd := exec.Command("qemu-img", append([]string{"check", "-f", "qcow2", "--output=json"}, append(args, path)...)...)
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	r := new(Result)
	if json.Unmarshal([]byte(stdout.String()), r) != nil {
		return nil, stderr.String(), false
	}
	return r, cut(stderr.String()), true
}

// cut leaves out what a broken image says a thousand times.
func cut(text string) string {
	all := strings.Split(text, "\n")
	all = slices.DeleteFunc(all, func(s string) bool { return strings.HasPrefix(s, "Can't get") || strings.HasPrefix(s, "Use qemu") })
	return strings.Join(all[:min(len(all), 400)], "\n")
}

func lines(o *Options) *[]string {
	all := new([]string)
	o.Report = func(f Finding) { *all = append(*all, f.Text) }
	return all
}

func TestPeerCountsTheSame(t *testing.T) {
	need(t, "qemu-img", "qemu-io")
	rounds := rounds(6, 600)
	for _, c := range peerImages {
		t.Run(strings.ReplaceAll(c.name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			path := makePeerImage(t, dir, c.options, c.steps)
			sound := memstore.Load(t, path)
			same(t, sound, path)
			for seed := range rounds {
				rng := rand.New(rand.NewPCG(uint64(seed), 4711))
				broken := sound.Clone()
				what := breakImage(t, broken, rng)
				broken.Save(t, path)
				if !same(t, broken, path) {
					t.Fatalf("seed %d: %s", seed, what)
				}
			}
		})
	}
}

// What we repair, the other program finds repaired; and what it repairs, we repair too.
func TestPeerAgreesWithRepairs(t *testing.T) {
	need(t, "qemu-img", "qemu-io")
	rounds := rounds(2, 100)
	for _, c := range peerImages {
		t.Run(strings.ReplaceAll(c.name, " ", "-"), func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			path := makePeerImage(t, dir, c.options, c.steps)
			sound := memstore.Load(t, path)
			for seed := range rounds {
				rng := rand.New(rand.NewPCG(uint64(seed), 4712))
				broken := sound.Clone()
				what := breakImage(t, broken, rng)
				for _, how := range []struct {
					flag   string
					repair Repair
				}{{"leaks", Leaks}, {"all", Everything}} {
					broken.Save(t, path)
					_, _, _ = peerCheck(t, path, "-r", how.flag)
					theirs, theirText, ok := peerCheck(t, path)
					if !ok {
						continue
					}
					mended := broken.Clone()
					o := &Options{Repair: how.repair}
					said := lines(o)
					ours, err := Run(mended, o)
					if err != nil && !theirs.Clean() {
						continue
					}
					if err != nil {
						t.Fatalf("seed %d: %s: repair %s: %v", seed, what, how.flag, err)
					}
					mended.Save(t, path)
					if !same(t, mended, path) {
						t.Fatalf("seed %d: %s, after our repair of %s:\n%s", seed, what, how.flag, strings.Join(*said, "\n"))
					}
					after, _, _ := peerCheck(t, path)
					// flags in a table that is something else too we leave alone: it may be guest data
					left := int64(0)
					for _, line := range *said {
						if strings.HasPrefix(line, "ERROR OFLAG_COPIED") {
							left++
						}
					}
					after.Corruptions = max(0, after.Corruptions-left)
					if theirs.Clean() && !after.Clean() {
						t.Fatalf("seed %d: %s: the peer's repair of %s leaves %+v\n%s\nours leaves %+v (%+v)\n%s",
							seed, what, how.flag, theirs, theirText, after, ours, strings.Join(*said, "\n"))
					}
				}
			}
		})
	}
}

// same compares the two counts of an image that lies at path too.
func same(t *testing.T, s *memstore.Store, path string) bool {
	t.Helper()
	theirs, text, ok := peerCheck(t, path)
	o := &Options{}
	said := lines(o)
	ours, err := Run(s.Clone(), o)
	if !ok {
		if err == nil && ours.Clean() {
			t.Errorf("the peer does not open the image, we find no fault\npeer:\n%s", text)
			return false
		}
		return true
	}
	if err != nil {
		t.Errorf("check: %v\npeer: %+v\n%s", err, theirs, text)
		return false
	}
	if d := cmp.Diff(theirs, ours); d != "" {
		t.Errorf("counts (-peer +ours):\n%s\npeer:\n%s\nours:\n%s", d, text, cut(strings.Join(*said, "\n")))
		return false
	}
	return true
}

// breakImage changes one to three words of tables, and says which.
func breakImage(t testing.TB, s *memstore.Store, rng *rand.Rand) string {
	h, err := qcow2.ReadHeader(s.Read)
	if err != nil {
		t.Fatal(err)
	}
	g := h.Geometry()
	plain := qcow2.NewGeometry(3, h.ClusterBits, 4, false, false)
	size, _ := s.Size()
	var places []string
	for range 1 + rng.IntN(3) {
		// a word in a table: L1, L2, refcount table, refcount block, snapshot's L1
		l1 := make([]byte, max(8, int64(h.L1Entries)*8))
		_ = s.Read(l1, h.L1Offset)
		at := h.L1Offset + 8*rng.Int64N(int64(h.L1Entries))
		name := "L1"
		switch rng.IntN(8) {
		case 6:
			if h.Snapshots > 0 {
				at, name = h.SnapshotsOffset+8*rng.Int64N(8), "snapshot table"
				if b := make([]byte, 8); rng.IntN(2) > 0 && s.Read(b, h.SnapshotsOffset) == nil {
					at, name = int64(binary.BigEndian.Uint64(b)&(1<<48-1))+8*rng.Int64N(int64(h.L1Entries)), "L1 of a snapshot"
				}
			}
		case 7:
			if e, ok, err := h.Bitmaps(); ok && err == nil {
				at, name = e.DirectoryOffset+8*rng.Int64N(e.DirectorySize/8), "bitmap directory"
				if b := make([]byte, 8); rng.IntN(2) > 0 && s.Read(b, e.DirectoryOffset) == nil {
					at, name = int64(binary.BigEndian.Uint64(b)&(1<<48-1))+8*rng.Int64N(2), "bitmap table"
				}
			}
		case 0, 1, 2:
			for range 50 {
				if off := qcow2.L1Entry(plain.Entry(l1, rng.IntN(len(l1)/8)).Word).Offset(); off != 0 {
					at, name = off+8*rng.Int64N(g.ClusterSize/8), "L2"
					if rng.IntN(4) > 0 {
						at = off + 8*rng.Int64N(40)
					}
					break
				}
			}
		case 3:
			at, name = h.RefcountTableOffset+8*rng.Int64N(2), "refcount table"
		case 4:
			b := make([]byte, 8)
			_ = s.Read(b, h.RefcountTableOffset)
			at, name = int64(binary.BigEndian.Uint64(b))+8*rng.Int64N(16), "refcount block"
		}
		if at < 0 || at >= size { // a change before this one has led here
			at, name = h.L1Offset, "L1"
		}
		b := make([]byte, 8)
		_ = s.Read(b, at)
		old := binary.BigEndian.Uint64(b)
		word := old
		switch rng.IntN(7) {
		case 0:
			word = 0
		case 1:
			word ^= 1 << rng.IntN(64)
		case 2:
			word = uint64(rng.Int64N(size))&^511 | 1<<63
		case 3:
			word = uint64(rng.Int64N(size)) &^ (uint64(g.ClusterSize) - 1)
		case 4:
			word = uint64(rng.Int64N(size))&^(uint64(g.ClusterSize)-1) | 1<<63 | uint64(rng.IntN(2))
		case 5:
			word ^= 1 << 63
		case 6:
			word += uint64(g.ClusterSize)
		}
		binary.BigEndian.PutUint64(b, word)
		_ = s.Write(b, at)
		places = append(places, fmt.Sprintf("%s word at %#x: %#x for %#x", name, at, word, old))
	}
	return strings.Join(places, "; ")
}
