// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"bytes"
	"strings"
)

// A tail keeps the last bytes written to it. The zero value keeps nothing. It is not safe for concurrent use.
type tail struct {
	max   int
	bytes []byte
}

func (t *tail) Write(p []byte) (int, error) {
	n := len(p)
	if n > t.max {
		p = p[n-t.max:]
	}
	t.bytes = append(t.bytes, p...)
	if over := len(t.bytes) - t.max; over > 0 {
		t.bytes = t.bytes[:copy(t.bytes, t.bytes[over:])]
	}
	return n, nil
}

// lastLines returns the last n lines that are not empty, fit for an error message.
func (t *tail) lastLines(n int) string {
	var lines []string
	for line := range bytes.Lines(t.bytes) {
		if text := strings.TrimSpace(string(line)); text != "" {
			lines = append(lines, text)
		}
	}
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// line returns the first line that is kept and contains text, "" when there is none.
func (t *tail) line(text string) string {
	for line := range bytes.Lines(t.bytes) {
		if bytes.Contains(line, []byte(text)) {
			return strings.TrimSpace(string(line))
		}
	}
	return ""
}
