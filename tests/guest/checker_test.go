// SPDX-License-Identifier: Apache-2.0

package guest

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sluice-blk/sluice/tests/guest/stamp"
)

// aheadMax is how many writes of a job can have reached the disk behind the last flush that was told of. The guest's
// serial line holds back up to a page of output, some 300 such lines, and that is lost with the guest.
const aheadMax = 400 * stamp.FlushEvery

// checker knows what an image must hold after each round.
type checker struct {
	path      string
	seed      uint64
	flushedBy map[int64]stamp.Stamp    // by sector: the last write that was flushed
	writes    map[string][]stamp.Write // by round and job, see key: those that can have been made

	flushed uint64 // writes that were
	checked int    // sectors
	later   int    // of them, with a write behind the last flush
}

// round takes what the guest said and compares the image with it.
func (c *checker) round(round uint32, output string) error {
	count, err := parseFlushed(output)
	if err != nil {
		return err
	}
	for number, n := range count {
		c.replay(round, number, n)
	}
	return c.compare()
}

// parseFlushed reads how many writes of each job were flushed. A line that the death of the guest cut short says nothing.
func parseFlushed(output string) (count [jobs]uint64, err error) {
	whole := strings.Split(output, "\n")
	for _, line := range whole[:len(whole)-1] {
		if strings.HasPrefix(line, "writer:") {
			return count, fmt.Errorf("the guest's writer failed: %s", line)
		}
		var job int
		var n uint64
		if _, err := fmt.Sscanf(line, "flushed %d %d", &job, &n); err == nil && job < jobs {
			count[job] = max(count[job], n)
		}
	}
	return count, nil
}

func newChecker(path string, seed uint64) *checker {
	return &checker{path: path, seed: seed, flushedBy: make(map[int64]stamp.Stamp), writes: make(map[string][]stamp.Write)}
}

func key(round, job uint32) string { return fmt.Sprintf("%d/%d", round, job) }

// replay plays a job's writes again: the flushed ones, and those that may have been made behind them.
func (c *checker) replay(round uint32, number int, flushed uint64) {
	c.flushed += flushed
	job := stamp.NewJob(c.seed, round, number)
	var writes []stamp.Write
	for n := uint64(1); n <= flushed+aheadMax; n++ {
		w := job.Next()
		writes = append(writes, w)
		for i := range w.Sectors {
			if n <= flushed {
				s := w.Stamp
				s.Sector += i
				c.flushedBy[s.Sector] = s
			}
		}
	}
	c.writes[key(round, uint32(number))] = writes
}

// issued tells whether a write with this stamp can have been made.
func (c *checker) issued(s stamp.Stamp) bool {
	writes := c.writes[key(s.Round, s.Job)]
	if s.Seq < 1 || s.Seq > uint64(len(writes)) {
		return false
	}
	w := writes[s.Seq-1]
	return s.Sector >= w.Sector && s.Sector < w.Sector+w.Sectors
}

// compare looks at each sector: it holds a stamp that was written there, and none older than the flushed one.
func (c *checker) compare() error {
	data, err := os.ReadFile(c.path)
	if err != nil {
		return err
	}
	empty := make([]byte, stamp.SectorSize)
	for sector := range int64(jobs * stamp.JobSectors) {
		p := data[sector*stamp.SectorSize:][:stamp.SectorSize]
		must, flushed := c.flushedBy[sector]
		if !flushed && bytes.Equal(p, empty) {
			continue
		}
		s, err := stamp.Decode(p)
		switch {
		case err != nil:
			return fmt.Errorf("sector %d: %w, flushed was %+v", sector, err, must)
		case s.Sector != sector || !c.issued(s):
			return fmt.Errorf("sector %d holds %+v, which was never written to it", sector, s)
		case flushed && must.Later(s):
			return fmt.Errorf("sector %d holds %+v, but the later %+v was flushed", sector, s, must)
		}
		c.checked++
		if !flushed || s.Later(must) {
			c.later++
		}
	}
	return nil
}

// Goal: the checker finds what it is there to find.
func TestCheckerFindsLostWrites(t *testing.T) {
	const output = "writing\nflushed 1 16\nflushed 2 8\nflushed 1 2"
	disk := func(t *testing.T) (*checker, []byte) {
		c := newChecker("", 7)
		data := make([]byte, jobs*stamp.JobSectors*stamp.SectorSize)
		for number, n := range map[int]int{1: 18, 2: 8} {
			job := stamp.NewJob(7, 0, number)
			for range n {
				w := job.Next()
				w.Fill(data[w.Sector*stamp.SectorSize:])
			}
		}
		return c, data
	}
	zero := func(data []byte, sector int64) { clear(data[sector*stamp.SectorSize:][:stamp.SectorSize]) }
	first := stamp.NewJob(7, 0, 2).Next()
	for _, c := range []struct {
		name  string
		spoil func(data []byte)
		want  string
	}{
		{"all is there", func([]byte) {}, ""},
		{"a flushed sector is empty", func(d []byte) { zero(d, first.Sector) }, "no magic number"},
		{"a byte is wrong", func(d []byte) { d[first.Sector*stamp.SectorSize+99] ^= 1 }, "checksum"},
		{"a sector is somewhere else", func(d []byte) {
			at := first.Sector * stamp.SectorSize
			copy(d[:stamp.SectorSize], d[at:at+stamp.SectorSize])
		}, "never written to it"},
		{"an older write came back", func(d []byte) {
			job := stamp.NewJob(7, 0, 1)
			for range 8 {
				w := job.Next()
				w.Fill(d[w.Sector*stamp.SectorSize:])
			}
		}, "was flushed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			check, data := disk(t)
			c.spoil(data)
			check.path = image(t, "disk", 0)
			if err := os.WriteFile(check.path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			err := check.round(0, output)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}
