// SPDX-License-Identifier: Apache-2.0

// Package qcow2 judges the qcow2 disk by the peer's tools and by models that share no code with it.
//
// Goal: whatever is done to an image, in whatever order and with whatever options, it holds what was written, and it is
// consistent. Method: a generator makes lists of operations from a seed (see [List]); a list is run by qemu-img and
// qemu-io, which validates generator and model, and by us; then content, files below, snapshots and consistency are
// compared with a model in memory and by the peer's tools. A list that fails is shrunk and kept as a file.
//
//	SLUICE_SEED=n       the first seed (default 1)
//	SLUICE_LISTS=n      how many lists (default a few hundred, thousands with SLUICE_SOAK)
//	go test ./tests/qcow2 -run Replay -replay FILE   runs a kept list again
package qcow2

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

var replay = flag.String("replay", "", "file of the list that TestReplay runs")

// number reads a variable of the environment.
func number(t testing.TB, name string, otherwise int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s=%q: %v", name, text, err)
	}
	return n
}

func soaking() bool { return os.Getenv("SLUICE_SOAK") != "" }

// lists is how many lists a test runs: n, or many times that in a soak.
func lists(t testing.TB, n int) int {
	t.Helper()
	if soaking() {
		n *= 20
	}
	return number(t, "SLUICE_LISTS", n)
}

// room makes a directory in memory with the sources in it.
func room(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "sluice-qcow2-")
	if err != nil {
		dir = t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := errors.Join(writeSources(dir), linkOurs(dir)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// linkOurs puts our tool there, under the name of the peer's.
func linkOurs(dir string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return errors.Join(os.Mkdir(filepath.Join(dir, "ours"), 0o700), os.Symlink(self, filepath.Join(dir, "ours", "qemu-img")))
}

// runner does a list in a bed and judges it.
type runner func(b *bed) error

// run makes a bed for the list, and removes it.
func (r runner) run(root string, l *List) error {
	b := newBed(root, l)
	return errors.Join(r(b), b.remove())
}

// keep writes a list that fails to a file that stays, and a shorter one that fails too, if there is one.
func (r runner) keep(t testing.TB, root string, l *List, name string, err error) {
	t.Helper()
	dir, mkErr := os.MkdirTemp("", "sluice-qcow2-failed-")
	if mkErr != nil {
		t.Fatal(mkErr)
	}
	write := func(file string, l *List, err error) {
		text := fmt.Sprintf("# %s\n%s", firstLine(err), l)
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(name+".whole", l, err)
	t.Errorf("%s: %v\nthe whole list is %s", name, err, filepath.Join(dir, name+".whole"))
	end := time.Now().Add(shrinkTime)
	small := Shrink(l, 400, func(l *List) bool { return time.Now().Before(end) && r.run(root, l) != nil })
	again := r.run(root, small)
	if again == nil {
		t.Logf("it does not fail each time")
		return
	}
	write(name+".list", small, again)
	t.Logf("shorter: %v\nreplay with: go test ./tests/qcow2 -run Replay -replay %s\n%s", again, filepath.Join(dir, name+".list"), small)
}

// shrinkTime is how long a list is made shorter: some take seconds.
const shrinkTime = 30 * time.Second

func firstLine(err error) string {
	text := err.Error()
	for i, c := range text {
		if c == '\n' {
			return text[:i]
		}
	}
	return text
}

// theirRun runs a list with the peer's tools alone.
func theirRun(b *bed) error {
	m := newModel(b.l)
	for _, ops := range b.l.batches() {
		m.together(ops)
	}
	if err := b.theirs(); err != nil {
		return err
	}
	return b.judge(m)
}

// oursRun does a list with our tool, under the name and in the place of the peer's, and with the peer's requests.
func oursRun(b *bed) error {
	b.tool = "../ours/qemu-img"
	return theirRun(b)
}

// generated runs n lists, in a few tests at the same time.
func generated(t *testing.T, r runner, n int) {
	root := room(t)
	first := number(t, "SLUICE_SEED", 1)
	const shards = 4
	for shard := range shards {
		t.Run(fmt.Sprintf("shard %d", shard), func(t *testing.T) {
			t.Parallel()
			for seed := first + shard; seed < first+n && !t.Failed(); seed += shards {
				l := Generate(uint64(seed))
				if err := r.run(root, l); err != nil {
					r.keep(t, root, l, fmt.Sprintf("seed%d", seed), err)
				}
			}
		})
	}
}

func TestThePeerAgreesWithTheModel(t *testing.T) { generated(t, theirRun, lists(t, 60)) }

func TestOurToolInPlaceOfThePeers(t *testing.T) { generated(t, oursRun, lists(t, 60)) }

func TestOurToolSaysWhatThePeersSays(t *testing.T) { generated(t, saysRun, lists(t, 30)) }

func TestListsSurviveBeingWritten(t *testing.T) {
	for seed := range uint64(200) {
		text := Generate(seed).String()
		l, err := ParseList(text)
		if err != nil {
			t.Fatalf("seed %d: %v\n%s", seed, err, text)
		}
		if again := l.String(); again != text {
			t.Fatalf("seed %d:\n%s\nbecame\n%s", seed, text, again)
		}
		if !valid(l) {
			t.Fatalf("seed %d is not valid:\n%s", seed, text)
		}
	}
}

// runners are all who can do a list.
var runners = map[string]runner{"theirs": theirRun, "ours": oursRun, "tables": tablesRun, "node": nodeRun, "mixed": mixedRun, "reads": readsRun, "says": saysRun,
	"crash": func(b *bed) error { _, err := crashTables(b, b.l.Image.Seed, 6); return err }}

func TestReplay(t *testing.T) {
	files, err := filepath.Glob("testdata/*.list")
	if err != nil {
		t.Fatal(err)
	}
	if *replay != "" {
		files = []string{*replay}
	}
	root := room(t)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		l, err := ParseList(string(text))
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if !valid(l) {
			t.Errorf("%s is not valid", file)
		}
		for name, r := range runners {
			t.Run(filepath.Base(file)+"/"+name, func(t *testing.T) {
				if err := r.run(root, l); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

func TestOurNode(t *testing.T) { generated(t, nodeRun, lists(t, 100)) }

func TestOurNodeAndThePeerInTurns(t *testing.T) { generated(t, mixedRun, lists(t, 20)) }

func TestOurNodeReadsWhatThePeerMade(t *testing.T) { generated(t, readsRun, lists(t, 40)) }

func TestOurTables(t *testing.T) { generated(t, tablesRun, lists(t, 200)) }
