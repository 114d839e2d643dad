// SPDX-License-Identifier: Apache-2.0

package qcow2

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/cli"
	"github.com/sluice-blk/sluice/internal/graph"
)

// A file system that is full is a state that one can leave: the guest hears of it, what it wrote before is there, and
// writing goes on when there is space again.
func TestFullFileSystem(t *testing.T) {
	for _, options := range []string{"cluster_size=64k", "cluster_size=512", "cluster_size=64k,lazy_refcounts=on", "cluster_size=256k"} {
		t.Run(options, func(t *testing.T) {
			i := newImage(t)
			small := i.path("small")
			i.must(os.Mkdir(small, 0o700))
			if out, err := exec.Command("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", small).CombinedOutput(); err != nil {
				t.Skipf("needs to mount a small file system: %v: %s", err, out)
			}
			t.Cleanup(func() { i.must(exec.Command("umount", "-l", small).Run()) })
			i.must(os.WriteFile(filepath.Join(small, "filler"), make([]byte, 3<<20), 0o600))
			i.img("create", "-q", "-f", "qcow2", "-o", options, filepath.Join(small, imageName), "64M")
			i.must(os.Symlink(filepath.Join("small", imageName), i.path(imageName)))
			k := i.opens(func(s *graph.Spec) { s.Path = filepath.Join(small, imageName) })
			m := newModel(&List{Image: Image{Size: 64 << 20, Cluster: 65536, Compat: "1.1"}})
			full := fillUp(i, k, m, 0)
			if full < 1<<20 {
				t.Errorf("full after %d bytes", full)
			}
			i.must(k.one(Op{Kind: Flush}))
			i.must(k.batch([]Op{{Kind: Read, Len: 64 << 20}}, m))
			i.must(os.Remove(filepath.Join(small, "filler")))
			if more := fillUp(i, k, m, full); more < full+1<<20 {
				t.Errorf("full after %d bytes, and after %d when 3 MiB were given back", full, more)
			}
			// What is discarded and flushed is space again.
			discard := Op{Kind: Discard, Off: 0, Len: 2 << 20}
			i.must(k.one(discard))
			m.apply(&discard)
			i.must(k.one(Op{Kind: Flush}))
			again := Op{Kind: Write, Off: 32 << 20, Len: 1 << 20, Source: 5}
			i.must(k.one(again))
			m.apply(&again)
			i.must(k.batch([]Op{{Kind: Read, Len: 64 << 20}}, m))
			i.must(k.close())
			i.clean()
			i.must(i.holds(imageName, "qcow2", &m.content))
		})
	}
}

// fillUp writes until there is no more space, and tells where that was.
func fillUp(i *image, k *machine, m *model, at int64) int64 {
	i.Helper()
	for ; at < 32<<20; at += 256 << 10 {
		o := Op{Kind: Write, Off: at, Len: 256 << 10, Source: int(at>>18) % sourceCount}
		if err := k.one(o); err != nil {
			if !errors.Is(err, syscall.ENOSPC) {
				i.Fatalf("%v, want ENOSPC", err)
			}
			m.doubt(o.Off, o.Off+o.Len)
			return at
		}
		m.apply(&o)
	}
	i.Fatal("it is never full")
	return 0
}

// childVariable names the image that a child process writes to until it is killed.
const childVariable = "SLUICE_QCOW2_CHILD"

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "qemu-img" {
		os.Exit(cli.MainOf(os.Args, cli.Std()))
	}
	sources = makeSources()
	if dir := os.Getenv(childVariable); dir != "" {
		if err := child(dir); err != nil {
			fmt.Println("failed", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// child does the list of the directory again and again, and says what it begins and what it has done.
func child(dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, "list"))
	if err != nil {
		return err
	}
	l, err := ParseList(string(text))
	if err != nil {
		return err
	}
	k, err := newMachine()
	if err != nil {
		return err
	}
	k.open = func() (block.Node, error) {
		s := graph.Spec{Path: filepath.Join(dir, imageName), Format: graph.FormatQcow2}
		return graph.Build(context.Background(), s, graph.AnyPath)
	}
	if err := k.start(); err != nil {
		return err
	}
	for i, ops := range l.batches() {
		fmt.Println("begin", i)
		if err := k.batch(ops, nil); err != nil {
			return err
		}
		fmt.Println("done", i)
	}
	fmt.Println("end")
	select {}
}

// A process that is killed leaves leaks at worst, and all that was flushed.
func TestKilledProcessLosesNothingFlushed(t *testing.T) {
	root := room(t)
	first := number(t, "SLUICE_SEED", 1)
	for seed := first; seed < first+lists(t, 30); seed++ {
		l := GenerateRequests(uint64(seed))
		b := newBed(root, l)
		if err := errors.Join(killed(b, uint64(seed)), b.remove()); err != nil {
			t.Errorf("seed %d: %v\n%s", seed, err, l)
		}
	}
}

func killed(b *bed, seed uint64) error {
	b.l.Ops = slices.DeleteFunc(b.l.Ops, func(o Op) bool { return o.Kind == Compressed })
	all := b.l.batches()
	if err := errors.Join(b.make(), os.WriteFile(b.path("list"), []byte(b.l.String()), 0o600)); err != nil {
		return err
	}
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), childVariable+"="+b.dir)
	out, err := c.StdoutPipe()
	if err != nil {
		return err
	}
	if err := c.Start(); err != nil {
		return err
	}
	at := rand.New(rand.NewPCG(seed, 11)).IntN(2 * len(all))
	begun, done, problem := follow(out, c, at)
	_ = c.Wait() // it was killed
	if problem != nil {
		return problem
	}
	return judgeKilled(b, all, begun, done)
}

// follow reads what the child says, and kills it at a line.
func follow(out interface{ Read([]byte) (int, error) }, c *exec.Cmd, at int) (begun, done int, err error) {
	lines := bufio.NewScanner(out)
	for n := 0; lines.Scan(); n++ {
		word, rest, _ := strings.Cut(lines.Text(), " ")
		switch word {
		case "begin":
			begun++
		case "done":
			done++
		case "failed":
			err = errors.New(rest)
		}
		if n == at || word == "end" {
			if kerr := c.Process.Kill(); kerr != nil {
				return begun, done, kerr
			}
		}
	}
	return begun, done, err
}

func judgeKilled(b *bed, all [][]Op, begun, done int) error {
	m := newModel(b.l)
	flushed := 0
	for i, ops := range all[:done] {
		if slices.ContainsFunc(ops, func(o Op) bool { return o.Kind == Flush }) && len(ops) == 1 {
			flushed = i
		}
	}
	var maybe []Op
	for i, ops := range all[:begun] {
		for _, o := range ops {
			if i < flushed {
				m.apply(&o)
			} else {
				maybe = append(maybe, o)
			}
		}
	}
	n, err := b.naive(m)
	if err != nil {
		return err
	}
	if err := (&crash{}).sound(n); err != nil {
		return err
	}
	got, err := n.content(n.l1Offset, n.l1Size, n.size)
	if err != nil {
		return err
	}
	if err := allowed(got, &m.content, maybe); err != nil {
		return fmt.Errorf("killed after %d of %d, the last flush was %d: %w", done, len(all), flushed, err)
	}
	if code := status(b.check(imageName)); n.incompatible&1 == 0 && code != 0 && code != 3 {
		return fmt.Errorf("the peer's check says %d", code)
	}
	return nil
}

// Our tool may be killed at any time: what it was to change is as before or as after, or on the way, and the disk reads as
// the model has it.
func TestKilledToolHarmsNothing(t *testing.T) {
	root := room(t)
	first := number(t, "SLUICE_SEED", 1)
	for seed := first; seed < first+lists(t, 25); seed++ {
		l := Generate(uint64(seed))
		l.Ops = l.Ops[:min(len(l.Ops), 25)]
		if !valid(l) || l.Image.Overlap {
			continue
		}
		b := newBed(root, l)
		if err := errors.Join(toolKilled(b, uint64(seed)), b.remove()); err != nil {
			t.Errorf("seed %d: %v\n%s", seed, err, l)
		}
	}
}

// toolKilled does a list with the peer, and then something more with our tool, which is killed.
func toolKilled(b *bed, seed uint64) error {
	m := newModel(b.l)
	for _, o := range b.l.Ops {
		m.apply(&o)
	}
	if err := b.theirs(); err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(seed, 12))
	for range 3 {
		o, ok := lastWords(b.l, m, rng)
		if !ok {
			return nil
		}
		c := exec.Command("../ours/qemu-img", b.verbArgs(&o)...)
		c.Dir = b.dir
		if err := c.Start(); err != nil {
			return err
		}
		time.Sleep(time.Duration(rng.IntN(1<<rng.IntN(18))) * time.Microsecond)
		_ = c.Process.Kill() // it may have ended
		_ = c.Wait()
		if err := qemuImg(b.dir, "check", "-q", "-f", "qcow2", "-r", "leaks", imageName); err != nil {
			return fmt.Errorf("%s: %w", o, err)
		}
		if err := b.check(imageName); err != nil {
			return fmt.Errorf("%s: %w", o, err)
		}
		if err := b.holds(imageName, "qcow2", &m.content); err != nil {
			return fmt.Errorf("%s: %w", o, err)
		}
	}
	return nil
}

// lastWords is something that leaves the disk as it is.
func lastWords(l *List, m *model, rng *rand.Rand) (Op, bool) {
	var choice []Op
	if l.snapshotsMax() > len(m.snapshots) {
		choice = append(choice, Op{Kind: Snapshot, Verb: "create", Name: "last"})
	}
	for name := range m.snapshots {
		choice = append(choice, Op{Kind: Snapshot, Verb: "delete", Name: name})
		break
	}
	if m.backing != nil && len(m.snapshots) == 0 {
		choice = append(choice, Op{Kind: Commit}, Op{Kind: Rebase, Target: rng.IntN(len(l.Others)+1) - 1})
	}
	if len(choice) == 0 {
		return Op{}, false
	}
	return choice[rng.IntN(len(choice))], true
}
