// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// A client that makes noise gets a burst, then a line now and then which tells how many were left out; other texts are
// not shortened by it, and after a long silence all is as it was.
func TestANoisyClientDoesNotFillTheLog(t *testing.T) {
	var out bytes.Buffer
	now := time.Unix(0, 0)
	log := slog.New(newQuietHandler(slog.NewTextHandler(&out, nil), func() time.Time { return now })).With("export", "x")
	lines := func() int {
		n := strings.Count(out.String(), "\n")
		out.Reset()
		return n
	}
	for range 1000 {
		log.Warn("noise")
	}
	if n := lines(); n != quietBurst {
		t.Errorf("%d lines of 1000, want %d", n, quietBurst)
	}
	log.Error("something else")
	if n := lines(); n != 1 {
		t.Errorf("%d lines of another text, want 1", n)
	}
	now = now.Add(quietPause)
	for range 10 {
		log.Warn("noise")
	}
	if text := out.String(); strings.Count(text, "\n") != 1 || !strings.Contains(text, "left_out=980") {
		t.Errorf("after a pause: %q, want one line that tells of 980", text)
	}
	out.Reset()
	now = now.Add(2 * quietBurst * quietPause)
	for range 1000 {
		log.Warn("noise")
	}
	if n := lines(); n != quietBurst {
		t.Errorf("after a long silence: %d lines, want %d", n, quietBurst)
	}
}
