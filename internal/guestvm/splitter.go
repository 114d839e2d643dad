// SPDX-License-Identifier: Apache-2.0

package guestvm

import (
	"bytes"
	"strconv"
	"strings"
	"time"
)

// A phase is how far a guest has come, as its marker lines tell.
type phase int

const (
	phaseSilent phase = iota // no marker yet: firmware and kernel
	phaseInit                // process 1 runs and prepares
	phaseScript              // the script runs
	phaseExited              // the script has ended
	phaseFailed              // the guest could not be prepared
)

var phaseText = [...]string{
	phaseSilent: "before its first process ran",
	phaseInit:   "while it loaded modules and waited for its disks",
	phaseScript: "while the script ran",
	phaseExited: "after the script had ended",
	phaseFailed: "after it had given up",
}

const (
	markerWord = "#sluice-guest "
	// outputEnd stands before the exit marker. It is no newline, so that the end of a line is passed on at once.
	outputEnd = "\x1e"
	// markerMax bounds a marker line; a longer one is no marker. The longest that init.sh prints names a module's path.
	markerMax = 1024
)

// A splitter takes the bytes of the guest's second serial line apart: marker lines, and the script's output between
// them, which it passes on as it comes. It holds back only what may yet become the exit marker. The marker lines are
// described in init.sh. It is not safe for concurrent use.
type splitter struct {
	marker string // markerWord, nonce and a space
	output func([]byte)

	phase   phase
	pending []byte
	skip    bool // the beginning of the line was thrown away
	status  int
	uptime  time.Duration // of the last marker
	start   time.Duration // uptime at the start marker
	fail    string
}

func newSplitter(nonce string, output func([]byte)) *splitter {
	return &splitter{marker: markerWord + nonce + " ", output: output}
}

// Write takes any piece of the stream; it never fails.
func (s *splitter) Write(p []byte) (int, error) {
	s.pending = append(s.pending, p...)
	for s.step() {
	}
	return len(p), nil
}

// Close passes on what was held back: no more bytes will come to make it a marker.
func (s *splitter) Close() {
	if s.phase == phaseScript {
		s.emit(len(s.pending))
	}
	s.pending = nil
}

// step consumes one line or one run of output and tells whether more may be done at once.
func (s *splitter) step() bool {
	switch s.phase {
	case phaseSilent, phaseInit:
		return s.stepLine()
	case phaseScript:
		return s.stepOutput()
	default: // the script has ended: whatever still comes is nobody's
		s.pending = s.pending[:0]
		return false
	}
}

func (s *splitter) stepLine() bool {
	end := bytes.IndexByte(s.pending, '\n')
	if end < 0 {
		if len(s.pending) > markerMax {
			s.pending, s.skip = s.pending[:0], true
		}
		return false
	}
	line, long := string(s.pending[:end]), s.skip || end > markerMax
	s.drop(end + 1)
	s.skip = false
	if rest, ok := strings.CutPrefix(line, s.marker); ok && !long {
		s.mark(rest)
	}
	return true
}

// stepOutput looks for outputEnd and an exit marker and passes on all that stands before.
func (s *splitter) stepOutput() bool {
	exit := outputEnd + s.marker + "exit "
	at := bytes.Index(s.pending, []byte(exit))
	if at < 0 {
		s.emit(len(s.pending) - partialSuffix(s.pending, exit))
		return false
	}
	s.emit(at)
	body := s.pending[len(exit):]
	end := bytes.IndexByte(body, '\n')
	if end < 0 && len(body) <= markerMax {
		return false
	}
	if end < 0 || end > markerMax || !s.mark("exit "+string(body[:end])) {
		s.emit(len(exit)) // looks like one and is none
		return true
	}
	s.drop(len(exit) + end + 1)
	return true
}

// mark takes what follows the nonce in a marker line and tells whether it was understood.
func (s *splitter) mark(text string) bool {
	words := strings.Fields(text)
	if len(words) < 2 {
		return false
	}
	seconds, err := strconv.ParseFloat(words[len(words)-1], 64)
	if err != nil || !(seconds >= 0 && seconds < 1e9) {
		return false
	}
	var next phase
	status := 0
	switch {
	case words[0] == "init" && len(words) == 2:
		next = phaseInit
	case words[0] == "start" && len(words) == 2:
		next = phaseScript
	case words[0] == "exit" && len(words) == 3:
		next = phaseExited
		if status, err = strconv.Atoi(words[1]); err != nil || status < 0 || status > 255 {
			return false
		}
	case words[0] == "fail":
		next = phaseFailed
		s.fail = strings.TrimSuffix(strings.Join(words[1:len(words)-1], " "), ":")
	default:
		return false
	}
	s.phase, s.status, s.uptime = next, status, time.Duration(seconds*float64(time.Second))
	if next == phaseScript {
		s.start = s.uptime
	}
	return true
}

func (s *splitter) emit(n int) {
	if n > 0 {
		s.output(s.pending[:n])
		s.drop(n)
	}
}

func (s *splitter) drop(n int) {
	s.pending = s.pending[:copy(s.pending, s.pending[n:])]
}

// partialSuffix returns the length of the longest end of p that is a beginning of word, but not all of it.
func partialSuffix(p []byte, word string) int {
	for n := min(len(p), len(word)-1); n > 0; n-- {
		if string(p[len(p)-n:]) == word[:n] {
			return n
		}
	}
	return 0
}
