// SPDX-License-Identifier: Apache-2.0

package qcow2_test

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/file"
	"github.com/sluice-blk/sluice/internal/node/mem"
	"github.com/sluice-blk/sluice/internal/node/qcow2"
	"github.com/sluice-blk/sluice/internal/node/qcow2/check"
	"github.com/sluice-blk/sluice/internal/node/qcow2/create"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// geometry is a kind of image.
type geometry struct {
	name string
	o    create.Options
}

var geometries = []geometry{
	{"64k", create.Options{}},
	{"512", create.Options{ClusterSize: 512}},
	{"4k-refcount1", create.Options{ClusterSize: 4096, RefcountBits: 1}},
	{"2M-refcount64", create.Options{ClusterSize: 2 << 20, RefcountBits: 64}},
	{"v2", create.Options{Version: 2, ClusterSize: 8192}},
	{"lazy", create.Options{LazyRefcounts: true, ClusterSize: 16384}},
	{"extended", create.Options{ExtendedL2: true}},
	{"extended-16k", create.Options{ExtendedL2: true, ClusterSize: 16384, RefcountBits: 8}},
	{"preallocated", create.Options{Preallocation: create.Metadata}},
	{"extended-preallocated", create.Options{Preallocation: create.Full, ExtendedL2: true, ClusterSize: 32768}},
}

// bytesStore is a file in memory, for create.
type bytesStore struct{ b []byte }

func (s *bytesStore) grow(n int64) {
	if int64(len(s.b)) < n {
		s.b = append(s.b, make([]byte, n-int64(len(s.b)))...)
	}
}

func (s *bytesStore) Write(p []byte, off int64) error {
	s.grow(off + int64(len(p)))
	copy(s.b[off:], p)
	return nil
}

func (s *bytesStore) Zero(off, n int64) error {
	s.grow(off + n)
	clear(s.b[off : off+n])
	return nil
}

func (s *bytesStore) Flush() error { return nil }

func (s *bytesStore) Truncate(n int64) error {
	s.grow(n)
	s.b = s.b[:n]
	return nil
}

// newImage is the bytes of a new image.
func newImage(t testing.TB, o create.Options, size int64) []byte {
	t.Helper()
	o.Size = size
	s := &bytesStore{}
	if _, err := create.Create(s, &o); err != nil {
		t.Fatal(err)
	}
	return s.b
}

// inMemory is a node in memory with these contents, which is checked by qemu-img when it is closed.
func inMemory(t testing.TB, contents []byte, o mem.Options) *checked {
	t.Helper()
	o.Growable = true
	if o.Size == 0 {
		o.Size = 64 << 20
	}
	n, err := mem.New(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := fill(n, contents); err != nil {
		t.Fatal(err)
	}
	return &checked{Node: n, t: t}
}

// fill writes contents to a node that no loop uses yet.
func fill(n *mem.Node, contents []byte) error {
	_, err := n.WriteAt(contents, 0)
	return err
}

// checked is a node whose contents are looked at by somebody else when it is closed.
type checked struct {
	*mem.Node
	t     testing.TB
	leaky bool // leaks are as it should be
}

func (c *checked) Close() error {
	c.check()
	return c.Node.Close()
}

// checks counts, so that some images are looked at by qemu-img, too, which takes the time of a process each.
var checks atomic.Int64

// check looks at the contents as somebody who opens the file.
func (c *checked) check() {
	c.t.Helper()
	length, err := c.Length()
	if err != nil {
		c.t.Fatal(err)
	}
	s := &bytesStore{make([]byte, length)}
	if _, err := c.ReadAt(s.b, 0); err != nil && err != io.EOF {
		c.t.Fatal(err)
	}
	var found []string
	r, err := check.Run(s, &check.Options{Report: func(f check.Finding) { found = append(found, f.Text) }})
	if err != nil || r.CheckErrors+r.Corruptions > 0 || r.Leaks > 0 && !c.leaky {
		c.t.Errorf("the image is not sound: %+v, %v\n%s", r, err, strings.Join(found[:min(len(found), 20)], "\n"))
	}
	if checks.Add(1)%8 != 1 {
		return
	}
	clear(s.b[8:20]) // the name of a backing file, which is none that qemu-img could open
	path := filepath.Join(c.t.TempDir(), "left.qcow2")
	if err := os.WriteFile(path, s.b, 0o600); err != nil {
		c.t.Fatal(err)
	}
	// The data file of an image that has one is not looked into, but must be there.
	if err := os.WriteFile(filepath.Join(filepath.Dir(path), "d"), nil, 0o600); err != nil {
		c.t.Fatal(err)
	}
	qemuCheck(c.t, path, c.leaky)
}

// Read implements check.Store.
func (s *bytesStore) Read(p []byte, off int64) error {
	clear(p)
	if off < int64(len(s.b)) {
		copy(p, s.b[off:])
	}
	return nil
}

// Size implements check.Store.
func (s *bytesStore) Size() (int64, error) { return int64(len(s.b)), nil }

// qemuCheck has qemu-img look at an image.
func qemuCheck(t testing.TB, path string, leaky bool) {
	t.Helper()
	if _, err := exec.LookPath("qemu-img"); err != nil {
		return // the tests of tests/qcow2 tell that it is missing
	}
	cmd := exec.Command("qemu-img", "check", "-f", "qcow2", "-U", path)
	cmd.Dir = filepath.Dir(path) // where it looks for a data file
	out, err := cmd.CombinedOutput()
	exit := 0
	if err != nil {
		exit = -1
		if e, ok := err.(*exec.ExitError); ok {
			exit = e.ExitCode()
		}
	}
	if exit == 0 || leaky && exit == 3 {
		return
	}
	text := strings.Split(string(out), "\n")
	t.Errorf("qemu-img check: exit %d\n%s", exit, strings.Join(text[:min(len(text), 20)], "\n"))
}

// open opens an image, whose node is closed with the test unless its owner does.
func open(t testing.TB, below block.Node, o *qcow2.Options) *qcow2.Node {
	t.Helper()
	n, err := qcow2.Open(below, o)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// onFile makes a new image in a file.
func onFile(t testing.TB, g create.Options, size int64, o file.Options) block.Node {
	t.Helper()
	o.Path = filepath.Join(t.TempDir(), "disk.qcow2")
	if err := os.WriteFile(o.Path, newImage(t, g, size), 0o600); err != nil {
		t.Fatal(err)
	}
	o.Growable = true
	n, err := file.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { qemuCheck(t, o.Path, false) })
	return n
}
