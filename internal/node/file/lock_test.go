// SPDX-License-Identifier: Apache-2.0

package file_test

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-blk/sluice/internal/block"
	"github.com/sluice-blk/sluice/internal/node/file"
)

func locked(path string, readOnly bool) file.Options {
	return file.Options{Path: path, ReadOnly: readOnly, Lock: true, Cache: block.CacheWriteback}
}

func TestTwoOfUs(t *testing.T) {
	for _, c := range []struct {
		name          string
		first, second bool // read-only
		refused       bool
	}{
		{"two writers", false, false, true},
		{"writer, then reader", false, true, true},
		{"reader, then writer", true, false, true},
		{"two readers", true, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := image(t, 1<<20)
			first := mustOpen(t, locked(path, c.first))
			second, err := file.Open(locked(path, c.second))
			if (err != nil) != c.refused {
				t.Errorf("the second gets %v", err)
			}
			if err == nil {
				if err := second.Close(); err != nil {
					t.Error(err)
				}
			} else if !errors.Is(err, syscall.EAGAIN) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "lock=shared") {
				t.Errorf("error is %q", err)
			}
			look := mustOpen(t, file.Options{Path: path, ReadOnly: true, Lock: true, LockShared: true})
			if err := errors.Join(look.Close(), first.Close()); err != nil {
				t.Error(err)
			}
			again := mustOpen(t, locked(path, false)) // the one that was refused holds nothing
			if err := again.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skipf("needs %s (apt-get install qemu-utils): %v", name, err)
	}
	return path
}

// QEMU's tools take us for another QEMU.
func TestQEMULooksAtOurs(t *testing.T) {
	img, qio := tool(t, "qemu-img"), tool(t, "qemu-io")
	for _, c := range []struct {
		name     string
		readOnly bool // ours
		command  []string
		refused  bool
	}{
		{"writer, info", false, []string{img, "info", "-f", "qcow2", "PATH"}, true},
		{"writer, info -U", false, []string{img, "info", "-U", "PATH"}, false},
		{"writer, write", false, []string{qio, "-f", "raw", "-c", "write 0 512", "PATH"}, true},
		{"writer, resize", false, []string{img, "resize", "-f", "raw", "PATH", "2M"}, true},
		{"reader, info", true, []string{img, "info", "PATH"}, false},
		{"reader, write", true, []string{qio, "-f", "raw", "-c", "write 0 512", "PATH"}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			// A format of QEMU's own, so that info does not stand that somebody writes; to a raw image it does not mind.
			path := image(t, 1<<20)
			if out, err := exec.Command(img, "create", "-q", "-f", "qcow2", path, "1M").CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			n := mustOpen(t, locked(path, c.readOnly))
			defer n.Close()
			args := append([]string(nil), c.command...)
			for i := range args {
				args[i] = strings.ReplaceAll(args[i], "PATH", path)
			}
			out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
			if refused := err != nil && strings.Contains(string(out), "lock"); refused != c.refused {
				t.Errorf("%q: %v, %s", args, err, out)
			}
		})
	}
}

// We take QEMU for one of us.
func TestWeLookAtQEMUs(t *testing.T) {
	qio := tool(t, "qemu-io")
	for _, c := range []struct {
		name    string
		theirs  []string
		ours    file.Options
		refused bool
	}{
		{"writer, writer", []string{"-f", "raw"}, locked("", false), true},
		{"writer, reader", []string{"-f", "raw"}, locked("", true), true},
		{"writer, looking on", []string{"-f", "raw"}, file.Options{ReadOnly: true, Lock: true, LockShared: true}, false},
		{"reader, reader", []string{"-r", "-f", "raw"}, locked("", true), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := image(t, 1<<20)
			c.ours.Path = path
			hold(t, exec.Command(qio, append(c.theirs, path)...))
			n, err := file.Open(c.ours)
			if (err != nil) != c.refused {
				t.Errorf("we get %v", err)
			}
			if err == nil {
				if err := n.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// hold runs a qemu-io that has its image open, until the test ends. It has opened it when it answers a command.
func hold(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("qemu-io: %v", err)
		}
	})
	if _, err := in.Write([]byte("length\n")); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if strings.Contains(lines.Text(), "1 MiB") {
			go func() { // so that it never waits for somebody who reads
				for lines.Scan() {
				}
			}()
			return
		}
	}
	t.Fatal("qemu-io ended without an answer")
}
