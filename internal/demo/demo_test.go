// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sluice-blk/sluice/aio"
)

const said = `cache: write back
/mnt: 1 GiB (1 bytes) trimmed
fio: write
note: both iodepth >= 1 and synchronous I/O engine are selected
{"jobs":[{"error":0,"read":{"iops":0,"clat_ns":{}},"write":{"iops":250.5,"clat_ns":{"percentile":{"50.000000":1000,"99.000000":9000}}}}]}
end:
sum: aaaa  file1
sum: bbbb  file2
fio: 1
{
  "jobs" : [ { "error" : 0, "read" : { "iops" : 7000.0, "clat_ns" : { "percentile" : { "50.000000" : 2000, "99.000000" : 3000 } } } } ]
}
end:
`

func TestWhatTheGuestSaid(t *testing.T) {
	var s guestSaid
	if err := s.parse([]byte(said)); err != nil {
		t.Fatal(err)
	}
	if s.cache != "write back" || s.write.iops != 250.5 || s.write.p99 != 9*time.Microsecond {
		t.Errorf("got cache %q, write %+v", s.cache, s.write)
	}
	if len(s.sums) != 2 || s.sums["file1"] != "aaaa" || s.sums["file2"] != "bbbb" {
		t.Errorf("got sums %v", s.sums)
	}
	if len(s.rows) != 1 || s.rows[1] != (fioRow{7000, 2 * time.Microsecond, 3 * time.Microsecond}) {
		t.Errorf("got rows %v", s.rows)
	}
}

func TestWhatTheGuestSaidWrong(t *testing.T) {
	for name, text := range map[string]string{
		"nothing":        "",
		"no checksums":   "cache: write back\n",
		"row not a name": "sum: a  b\nfio: x\n{}\nend:\n",
		"no json":        "sum: a  b\nfio: 1\nend:\n",
		"half a json":    "sum: a  b\nfio: 1\n{\"jobs\":[\nend:\n",
		"an error":       "sum: a  b\nfio: 1\n{\"jobs\":[{\"error\":5}]}\nend:\n",
		"sum alone":      "sum: a\n",
	} {
		if err := new(guestSaid).parse([]byte(text)); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}

func FuzzWhatTheGuestSaid(f *testing.F) {
	f.Add([]byte(said))
	f.Fuzz(func(_ *testing.T, text []byte) {
		_ = new(guestSaid).parse(text) // must come back, whatever it says
	})
}

// The demo without a guest, from end to end, small.
func TestDemoWithTheBuiltInDriver(t *testing.T) {
	for _, format := range []string{"raw", "qcow2"} {
		t.Run(format, func(t *testing.T) { demoWithTheBuiltInDriver(t, format) })
	}
}

func demoWithTheBuiltInDriver(t *testing.T, format string) {
	var out bytes.Buffer
	r, err := Run(t.Context(), Options{Format: format, Dir: t.TempDir(), Size: 64 << 20, Runtime: 300 * time.Millisecond, NoGuest: true, Out: &out})
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Rows) < 4 || len(r.Checks) == 0 {
		t.Fatalf("got %d rows, %d checks", len(r.Rows), len(r.Checks))
	}
	for _, row := range r.Rows {
		switch {
		case row.IOPS <= 0 || row.P50 <= 0 || row.Requests == 0:
			t.Errorf("%v batching %v: nothing was measured", row.Engine, row.Batching)
		case row.Engine != aio.EngineThreads && row.Batching && row.PerSubmission < 4:
			t.Errorf("%v: %.1f requests a submission with batching", row.Engine, row.PerSubmission)
		case !row.Batching && row.PerSubmission > 1.001:
			t.Errorf("%v: %.3f requests a submission without batching", row.Engine, row.PerSubmission)
		}
	}
	if err := r.WriteText(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"no guest was asked for", "linux-aio", "requests/submission"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the report does not say %q:\n%s", want, out.String())
		}
	}
}

type brokenWriter struct{}

func (brokenWriter) Write([]byte) (int, error) { return 0, errors.New("gone") }

func TestReportTellsThatItCannotBeWritten(t *testing.T) {
	if err := (&Report{}).WriteText(brokenWriter{}); err == nil {
		t.Error("no error")
	}
}
