// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"fmt"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-blk/sluice/internal/guestvm"
)

// suites are the packages whose tests depend on the kernel.
var suites = []string{"internal/sys", "internal/guestmem", "internal/virtqueue", "internal/laio", "uring", "aio"}

// lacks are the tests that may be skipped in the guest, and the newer Linux that has what they need. The suites' own
// tables cross every case with every kind of file, so that some cases have nothing to do on one of them.
var lacks = []struct{ test, why string }{
	{`^uring\..*/(no_sqarray|NO_SQARRAY/\d+)$`, "Linux 6.6"},
	{`^uring\.TestFtruncate$`, "Linux 6.9"},
	{`^uring\.TestTimeoutMultishot$`, "Linux 6.4"},
	{`^uring\.TestPollLevelTellsWhatIsReadyAlready$`, "6.1 takes the flag for multishot polls alone"},
	{`^aio\.TestEngineConformance/.*/memory/unaligned_direct_requests$`, "memory files are not direct"},
	{`^aio\.TestEngineConformance/.*/direct/a_file_system_that_fills_up$`, "that case makes a memory file system"},
}

// Goal: the rooms that talk to the kernel work on an older one, with their fallbacks. Method: their own tests, as static
// programs, on the guest's kernel; files are on tmpfs and, where a test wants O_DIRECT, on ext4 on a disk of ours.
func TestSuitesOnTheGuestsKernel(t *testing.T) {
	needGuest(t)
	socket := socketPath(t)
	s := serve(t, "--disk", "driver=mem,size=1G", "--vhost-user", socket)
	cfg := machine(suitesScript(), guestvm.Disk{Socket: socket, Queues: 1})
	cfg.Initrd, cfg.CPUs, cfg.MemMiB = []string{needTools(t)}, 2, 2048
	cfg.Timeout *= 3
	for _, p := range suites {
		file := filepath.Join(t.TempDir(), path.Base(p)+".test")
		if err := build(t.Context(), "test", "-c", "-ldflags=-s -w", "-o", file, "../../"+p); err != nil {
			t.Fatal(err)
		}
		cfg.Files = append(cfg.Files, guestvm.File{Path: "/suites/" + path.Base(p) + ".test", Source: file, Mode: 0o755})
	}
	r, err := boot(t, cfg).Wait()
	if err != nil {
		t.Fatalf("%v\n%s", err, r.Output)
	}
	judge(t, string(r.Output))
	t.Logf("boot %v, suites %v", r.Boot, r.Script)
	s.stop()
}

func suitesScript() string {
	var b strings.Builder
	b.WriteString(`uname -r
ip link set lo up
mke2fs -q -t ext4 /dev/vda && mount -t ext4 /dev/vda /mnt || exit 1
export TMPDIR=/mnt
ulimit -n 4096
`)
	for _, p := range suites {
		name := path.Base(p)
		fmt.Fprintf(&b, "echo 'suite %s'\nmkdir -p /suites/%s && cd /suites/%s && ../%s.test -test.v -test.short -test.timeout=10m 2>&1\necho \"status %s $?\"\n",
			name, name, name, name, name)
	}
	return b.String()
}

var (
	suiteLine = regexp.MustCompile(`^suite (\S+)$`)
	endLine   = regexp.MustCompile(`^status (\S+) (\d+)$`)
	runLine   = regexp.MustCompile(`^=== (?:RUN|NAME|CONT) +(\S+)$`)
	testLine  = regexp.MustCompile(`^ *--- (PASS|FAIL|SKIP): (\S+)`)
)

// judge reads the output of the suites.
func judge(t *testing.T, output string) {
	t.Helper()
	all := strings.Split(output, "\n")
	t.Logf("guest kernel %s", all[0])
	suite, passed, ended := "", map[string]int{}, map[string]bool{}
	current, reasons := "", map[string]string{}
	for _, line := range all {
		if m := runLine.FindStringSubmatch(line); m != nil {
			current = m[1]
		} else if strings.Contains(line, "_test.go:") {
			reasons[current] = strings.TrimSpace(line)
		}
		if m := suiteLine.FindStringSubmatch(line); m != nil {
			suite = m[1]
		}
		if m := endLine.FindStringSubmatch(line); m != nil {
			ended[m[1]] = true
			if m[2] != "0" {
				t.Errorf("%s: the suite ended with status %s:\n%s", m[1], m[2], part(all, m[1]))
			}
		}
		m := testLine.FindStringSubmatch(line)
		switch {
		case m == nil:
		case m[1] == "PASS":
			passed[suite]++
		case m[1] == "SKIP":
			skipped(t, suite+"."+m[2], reasons[m[2]])
		}
	}
	for _, p := range suites {
		name := path.Base(p)
		if !ended[name] || passed[name] == 0 {
			t.Errorf("%s: %d tests passed, ended: %t\n%s", name, passed[name], ended[name], part(all, name))
		}
		t.Logf("%s: %d tests passed", name, passed[name])
	}
}

// skipped tells of a skipped test and fails when it should have been run.
func skipped(t *testing.T, test, reason string) {
	t.Helper()
	for _, l := range lacks {
		if regexp.MustCompile(l.test).MatchString(test) {
			t.Logf("skipped %s (%s): %s", test, l.why, reason)
			return
		}
	}
	t.Errorf("%s is skipped, which is not expected here: %s", test, reason)
}

// part is what a suite printed, without the names of what went well.
func part(all []string, name string) string {
	from := slices.Index(all, "suite "+name)
	if from < 0 {
		return "it never began"
	}
	var b strings.Builder
	for _, line := range all[from:] {
		if suiteLine.MatchString(line) && line != "suite "+name {
			break
		}
		if !strings.HasPrefix(strings.TrimSpace(line), "=== ") && !strings.Contains(line, "--- PASS") {
			b.WriteString("| " + line + "\n") // so that none is taken for a line of this run
		}
	}
	return b.String()
}
