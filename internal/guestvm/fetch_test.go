// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// fakeApt puts an apt in front of PATH that knows one kernel and logs its downloads, and returns the log. Dependency is
// what apt-cache prints, download the shell commands of apt-get.
func fakeApt(t *testing.T, dependency, download string) (log string) {
	t.Helper()
	bin, tree := t.TempDir(), t.TempDir()
	log = filepath.Join(bin, "log")
	fakeTree(t, tree, "6.1.0-57", nil, debianModules)
	for name, text := range map[string]string{
		"apt-cache": "echo linux-image-cloud-amd64\ncat <<'X'\n" + dependency + "\nX\n",
		"apt-get":   "echo \"$@\" >>'" + log + "'\n" + download + "\n",
		"dpkg-deb":  "cp -r '" + tree + "' \"$3\"\n",
	} {
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	return log
}

const debianDependency = "  Depends: linux-image-6.1.0-57-cloud-amd64\n  Suggests: linux-doc"

func TestFetchKernelDownloadsOnce(t *testing.T) {
	log := fakeApt(t, debianDependency, "touch linux-image-6.1.0-57-cloud-amd64_6.1_amd64.deb")
	dir := filepath.Join(t.TempDir(), "not", "there yet")
	for range 2 {
		k, err := FetchKernel(t.Context(), dir)
		if err != nil {
			t.Fatal(err)
		}
		if want := filepath.Join(dir, "linux-image-6.1.0-57-cloud-amd64/boot/vmlinuz-6.1.0-57"); k.Image != want || k.Modules == "" {
			t.Errorf("got %+v, want image %s", k, want)
		}
	}
	if calls, _ := os.ReadFile(log); string(calls) != "-qq download linux-image-6.1.0-57-cloud-amd64\n" {
		t.Errorf("apt-get was called with %q", calls)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("%v stays behind", left)
	}
}

func TestFetchKernelReportsFailure(t *testing.T) {
	for name, c := range map[string]struct{ dependency, download, err string }{
		"download fails":  {debianDependency, "echo 404 not found >&2; exit 100", "404 not found"},
		"old lists":       {debianDependency, "exit 100", "run apt-get update"},
		"unknown package": {"", "", "apt knows no package linux-image-cloud-amd64"},
		"virtual package": {"  Depends: <linux-image>", "", "apt knows no package"},
	} {
		t.Run(name, func(t *testing.T) {
			fakeApt(t, c.dependency, c.download)
			dir := t.TempDir()
			_, err := FetchKernel(t.Context(), dir)
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("got %v, want %q", err, c.err)
			}
			if left, _ := os.ReadDir(dir); len(left) != 0 {
				t.Errorf("%v stays behind", left)
			}
		})
	}
}

func TestFetchKernelSaysWhatToDoWithoutApt(t *testing.T) {
	bin := t.TempDir()
	sh, err := exec.LookPath("sh")
	if err != nil {
		t.Skipf("needs a shell: %v", err)
	}
	if err := os.Symlink(sh, filepath.Join(bin, "sh")); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin)
	if _, err := FetchKernel(t.Context(), t.TempDir()); err == nil || !strings.Contains(err.Error(), "apt-cache is missing") {
		t.Errorf("got %v", err)
	}
}
