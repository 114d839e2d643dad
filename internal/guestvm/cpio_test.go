// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// sampleArchive holds one of each kind, with sizes on both sides of the padding.
func sampleArchive(t *testing.T, w io.Writer) {
	t.Helper()
	c := newCPIOWriter(w)
	steps := []error{
		c.File("/init", 0o755, 5, strings.NewReader("hello")),
		c.Dir("/etc/empty", 0o700),
		c.Symlink("/bin/sh", "busybox"),
		c.Dir("/etc", 0o755), // there already
	}
	for n := range 9 {
		steps = append(steps, c.File(fmt.Sprintf("/sizes/%d", n), 0o644, int64(n), strings.NewReader("12345678")))
	}
	steps = append(steps, c.Close())
	if err := errors.Join(steps...); err != nil {
		t.Fatal(err)
	}
}

// Goal: an archive that another implementation unpacks to the same tree. Method: busybox's cpio as the reader.
func TestCPIOUnpacksWithBusybox(t *testing.T) {
	if _, err := exec.LookPath(defaultBusybox); err != nil {
		t.Skipf("needs busybox: %v", err)
	}
	var archive bytes.Buffer
	sampleArchive(t, &archive)
	if archive.Len()%cpioBlock != 0 {
		t.Errorf("archive has %d bytes, not a multiple of %d", archive.Len(), cpioBlock)
	}
	dir := t.TempDir()
	cmd := exec.Command(defaultBusybox, "cpio", "-idm")
	cmd.Dir, cmd.Stdin = dir, &archive
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("busybox cpio: %v: %s", err, out)
	}
	for n := range 9 {
		got, err := os.ReadFile(filepath.Join(dir, "sizes", fmt.Sprint(n)))
		if want := "12345678"[:n]; err != nil || string(got) != want {
			t.Errorf("file of %d bytes: got %q, %v", n, got, err)
		}
	}
	if st, err := os.Stat(filepath.Join(dir, "init")); err != nil || st.Mode() != 0o755 {
		t.Errorf("init: got %v, %v", st, err)
	}
	if st, err := os.Stat(filepath.Join(dir, "etc/empty")); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("etc/empty: got %v, %v", st, err)
	}
	if target, err := os.Readlink(filepath.Join(dir, "bin/sh")); err != nil || target != "busybox" {
		t.Errorf("bin/sh: got %q, %v", target, err)
	}
}

func TestCPIOIsReproducible(t *testing.T) {
	var a, b bytes.Buffer
	sampleArchive(t, &a)
	sampleArchive(t, &b)
	if !bytes.Equal(a.Bytes(), b.Bytes()) {
		t.Error("two archives of the same contents differ")
	}
}

func TestCPIORefuses(t *testing.T) {
	for name, add := range map[string]func(c *cpioWriter) error{
		"empty path":            func(c *cpioWriter) error { return c.Dir("/", 0o755) },
		"NUL in path":           func(c *cpioWriter) error { return c.Dir("a\x00b", 0o755) },
		"long path":             func(c *cpioWriter) error { return c.Dir(strings.Repeat("x/", 3000), 0o755) },
		"trailer name":          func(c *cpioWriter) error { return c.Dir(cpioTrailer, 0o755) },
		"file too large":        func(c *cpioWriter) error { return c.File("x", 0o644, 1<<32, nil) },
		"short contents":        func(c *cpioWriter) error { return c.File("x", 0o644, 9, strings.NewReader("1")) },
		"file below a file":     func(c *cpioWriter) error { return c.File("there/x", 0o644, 0, nil) },
		"the same file twice":   func(c *cpioWriter) error { return c.File("there", 0o644, 0, nil) },
		"directory over a file": func(c *cpioWriter) error { return c.Dir("there", 0o755) },
	} {
		t.Run(name, func(t *testing.T) {
			c := newCPIOWriter(io.Discard)
			if err := c.File("there", 0o644, 0, nil); err != nil {
				t.Fatal(err)
			}
			first := add(c)
			if first == nil {
				t.Fatal("no error")
			}
			if err := c.Close(); !errors.Is(err, first) {
				t.Errorf("the first error does not stick: Close says %v", err)
			}
		})
	}
}

func TestCPIOKeepsPathsInside(t *testing.T) {
	var archive bytes.Buffer
	c := newCPIOWriter(&archive)
	if err := errors.Join(c.File("../../up", 0o644, 0, nil), c.Close()); err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(archive.Bytes(), []byte("..")) {
		t.Error("a path of the archive leads out of it")
	}
}

// Goal: a full disk is told. Method: the n-th write fails, for every n.
func TestCPIOReportsWriteErrors(t *testing.T) {
	for n := 0; ; n++ {
		w := &failingWriter{left: n}
		c := newCPIOWriter(w)
		err := errors.Join(c.File("/a/b", 0o644, 3, strings.NewReader("abc")), c.Symlink("/l", "a"), c.Close())
		if !w.failed {
			if err != nil || n == 0 {
				t.Errorf("after %d writes: %v", n, err)
			}
			return
		}
		if !errors.Is(err, errFull) {
			t.Fatalf("write %d failed: got %v", n, err)
		}
	}
}

var errFull = errors.New("disk is full")

type failingWriter struct {
	left   int
	failed bool
}

func (w *failingWriter) Write(p []byte) (int, error) {
	if w.left == 0 {
		w.failed = true
		return 0, errFull
	}
	w.left--
	return len(p), nil
}
