// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// A verb that moves data tells how far it is when it is asked with SIGUSR1, and ends when it is interrupted, with a word of
// what is left.
func TestImgVerbsHearSignals(t *testing.T) {
	dir := t.TempDir()
	source, target, overlay := filepath.Join(dir, "a.raw"), filepath.Join(dir, "b.raw"), filepath.Join(dir, "top.qcow2")
	if err := os.WriteFile(source, bytes.Repeat([]byte("data"), 16<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) {
		t.Helper()
		if code := runImg("img", args, Std()); code != exitOK {
			t.Fatalf("%v ends with %d", args, code)
		}
	}
	run("convert", "-q", "-O", "qcow2", source, overlay)
	run("create", "-q", "-f", "raw", target, "64M")
	run("rebase", "-u", "-b", target, "-F", "raw", overlay)
	for name, c := range map[string]struct {
		args []string
		says string
	}{
		"convert": {[]string{"convert", "-r", "1M", source, filepath.Join(dir, "c.raw")}, "c.raw' is not complete"},
		"commit":  {[]string{"commit", "-r", "1M", overlay}, "nothing of '" + overlay + "' is lost"},
	} {
		t.Run(name, func(t *testing.T) {
			p := spawn(t, nil, append([]string{"img"}, c.args...)...)
			for deadline := time.Now().Add(patience); !bytes.Contains([]byte(p.log.String()), []byte("%)")); time.Sleep(20 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatal("it does not tell how far it is")
				}
				if n, err := handles(p.cmd.Process.Pid, syscall.SIGUSR1); err == nil && n {
					p.signal(syscall.SIGUSR1)
				}
			}
			p.signal(syscall.SIGINT)
			p.ends(exitFailure, "interrupted: ")
			if !bytes.Contains([]byte(p.log.String()), []byte(c.says)) {
				t.Errorf("it does not say what is left:\n%s", p.log)
			}
		})
	}
	run("compare", "-q", source, overlay)
}

// handles tells whether a process has a handler for a signal already.
func handles(pid int, s syscall.Signal) (bool, error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return false, err
	}
	_, rest, ok := bytes.Cut(b, []byte("\nSigCgt:\t"))
	if !ok || len(rest) < 16 {
		return false, nil
	}
	var mask uint64
	for _, d := range rest[:16] {
		mask = mask<<4 | uint64(bytes.IndexByte([]byte("0123456789abcdef"), d))
	}
	return mask>>(s-1)&1 != 0, nil
}
