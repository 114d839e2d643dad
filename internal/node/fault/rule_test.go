// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"strings"
	"testing"
)

func TestTextsThatAreWrong(t *testing.T) {
	for _, c := range []struct{ text, words string }{
		{"erase error=EIO", "unknown operation"},
		{"read", "says nothing to do"},
		{"read after=3", "says nothing to do"},
		{"read error=EFOO", "unknown error"},
		{"read error=0", "unknown error"},
		{"read error=EIO count=0", "never apply"},
		{"read error=EIO count=-1", "no number"},
		{"read error=EIO error=EIO", "twice"},
		{"read error=EIO size=1", "unknown key"},
		{"read error=EIO 0-1", "key=value"},
		{"read 5-3 error=EIO", "ends before"},
		{"read 5- error=EIO", "no number of bytes"},
		{"read 9999999999999T error=EIO", "no number of bytes"},
		{"read 0x10 error=EIO", "no number of bytes"},
		{"flush 0-1 error=EIO", "no range"},
		{"read delay=-1s", "delay"},
		{"read delay=2h", "delay"},
		{"read delay=x", "duration"},
		{"read error=EIO\nwrite", "line 2"},
		{strings.Repeat("read error=EIO;", maxRules+1), "more than"},
		{strings.Repeat(" ", maxText+1), "longer"},
	} {
		if _, err := parse(c.text); err == nil || !strings.Contains(err.Error(), c.words) {
			t.Errorf("%.40q: %v, want %q", c.text, err, c.words)
		}
	}
}

// What is parsed, written and parsed again is the same, and nothing makes the parser panic.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"read 4096-8191 error=EIO count=1 after=3; write delay=10ms; flush error=ENOSPC; read short=512",
		"any error=5", "write 1M short=512 # torn", "discard 1G-2T error=EOPNOTSUPP\nwrite-zeroes error=ENOTSUP", "", ";", "read =", "read 0-0 short=0",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		rules, err := parse(text)
		if err != nil {
			return
		}
		var again []string
		for _, r := range rules {
			again = append(again, r.String())
		}
		second, err := parse(strings.Join(again, ";"))
		if err != nil {
			t.Fatalf("%q becomes %q: %v", text, again, err)
		}
		if len(second) != len(rules) {
			t.Fatalf("%q: %d statements become %d", text, len(rules), len(second))
		}
		for i := range second {
			if second[i].String() != again[i] {
				t.Fatalf("%q becomes %q", again[i], second[i])
			}
		}
	})
}
