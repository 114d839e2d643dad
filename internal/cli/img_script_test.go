// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// The image tool answers as qemu-img does. Each script of testdata/img is run twice, in two directories: with QEMU's tool
// and with ours. After each line output, messages, exit status and what `qemu-img check` says of every image are compared.
//
//	$ line    run by sh, with qemu-img being the tool under test; all is compared
//	~ line    the same, but only the exit statuses and the images are compared: the words differ
//	          cmp-img and map-img, in any line, are compare and map of QEMU's tool
//	! line    run by sh with QEMU's tools in both directories, to prepare something; it must succeed
//	> line    the same, but in our directory alone: QEMU's tool has done worse there
//	+ line    run by sh with our tool in our directory alone, and must succeed: QEMU's tool cannot do that
//	# text    says why
//
// What differs from run to run, or because two files are not as large on the disk, is made alike by alike.
func TestImgScripts(t *testing.T) {
	oracle := needQemuImg(t)
	scripts, err := filepath.Glob("testdata/img/*.txt")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	if testing.Short() {
		scripts = slices.DeleteFunc(scripts, func(path string) bool { return !slices.Contains(shortScripts, filepath.Base(path)) })
	}
	for _, path := range scripts {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txt"), func(t *testing.T) {
			t.Parallel()
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			r := newScriptRun(t, oracle)
			for n, line := range strings.Split(string(text), "\n") {
				if line != "" && line[0] != '#' {
					r.line(n+1, line)
				}
			}
		})
	}
}

// shortScripts are those that are run when there is little time.
var shortScripts = []string{"usage.txt", "names.txt", "snapshot.txt"}

// needQemuImg finds the tool whose words ours are.
func needQemuImg(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath(qemuImgName)
	if err != nil {
		t.Skip("needs qemu-img (apt-get install qemu-utils)")
	}
	version, err := exec.Command(path, "--version").Output()
	if err != nil || !bytes.HasPrefix(version, []byte("qemu-img version 7.2.")) {
		t.Skipf("needs qemu-img 7.2, whose words are compared: %q, %v", version, err)
	}
	return path
}

// scriptRun is the two directories, and for each the directory that comes first in PATH.
type scriptRun struct {
	t    *testing.T
	dirs [2]string
	bins [2]string
	// common is a directory of commands that both find.
	common string
	seen   map[string]time.Time // when the images of ours that have been checked were changed
}

func newScriptRun(t *testing.T, oracle string) *scriptRun {
	r := &scriptRun{t: t, dirs: [2]string{t.TempDir(), t.TempDir()}, bins: [2]string{filepath.Dir(oracle), t.TempDir()}, seen: map[string]time.Time{}}
	self, err := os.Executable()
	if err == nil {
		r.common = t.TempDir()
		compare := "#!/bin/sh\n# QEMU's tool says whether two images hold the same.\nexec " + oracle + " compare -U \"$@\"\n"
		mapping := "#!/bin/sh\nexec " + oracle + " map -U \"$@\"\n"
		err = errors.Join(os.WriteFile(filepath.Join(r.common, "cmp-img"), []byte(compare), 0o755),
			os.WriteFile(filepath.Join(r.common, "map-img"), []byte(mapping), 0o755))
	}
	if err == nil {
		err = os.Symlink(self, filepath.Join(r.bins[1], qemuImgName))
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *scriptRun) line(n int, line string) {
	r.t.Helper()
	kind, command, _ := strings.Cut(line, " ")
	switch kind {
	case "!":
		r.must(n, 0, r.bins[0], command)
		r.must(n, 1, r.bins[0], command)
		return
	case ">":
		r.must(n, 1, r.bins[0], command)
		return
	case "+":
		r.must(n, 1, r.bins[1], command)
		return
	}
	want, got := r.sh(0, r.bins[0], command), r.sh(1, r.bins[1], command)
	if kind == "~" {
		got.out, got.err = want.out, want.err
	}
	if want != got {
		r.t.Errorf("line %d: %s\nexit status %d, want %d\n%s%s", n, command, got.code, want.code,
			section("output", want.out, got.out), section("messages", want.err, got.err))
	}
	r.checkImages(n, command)
}

// must runs what has to succeed.
func (r *scriptRun) must(n, i int, bin, command string) {
	r.t.Helper()
	if got := r.sh(i, bin, command); got.code != 0 {
		r.t.Fatalf("line %d: %s\nends with %d\n%s%s", n, command, got.code, got.out, got.err)
	}
}

func section(name, want, got string) string {
	if want == got {
		return ""
	}
	return name + " (-want +got):\n" + cmp.Diff(strings.Split(want, "\n"), strings.Split(got, "\n"))
}

// checkImages lets QEMU's tool look at the images that both runs have left: none may be worse than its twin.
func (r *scriptRun) checkImages(n int, command string) {
	r.t.Helper()
	var names [2][]string
	for i, dir := range r.dirs {
		err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
			name, relErr := filepath.Rel(dir, path)
			names[i] = append(names[i], name)
			return errors.Join(err, relErr)
		})
		if err != nil {
			r.t.Fatal(err)
		}
	}
	if diff := cmp.Diff(names[0], names[1]); diff != "" {
		r.t.Errorf("line %d: %s\nfiles (-want +got):\n%s", n, command, diff)
	}
	for _, name := range names[0] {
		if filepath.Ext(name) != ".q" || !slices.Contains(names[1], name) {
			continue
		}
		if !r.changed(name) {
			continue
		}
		check := func(i int) scriptResult {
			return r.sh(i, r.bins[0], "qemu-img check -U -f qcow2 "+name+" >check.out 2>&1; code=$?; cat check.out; rm check.out; exit $code")
		}
		ours := check(1)
		if ours.code == 0 {
			continue
		}
		if theirs := check(0); ours.code != theirs.code {
			r.t.Errorf("line %d: %s\nqemu-img check %s: exit status %d, want %d\n%s", n, command, name, ours.code, theirs.code, ours.out)
		}
	}
}

// changed tells whether our image has not been checked as it is now.
func (r *scriptRun) changed(name string) bool {
	st, err := os.Stat(filepath.Join(r.dirs[1], name))
	if err != nil {
		r.t.Fatal(err)
	}
	before := r.seen[name]
	r.seen[name] = st.ModTime()
	return !st.ModTime().Equal(before)
}

// scriptResult is what a command did.
type scriptResult struct {
	out, err string
	code     int
}

func (r *scriptRun) sh(i int, bin, command string) scriptResult {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "sh", "-c", command)
	cmd.Dir = r.dirs[i]
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+r.common+":"+os.Getenv("PATH"), asProgram+"=1", "TZ=UTC", "LC_ALL=C", "GORACE=atexit_sleep_ms=0")
	var out, msg bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &msg
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		r.t.Fatalf("%s: %v", command, err)
	}
	return scriptResult{out: alike(out.String()), err: alike(msg.String()), code: cmd.ProcessState.ExitCode()}
}

// differences are what two runs may differ in.
var differences = []struct {
	at *regexp.Regexp
	by string
}{
	{regexp.MustCompile(`(?m)^disk size: .*$`), "disk size: SIZE"},
	{regexp.MustCompile(`"actual-size": \d+`), `"actual-size": SIZE`},
	{regexp.MustCompile(`\d{4}-\d\d-\d\d \d\d:\d\d:\d\d`), "yyyy-mm-dd hh:mm:ss"},
	{regexp.MustCompile(`"date-(n?sec)": \d+`), `"date-$1": TIME`},
	{regexp.MustCompile(`#block\d+`), "#block"},
	{regexp.MustCompile(`Run completed in \d+\.\d{3} seconds`), "Run completed in TIME"},
}

func alike(s string) string {
	for _, d := range differences {
		s = d.at.ReplaceAllString(s, d.by)
	}
	return s
}
