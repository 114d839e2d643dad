// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"strings"
	"testing"
	"time"
)

const nonce = "N0NCE"

// split feeds a stream in pieces of the given size and returns the splitter and what it passed on.
func split(stream string, piece int) (*splitter, string) {
	var out strings.Builder
	s := newSplitter(nonce, func(p []byte) { out.Write(p) })
	for stream != "" {
		n := min(piece, len(stream))
		s.Write([]byte(stream[:n]))
		stream = stream[n:]
	}
	s.Close()
	return s, out.String()
}

const (
	initLine  = "#sluice-guest N0NCE init 1.50\n"
	startLine = "#sluice-guest N0NCE start 2.25\n"
	exitLine  = "\x1e#sluice-guest N0NCE exit 7 3.00\n"
)

func TestSplitter(t *testing.T) {
	for _, c := range []struct {
		name, in, out string
		phase         phase
		status        int
		fail          string
	}{
		{name: "nothing", phase: phaseSilent},
		{name: "init only", in: initLine, phase: phaseInit},
		{name: "whole", in: initLine + startLine + "hello\nworld" + exitLine, out: "hello\nworld", phase: phaseExited, status: 7},
		{name: "empty output", in: startLine + exitLine, phase: phaseExited, status: 7},
		{name: "last newline is the script's", in: startLine + "x\n" + exitLine, out: "x\n", phase: phaseExited, status: 7},
		{name: "binary output", in: startLine + "\x00\r\n\xff" + exitLine, out: "\x00\r\n\xff", phase: phaseExited, status: 7},
		{name: "noise before", in: "boo\r\n" + startLine + "x" + exitLine + "late", out: "x", phase: phaseExited, status: 7},
		{name: "cut in the output", in: startLine + "abc", out: "abc", phase: phaseScript},
		{name: "cut in the marker", in: startLine + "abc\x1e#sluice-guest N0NCE ex", out: "abc\x1e#sluice-guest N0NCE ex", phase: phaseScript},
		{name: "cut in the status", in: startLine + "abc\x1e#sluice-guest N0NCE exit 1", out: "abc\x1e#sluice-guest N0NCE exit 1", phase: phaseScript},
		{name: "other nonce", in: startLine + "\x1e#sluice-guest OTHER exit 1 3.0\n" + exitLine,
			out: "\x1e#sluice-guest OTHER exit 1 3.0\n", phase: phaseExited, status: 7},
		{name: "marker without its byte", in: startLine + "x\n#sluice-guest N0NCE exit 1 3.0\n" + exitLine,
			out: "x\n#sluice-guest N0NCE exit 1 3.0\n", phase: phaseExited, status: 7},
		{name: "marker without numbers", in: startLine + "\x1e#sluice-guest N0NCE exit x 3\n" + exitLine,
			out: "\x1e#sluice-guest N0NCE exit x 3\n", phase: phaseExited, status: 7},
		{name: "status out of range", in: startLine + "\x1e#sluice-guest N0NCE exit 256 3\n" + exitLine,
			out: "\x1e#sluice-guest N0NCE exit 256 3\n", phase: phaseExited, status: 7},
		{name: "endless marker", in: startLine + "\x1e#sluice-guest N0NCE exit " + strings.Repeat("1", 4096) + exitLine,
			out: "\x1e#sluice-guest N0NCE exit " + strings.Repeat("1", 4096), phase: phaseExited, status: 7},
		{name: "endless noise", in: strings.Repeat("z", 1<<20) + "\n" + startLine + exitLine, phase: phaseExited, status: 7},
		{name: "marker after endless noise", in: strings.Repeat("z", 5000) + startLine + "\n", phase: phaseSilent},
		{name: "marker of endless zeros", in: startLine + "\x1e#sluice-guest N0NCE exit 1 3." + strings.Repeat("0", 4096) + exitLine,
			out: "\x1e#sluice-guest N0NCE exit 1 3." + strings.Repeat("0", 4096), phase: phaseExited, status: 7},
		{name: "failure", in: initLine + "#sluice-guest N0NCE fail no /dev/vda after 60 seconds: 61.0\n", phase: phaseFailed, fail: "no /dev/vda after 60 seconds"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, piece := range []int{1 << 30, 4096, 7, 1} {
				s, out := split(c.in, piece)
				if out != c.out || s.phase != c.phase || s.status != c.status || s.fail != c.fail {
					t.Errorf("pieces of %d: got %q, phase %d, status %d, failure %q; want %q, %d, %d, %q",
						piece, out, s.phase, s.status, s.fail, c.out, c.phase, c.status, c.fail)
				}
			}
		})
	}
}

func TestSplitterTellsUptime(t *testing.T) {
	s, _ := split(initLine+startLine+exitLine, 5)
	if s.start != 2250*time.Millisecond || s.uptime != 3*time.Second {
		t.Errorf("got start %v, end %v", s.start, s.uptime)
	}
}

func TestSplitterPassesOutputOnAtOnce(t *testing.T) {
	var out strings.Builder
	s := newSplitter(nonce, func(p []byte) { out.Write(p) })
	s.Write([]byte(startLine + "prompt: line\n"))
	if out.String() != "prompt: line\n" {
		t.Errorf("got %q", out.String())
	}
}

// FuzzSplitter: output comes back byte for byte and however the stream is cut; no input is too strange.
func FuzzSplitter(f *testing.F) {
	for _, seed := range []string{"", "hello\n", "\n", "\x1e#sluice-guest N0NC", initLine, startLine, exitLine, "\x1e#sluice-guest N0NCE exit "} {
		f.Add([]byte(seed), 3)
	}
	f.Fuzz(func(t *testing.T, data []byte, piece int) {
		if piece < 1 {
			piece = 1
		}
		raw, rawOut := split(string(data), piece)
		whole, wholeOut := split(string(data), 1<<30)
		if raw.phase != whole.phase || raw.status != whole.status || raw.fail != whole.fail {
			t.Fatalf("pieces of %d: phase %d, %d; whole: %d, %d", piece, raw.phase, raw.status, whole.phase, whole.status)
		}
		if rawOut != wholeOut {
			t.Fatalf("pieces of %d: %q; whole: %q", piece, rawOut, wholeOut)
		}
		if strings.Contains(string(data), nonce) {
			return
		}
		s, out := split(startLine+string(data)+exitLine, piece)
		if out != string(data) || s.phase != phaseExited || s.status != 7 {
			t.Fatalf("got %q, phase %d, status %d", out, s.phase, s.status)
		}
	})
}

func TestTailKeepsTheEnd(t *testing.T) {
	for _, writes := range [][]string{{"abcdefgh"}, {"abcd", "efgh"}, {"a", "bcdefg", "h"}} {
		k := tail{max: 4}
		for _, w := range writes {
			k.Write([]byte(w))
		}
		if string(k.bytes) != "efgh" {
			t.Errorf("%q: got %q", writes, k.bytes)
		}
	}
	k := tail{max: 100}
	k.Write([]byte("one\n\r\n two \nthree"))
	if got := k.lastLines(2); got != "two\nthree" {
		t.Errorf("last lines: got %q", got)
	}
}
